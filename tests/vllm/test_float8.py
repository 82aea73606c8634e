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

from tandem.rollout.engines.vllm import float8
from tandem.rollout.engines.vllm.engine import VllmEngine
from tests.vllm.vllm_harness import live_parameters, refit, running, tiny_model, train

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Fused parts end where blocks do, as vLLM wants it."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PROMPT = (2, 7, 1, 8)
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


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[VllmEngine, Any]]:
    """An engine whose activations are in float32, so that numbers can be compared closely; its model."""
    monkeypatch.setattr(float8, "ACTIVATIONS", "float32")
    sizes = SIZES if request.param == "qwen3" else {**SIZES, **EXPERTS}
    model = tiny_model(request.param, tmp_path / "model", **sizes)
    with running(tmp_path / "model", {"precision": "fp8"}) as made:
        yield made, model


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
    """Return the weights of linear layers by the names they have in a checkpoint, where every expert has its own."""
    found: dict[str, torch.Tensor] = {}
    for name, held in model.named_parameters():
        prefix, _, kind = name.rpartition(".")
        if name.endswith("proj.weight"):
            found[name] = held.detach()
        elif kind == "gate_up_proj":
            for expert, both in enumerate(held.detach()):
                found[f"{prefix}.{expert}.gate_proj.weight"], found[f"{prefix}.{expert}.up_proj.weight"] = both.chunk(2)
        elif kind == "down_proj":
            found |= {f"{prefix}.{expert}.down_proj.weight": down for expert, down in enumerate(held.detach())}
    return found


def in_vllm(name: str, weight: torch.Tensor, held: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vLLM holds of a weight: values and scales."""
    *prefix, part, _ = name.split(".")
    if "experts" in prefix:
        parameter, first = (
            ("w2_weight", 0) if part == "down_proj" else ("w13_weight", len(weight) * (part == "up_proj"))
        )
        fused, expert = ".".join([*prefix[:-1], "routed_experts", parameter]), int(prefix[-1])
        values_NK, scales_BC = held[fused][expert], held[f"{fused}_scale_inv"][expert]
    else:
        fused, first = FUSED.get(part, (part, 0))
        of_fused = ".".join([*prefix, fused, "weight"])
        values_NK, scales_BC = held[of_fused], held[f"{of_fused}_scale_inv"]
    rows = slice(first, first + len(weight))
    return values_NK[rows], scales_BC[first // 128 : math.ceil(rows.stop / 128)]


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
        assert len(weights) == (4 + 3 * getattr(model.config, "num_experts", 1)) * model.config.num_hidden_layers
        for name, weight in weights.items():
            values_NK, scales_BC = quantised(weight)
            found_NK, found_BC = in_vllm(name, weight, held)
            assert torch.equal(found_NK.view(torch.uint8), values_NK.view(torch.uint8)), name
            assert torch.equal(found_BC, scales_BC), name
        assert vllm.misquantised() == ()


def check_samples(vllm: VllmEngine, model: Any) -> None:
    """Check that tokens have the log-probabilities of the quantised model, which are not the model's own."""
    completions = run_all(vllm, [request(number, PROMPT, max_new_tokens=24) for number in range(8)])
    rounded, off = as_computed_with(model), 0.0
    for made in completions.values():
        found, tokens = made.logprobs_T, made.token_ids_T
        assert np.abs(found - reference_logprobs(rounded, PROMPT, tokens)).max() < 1e-4
        off = max(off, float(np.abs(found - reference_logprobs(model, PROMPT, tokens)).max()))
    assert off > 1e-3, "nothing was rounded"


def test_log_probabilities_are_those_of_the_quantised_model(engine: tuple[VllmEngine, Any]) -> None:
    vllm, model = engine
    for version in range(2):
        train(model, seed=version)
        refit(vllm, model, version)
        check_samples(vllm, model)


def test_experts_are_spread_over_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "ACTIVATIONS", "float32")
    sizes = {**SIZES, **EXPERTS, "num_key_value_heads": 4}  # a whole block of keys for each worker
    model = tiny_model("qwen3_moe", tmp_path / "model", **sizes)
    two = {"precision": "fp8", "tensor_parallel_size": 2, "expert_parallel_size": 2}
    with running(tmp_path / "model", two) as vllm:
        train(model, seed=0)
        refit(vllm, model, 0)
        check_samples(vllm, model)
