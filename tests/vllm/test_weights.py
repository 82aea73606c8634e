"""What a refit leaves in vLLM's parameters is what vLLM's own loader makes of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import reference_logprobs, request, run_all

from tandem.common.errors import ModelError, RefitError
from tandem.config.schema.generation import VllmCfg
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.vllm import insides
from tandem.rollout.engines.vllm.engine import engine_arguments
from tests.vllm.vllm_harness import (
    CHANGES,
    FAMILIES,
    all_parameters,
    live_parameters,
    refit,
    running,
    tiny_model,
    train,
)

PROMPT = (2, 7, 1, 8)
SETTINGS = VllmCfg(precision="float32", max_model_len=128)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Have vLLM load a checkpoint by itself; return its parameters."""
    arguments = engine_arguments(folder, SETTINGS, {"kv_cache_memory_bytes": 2**26})
    llm = insides.InProcessLlm({**arguments, "load_format": "safetensors"})
    try:
        return all_parameters(llm)[0]
    finally:
        llm.close()


def digests_of(model: Any) -> dict[str, int]:
    """Return the digest of every tensor of a model."""
    weights = weights_of(model)
    digests = digest_layout(weights.layout, weights.storages).tolist()
    return dict(zip((tensor.name for tensor in weights.layout.tensors), digests, strict=True))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, {"tie_word_embeddings": ties}) for name in CHANGES for ties in (False, True)),
        *((name, {"tie_word_embeddings": name == "gemma3_text"}) for name in FAMILIES),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_a_refit_equals_load_weights(architecture: str, changes: dict[str, bool], tmp_path: Path) -> None:
    model = tiny_model(architecture, tmp_path / "model", **changes)
    train(model, seed=0)  # biases are no longer zero, norms no longer one
    model.save_pretrained(tmp_path / "model")
    expected = load(tmp_path / "model")
    with running(tmp_path / "model") as engine:
        (before,) = all_parameters(engine._llm)
        assert not any(torch.equal(held, expected[name]) for name, held in before.items())
        pointers = {name: held.data_ptr() for name, held in live_parameters(engine).items()}
        refit(engine, model, 0)
        (found,) = all_parameters(engine._llm)
        assert found.keys() == expected.keys()
        for name, held in found.items():
            assert torch.equal(held, expected[name]), name
        assert {name: held.data_ptr() for name, held in live_parameters(engine).items()} == pointers
        made = run_all(engine, [request(0, PROMPT)])[0]
        assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-4
    assert ("lm_head.weight" in found) != changes["tie_word_embeddings"]
    assert any(name.endswith("down_proj.bias") for name in found) == ("mlp_bias" in changes)
    assert any(name.endswith("w13_weight") for name in found) == architecture.endswith("moe")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_aliases_are_digested_and_computed_with(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, tmp_path / "model", vocab_size=64)  # no padding, so that embeddings can be aliased
    with running(tmp_path / "model") as engine:
        source = refit(engine, model, 0, allow_alias=True)
        own = digests_of(source)
        (held,), (layout,) = engine.digest_task(None).results(), engine.layouts()
        assert dict(zip((t.name for t in layout.tensors), held.tolist(), strict=True)) == own
        embedding = live_parameters(engine)["model.embed_tokens.weight"]
        with torch.no_grad():  # an optimizer step shows through
            source.model.embed_tokens.weight.mul_(0.5)
        assert torch.equal(embedding, source.model.embed_tokens.weight)
        engine.apply(1, 60.0)
        made = run_all(engine, [request(0, PROMPT)])[0]
        assert made.versions_T.tolist() == [1] * 12
        assert np.abs(made.logprobs_T - reference_logprobs(source, PROMPT, made.token_ids_T)).max() < 1e-4


def test_nothing_is_generated_before_the_first_refit(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    with running(tmp_path / "model") as engine:
        engine.add_request(request(0, PROMPT))
        with pytest.raises(RefitError, match="no whole weight version"):
            engine.step()
        refit(engine, model, 3)
        train(model, seed=1)
        assert engine.version == 3


def test_fields_of_the_configuration_can_be_other_than_in_the_folder(tmp_path: Path) -> None:
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    tiny_model("llama", tmp_path / "model")
    model = tiny_model("llama", tmp_path / "changed", **changes)
    with running(tmp_path / "model", config_overrides=changes) as engine:
        refit(engine, model, 0)
        made = run_all(engine, [request(0, PROMPT)])[0]
        assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-4


def test_a_model_that_cannot_be_refitted_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path / "model", head_dim=16)
    with pytest.raises(ModelError, match="takes heads of 32, 64"), running(tmp_path / "model"):
        pass
