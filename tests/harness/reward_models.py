"""Tiny reward models: sequence classifiers of transformers' with fixed weights, and a tokenizer of characters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model

CHARACTERS = "0123456789+-= "


def write_reward_model(folder: Path, *, num_labels: int = 1, kind: str = "qwen3", **fields: Any) -> Path:
    """Write a classifier with random weights, drawn by a fixed seed, to a folder; return that."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,  # or all conversations would be worth much the same
    }
    write_new_model(folder, NewModel(config={"model_type": kind, **sizes}, characters=CHARACTERS))
    config = AutoConfig.from_pretrained(folder, num_labels=num_labels)
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    return folder


def plain_score(folder: Path, text: str) -> float:
    """Return what transformers by itself says of a text: alone, without padding."""
    import torch

    model, tokenizer = _loaded(folder)
    token_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(token_ids).logits[0, 0])


def plain_reward(folder: Path, *messages: tuple[str, str]) -> float:
    """Return the same of a conversation, by the tokenizer's chat template; messages are roles and contents."""
    _, tokenizer = _loaded(folder)
    conversation = [{"role": role, "content": content} for role, content in messages]
    return plain_score(folder, tokenizer.apply_chat_template(conversation, tokenize=False))


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder)
