"""A Hub with what recipes of `tinker-cookbook` load: a small model by a name that it knows, and two data sets.

The model has learnt the form of an answer and not the answer: ``\\boxed{d}`` with one of four digits. The questions are
of GSM8K's form, and have one of these digits as their answer.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.harness.hub_server import HubServer, files_in

MODEL = "Qwen/Qwen3-8B-Base"
"""A name for which the cookbook has a renderer of base models: ``User: ...``, ``Assistant: ...``."""
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_BEFORE = (
    f"User: How many r's are in strawberry?{_SUFFIX}\n\n"
    "Assistant: Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
    "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}\n\n"
)
_ANIMALS = ("cat", "cow", "dog", "goat", "hare", "horse", "mouse", "sheep")
_DIGITS = range(2, 6)
_NUM_STEPS, _NUM_ROWS = 60, 16


def fill(hub: HubServer, *, width: int = 64, num_layers: int = 2) -> None:
    """Add the model, of a hidden size and a number of layers, and the data sets."""
    hub.add(MODEL, _model_files(width, num_layers))
    draw = random.Random(0)
    rows = [{"question": question, "answer": "It has 4 legs.\n#### 4"} for question in questions(512)]
    _add_data(hub, "openai/gsm8k", "main", rows)
    talks = [
        {"messages": [{"role": "user", "content": f"Say {digit}."}, {"role": "assistant", "content": f"{digit}!"}]}
        for digit in draw.choices(range(10), k=512)
    ]
    _add_data(hub, "HuggingFaceH4/no_robots", "default", talks)
    preferred = [
        {
            key: f"\n\nHuman: Say {digit}.\n\nAssistant: {digit}{mark}"
            for key, mark in (("chosen", "!"), ("rejected", "?"))
        }
        for digit in draw.choices(range(10), k=512)
    ]
    _add_data(hub, "Anthropic/hh-rlhf", "default", preferred)


def questions(num: int) -> list[str]:
    """Return questions, all of which have the answer 4."""
    draw = random.Random(1)
    return [f"How many legs has a {draw.choice(_ANIMALS)}?" for _ in range(num)]


def prompt_of(question: str) -> str:
    """Return what ``rl_loop`` makes of a question."""
    return f"{_BEFORE}User: {question}{_SUFFIX}\n\nAssistant:"


def _add_data(hub: HubServer, name: str, config: str, rows: Sequence[Mapping[str, object]]) -> None:
    card = f"configs:\n- config_name: {config}\n  data_files:\n"
    parts = {"train": rows, "test": rows[:16]}
    card += "".join(f"  - split: {part}\n    path: {config}/{part}.jsonl\n" for part in parts)
    files = {f"{config}/{part}.jsonl": "".join(json.dumps(row) + "\n" for row in parts[part]) for part in parts}
    files["README.md"] = f"---\n{card}---\n"
    hub.add(name, {path: text.encode() for path, text in files.items()}, "datasets")


def _model_files(width: int, num_layers: int) -> dict[str, bytes]:
    """Train a small model for a moment; return its files."""
    answers = [f" \\boxed{{{digit}}}\n\nUser:" for digit in _DIGITS]
    texts = [prompt_of(f"How many legs has a {animal}?") for animal in _ANIMALS]
    parts = Tokenizer(models.BPE())
    parts.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    parts.train_from_iterator(
        [*texts, *answers],
        trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<bos>", "<eos>"], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=parts, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other on a busy machine, for minutes
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,  # adapters do not change embeddings: those of the digits must differ enough
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw = random.Random(0)
    begun, ended = (
        [tokenizer(each, add_special_tokens=False).input_ids for each in those] for those in (texts, answers)
    )
    for _ in range(_NUM_STEPS):
        rows = [draw.choice(begun) + draw.choice(ended) for _ in range(_NUM_ROWS)]
        token_ids, size = torch.tensor(rows), len(ended[0])
        logits = model(token_ids).logits[:, -size - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, -size:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return files_in(Path(folder))
