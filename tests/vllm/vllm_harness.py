"""Tiny models that vLLM's kernels take, and engines of both kinds filled from them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_harness import make_model, make_program, shared_layout

from tandem.common.config.schema.generation import VllmCfg
from tandem.rollout.engines.vllm.engine import VllmEngine

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"hidden_size": 64, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 40},
}
"""What the tiny models of the other tests need for vLLM: heads of 32 elements, experts whose rows are padded."""


def tiny_model(architecture: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Build a random float32 model; its vocabulary of 61 is padded by vLLM."""
    folder.mkdir(exist_ok=True)
    return make_model(
        architecture, folder, seed=seed, **{"initializer_range": 0.15, **CHANGES[architecture], **changes}
    )


@contextlib.contextmanager
def running(folder: Path, **extra: Any) -> Iterator[VllmEngine]:
    """Start vLLM with a model's configuration, without weights; stop it at the end."""
    settings = VllmCfg(precision="float32", max_model_len=128)
    engine = VllmEngine(folder, settings, extra={"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, **extra})
    try:
        yield engine
    finally:
        engine.close()


def refit(engine: VllmEngine, model: Any, version: int, *, allow_alias: bool = False) -> Any:
    """Bring an engine to what `model` holds now, by a whole refit out of a copy of it; return the copy."""
    source = copy.deepcopy(model)
    program = make_program(shared_layout(source), engine, allow_alias=allow_alias)
    assert {transfer.transport for transfer in program.receives} <= {"shm", "alias"}, "both are on this host"
    engine.install(program, {})
    engine.apply(version, 60.0)
    return source


def train(model: Any, seed: int) -> None:
    """Move every weight a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
