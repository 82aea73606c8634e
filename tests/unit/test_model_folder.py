"""A model's folder is looked through before anything starts: its tensors must be those of its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config, build_config
from tandem.coordinator.cli import main
from tandem.coordinator.model_folders import check_model
from tandem.refit.adapters.catalogue import make_shape

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "eos_token_id": 2,
}
Tensors = dict[str, np.ndarray[Any, Any]]
FILE = Path("model/model.safetensors")


def make_config(**generation: Any) -> Config:
    return build_config(
        {
            "algorithm": "grpo",
            "policy": {"model_name": "model", "generation": generation},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def make_model(**over: Any) -> None:
    """Write a model's folder, with the tensors that its configuration implies."""
    config = SIZES | over
    FILE.parent.mkdir()
    (FILE.parent / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    known = config if config["model_type"] == "qwen3" else config | {"model_type": "qwen3"}
    save_file({t.name: random.normal(size=t.shape).astype(np.float32) for t in make_shape(known).tensors}, FILE)


def change(damage: Callable[[Tensors], None]) -> None:
    tensors = load_file(FILE)
    damage(tensors)
    save_file(tensors, FILE)


def configure(**over: Any) -> None:
    path = FILE.with_name("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | over))


def test_a_model_that_is_what_it_says_has_no_notice() -> None:
    make_model()
    assert check_model(make_config(stop_token_ids=[3, 23])) == []


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[dict[str, Any], Callable[[Tensors], None], dict[str, Any], str]] = {
    "fewer layers said": (
        {},
        lambda tensors: None,
        {"num_hidden_layers": 1},
        r"model.safetensors: model.layers.1.\S+ is of a layer beyond the 1 of config.json",
    ),
    "more layers said": (
        {},
        lambda tensors: None,
        {"num_hidden_layers": 3},
        r": model.layers.2.\S+ is missing, which config.json implies",
    ),
    "a tensor is missing": ({}, lambda tensors: tensors.__delitem__(UP), {}, f": {UP} is missing"),
    "another shape": (
        {},
        lambda tensors: None,
        {"intermediate_size": 16},
        r"model.safetensors: model.layers.0.mlp.gate_proj.weight has shape \(12, 8\), config.json implies \(16, 8\)",
    ),
    "another vocabulary": (
        {},
        lambda tensors: None,
        {"vocab_size": 25},
        r"model.embed_tokens.weight has shape \(24, 8\), config.json implies \(25, 8\)",
    ),
    "biases that are not said": (
        {},
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32)}),
        {},
        "model.layers.0.self_attn.q_proj.bias is not a tensor of the model that config.json describes",
    ),
    "integers": (
        {},
        lambda tensors: tensors.update({UP: tensors[UP].astype(np.int8)}),
        {},
        rf"model.safetensors: {UP} is of integers \(I8\)",
    ),
    "another head": (
        {"tie_word_embeddings": True},
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
        {},
        "lm_head.weight is not model.embed_tokens.weight, though config.json says tie_word_embeddings: true",
    ),
    "a head of another type": (
        {"tie_word_embeddings": True},
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].astype(np.float16)}),
        {},
        "lm_head.weight is not model.embed_tokens.weight",
    ),
    "integers in an unknown architecture": (
        {"model_type": "gemma2"},
        lambda tensors: tensors.update({UP: tensors[UP].astype(np.int32)}),
        {},
        rf"{UP} is of integers \(I32\)",
    ),
    "layers of an unknown architecture": (
        {"model_type": "gemma2"},
        lambda tensors: None,
        {"num_hidden_layers": 1},
        "is of a layer beyond the 1 of config.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_those_of_the_configuration_are_refused(damage: str) -> None:
    over, inflict, said, complaint = DAMAGES[damage]
    make_model(**over)
    assert check_model(make_config()) == []
    change(inflict)
    configure(**said)
    with pytest.raises(ModelError, match=rf"^policy.model_name: model.*{complaint}"):
        check_model(make_config())


def test_what_does_no_harm_is_accepted() -> None:
    make_model(tie_word_embeddings=True)
    change(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    change(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}))
    assert check_model(make_config()) == []


def test_a_tensor_that_nobody_reads_is_a_notice() -> None:
    make_model()
    change(lambda tensors: tensors.update({"v_head.weight": np.ones(2)}))
    (notice,) = check_model(make_config())
    assert notice.startswith("policy.model_name: model/model.safetensors: v_head.weight is not read")


def test_layers_that_predict_further_tokens_are_no_damage() -> None:
    make_model(num_nextn_predict_layers=1)
    change(lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": np.ones(2)}))
    (notice,) = check_model(make_config())
    assert "model.layers.2.eh_proj.weight is not read" in notice


def test_an_end_token_outside_of_the_vocabulary_is_a_notice() -> None:
    make_model(eos_token_id=24)
    FILE.with_name("generation_config.json").write_text(json.dumps({"eos_token_id": [2, 99]}))
    assert check_model(make_config()) == [
        "model/config.json: eos_token_id 24 is not a token of the model, which has 24",
        "model/generation_config.json: eos_token_id 99 is not a token of the model, which has 24",
    ]


def test_a_stop_token_outside_of_the_vocabulary_is_refused() -> None:
    make_model()
    with pytest.raises(ConfigError, match=r"policy.generation.stop_token_ids: 24 is not a token of the model in model"):
        check_model(make_config(stop_token_ids=[2, 24]))


def test_check_looks_through_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    Path("config.yaml").write_text(
        "{algorithm: grpo, policy: {model_name: model}, data: {dataset_name: reasoning_gym, task: chain_sum}}"
    )
    configure(num_hidden_layers=1)
    assert main(["check", "config.yaml"]) == 2, "before any process starts, beside what else is wrong"
    assert "is of a layer beyond the 1 of config.json" in capsys.readouterr().err
