"""vLLM generates with weights in float8 and block scales, which refits make on the way in."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import reference_logprobs, request, run_all

from tandem.common.config.schema.generation import VllmCfg
from tandem.common.errors import NotSupportedYet
from tandem.rollout.engines.vllm import float8
from tandem.rollout.engines.vllm.engine import VllmEngine
from tests.vllm.vllm_harness import live_parameters, refit, tiny_model, train

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Fused parts end where blocks do, as vLLM wants it."""
PROMPT = (2, 7, 1, 8)
SETTINGS = VllmCfg(precision="fp8", max_model_len=128)
LARGEST = 448.0
"""The largest finite float8_e4m3fn (arXiv:2209.05433, table 1)."""
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 256),
    "v_proj": ("qkv_proj", 384),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 384),
}
"""Name and first row, in vLLM."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[VllmEngine, Any]]:
    """An engine whose activations are in float32, so that numbers can be compared closely; its model."""
    monkeypatch.setattr(float8, "ACTIVATIONS", "float32")
    model = tiny_model("qwen3", tmp_path / "model", **SIZES)
    engine = VllmEngine(tmp_path / "model", SETTINGS, extra={"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32})
    yield engine, model
    engine.close()


def quantised(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise block by block, one at a time; return values and scales."""
    rows, columns = (math.ceil(size / 128) for size in weight_NK.shape)
    values_NK, scales_BC = torch.zeros(weight_NK.shape).to(torch.float8_e4m3fn), torch.ones(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale = weight_NK[block].abs().max() / LARGEST
            scales_BC[row, column] = scale
            values_NK[block] = (weight_NK[block] / scale).to(torch.float8_e4m3fn)
    return values_NK, scales_BC


def linear_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: held.detach() for name, held in model.named_parameters() if "proj.weight" in name}


def as_computed_with(model: Any) -> Any:
    """Return a model with the weights that are left of it in float8, in float32."""
    rounded = copy.deepcopy(model)
    for held in linear_weights(rounded).values():
        values_NK, scales_BC = quantised(held)
        for row, column in torch.cartesian_prod(*map(torch.arange, scales_BC.shape)).tolist():
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            held[block] = values_NK[block].float() * scales_BC[row, column]
    return rounded


def test_a_refit_makes_what_a_plain_quantiser_makes(engine: tuple[VllmEngine, Any]) -> None:
    vllm, model = engine
    for version in range(2):
        train(model, seed=version)
        refit(vllm, model, version)
        held = live_parameters(vllm)
        weights = linear_weights(model)
        assert len(weights) == 7 * model.config.num_hidden_layers
        for name, weight in weights.items():
            *prefix, part, _ = name.split(".")
            fused, first = FUSED.get(part, (part, 0))
            values_NK, scales_BC = quantised(weight)
            of_fused = ".".join([*prefix, fused, "weight"])
            rows, blocks = slice(first, first + len(weight)), slice(first // 128, first // 128 + len(scales_BC))
            found = held[of_fused][rows].view(torch.uint8)
            assert torch.equal(found, values_NK.view(torch.uint8)), name
            assert torch.equal(held[f"{of_fused}_scale_inv"][blocks], scales_BC), name
        assert vllm.misquantised() == ()


def test_log_probabilities_are_those_of_the_quantised_model(engine: tuple[VllmEngine, Any]) -> None:
    vllm, model = engine
    for version in range(2):
        train(model, seed=version)
        refit(vllm, model, version)
        requests = [request(number, PROMPT, max_new_tokens=24) for number in range(8)]
        completions = run_all(vllm, requests)
        rounded, off = as_computed_with(model), 0.0
        for made in completions.values():
            found, tokens = made.logprobs_T, made.token_ids_T
            assert np.abs(found - reference_logprobs(rounded, PROMPT, tokens)).max() < 1e-4
            off = max(off, float(np.abs(found - reference_logprobs(model, PROMPT, tokens)).max()))
        assert off > 1e-3, "nothing was rounded"


def test_experts_in_float8_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", tmp_path / "model", hidden_size=256, head_dim=64, moe_intermediate_size=128)
    with pytest.raises(NotSupportedYet, match="fp8 for a mixture of experts"):
        VllmEngine(tmp_path / "model", SETTINGS, extra={"kv_cache_memory_bytes": 2**26})
