"""Tiny models that vLLM's kernels take, and engines of both kinds filled from them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from engine_harness import make_model, make_programs, shared_layout

from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engines.vllm import insides
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.samples.routed_experts import RoutedExperts
from tandem.samples.sampling_masks import MaskFormat

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"hidden_size": 64, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 40},
}
"""What the tiny models of the other tests need for vLLM: heads of 32 elements, experts whose rows are padded."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"hidden_size": 128, "head_dim": 32, "sliding_window": 7},
    "gemma3_text": {"hidden_size": 64, "head_dim": 32, "tie_word_embeddings": True, "final_logit_softcapping": None},
    "phi3": {"hidden_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "glm4_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 40, "n_shared_experts": 1},
}
"""The same of families with parts of their own, which run through fewer cases."""
_NEEDED = CHANGES | FAMILIES


def tiny_model(architecture: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Build a random float32 model; its vocabulary of 61 is padded by vLLM."""
    folder.mkdir(exist_ok=True)
    return make_model(
        architecture, folder, seed=seed, **{"initializer_range": 0.15, **_NEEDED[architecture], **changes}
    )


@contextlib.contextmanager
def running(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    *,
    experts: RoutedExperts | None = None,
    mask_format: MaskFormat | None = None,
    **extra: Any,
) -> Iterator[VllmEngine]:
    """Start vLLM with a model's configuration, without weights; stop it at the end. `settings` are `VllmCfg`'s."""
    cfg = VllmCfg(**{"precision": "float32", "max_model_len": 128, **(settings or {})})
    extra = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, **extra}
    engine = VllmEngine(
        folder, cfg, extra=extra, experts=experts, mask_format=mask_format, config_overrides=config_overrides
    )
    try:
        yield engine
    finally:
        engine.close()


def refit(engine: VllmEngine, model: Any, version: int, *, allow_alias: bool = False) -> Any:
    """Bring an engine to what `model` holds now, by a whole refit out of a copy of it; return the copy."""
    source = copy.deepcopy(model)
    programs = make_programs(shared_layout(source), engine, allow_alias=allow_alias)
    transports = {transfer.transport for program in programs for transfer in program.receives}
    assert transports <= {"shm", "alias"}, "both are on this host"
    engine.install(programs)
    engine.apply(version, 60.0)
    return source


def train(model: Any, seed: int) -> None:
    """Move every weight a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def all_parameters(llm: insides.InProcessLlm) -> list[dict[str, torch.Tensor]]:
    """Return, for each worker, a copy of what refits write, and beside it of whatever kernels read in its place."""
    found: list[dict[str, torch.Tensor]] = llm.engine.collective_rpc(_parameters_of)
    return found


def _parameters_of(worker: Any) -> dict[str, torch.Tensor]:
    model = worker.model_runner.get_model()
    packed = {f"packed {name}": held.detach().clone() for name, held in model.named_parameters()}
    return {**packed, **{name: held.detach().clone() for name, held in worker.part.parameters().items()}}


def live_parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Return the parameters that refits write, of an engine whose worker is in this process."""
    (found,) = engine._llm.engine.collective_rpc(lambda worker: worker.part.parameters())
    return dict(found)
