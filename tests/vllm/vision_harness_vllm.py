"""Engines of vLLM for tiny models that see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vision_harness import Seeing

from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine


@contextlib.contextmanager
def seeing_engine(seeing: Seeing, settings: dict[str, Any] | None = None, **extra: Any) -> Iterator[SeeingVllmEngine]:
    """Start vLLM with the configuration of a model that sees, without weights; stop it at the end."""
    cfg = VllmCfg(**{"precision": "float32", "max_model_len": 512, **(settings or {})})
    engine = SeeingVllmEngine(
        seeing.folder,
        cfg,
        read_image=seeing.images.get,
        undrawable=seeing.undrawable,
        extra={"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, **extra},
    )
    try:
        yield engine
    finally:
        engine.close()
