"""Engines of vLLM for tiny vision models, and Hugging Face's opinion of what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from vision_harness import Seeing

from tandem.config.schema.generation import VllmCfg
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine

TOLERANCE = 1e-5


@contextlib.contextmanager
def running(seeing: Seeing, settings: dict[str, Any] | None = None, **changes: Any) -> Iterator[SeeingVllmEngine]:
    """Start vLLM with the configuration of a vision model, without weights; stop it at the end."""
    engine = SeeingVllmEngine(
        seeing.folder,
        VllmCfg(**{"precision": "float32", "max_model_len": 512, **(settings or {})}),
        read_image=seeing.images.get,
        undrawable=seeing.undrawable,
        extra={"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32},
        **changes,
    )
    try:
        yield engine
    finally:
        engine.close()


def apart(
    seeing: Seeing, requests: Sequence[SequenceRequest], finished: dict[int, EngineCompletion], model: Any = None
) -> float:
    """Return how far log-probabilities are from Hugging Face's, at most."""
    worst = 0.0
    for request in requests:
        made = finished[request.request_id]
        expected_T = seeing.logprobs(request, made.token_ids_T, model=model)
        worst = max(worst, float(np.abs(made.logprobs_T - expected_T).max()))
    return worst


def passes_of(engine: VllmEngine) -> list[int]:
    """Return a list that grows with every pass through an engine's tower, by the features that come out."""
    passes: list[int] = []
    (model,) = engine._llm.engine.collective_rpc(lambda worker: worker.model_runner.get_model())
    embed = model.embed_multimodal

    def counting(**inputs: Any) -> Any:
        features = embed(**inputs)
        passes.append(sum(len(each) for each in features))
        return features

    model.embed_multimodal = counting
    return passes


def questions(seeing: Seeing) -> list[SequenceRequest]:
    """Return requests with images that some share, with several, and with none."""
    first, second, wide = seeing.image(48, 40, 1), seeing.image(48, 40, 2), seeing.image(64, 24, 3)
    return [
        *(seeing.request(number, "how many?", [first], max_new_tokens=4 + number) for number in range(4)),
        seeing.request(4, "how many?", [second]),
        seeing.request(5, "no picture at all", max_new_tokens=5),
        seeing.request(6, "which is wider?", [wide, first], temperature=0.8),
        seeing.request(7, "and now?", [first, first, second], temperature=1.3),
        seeing.request(8, "hello"),
    ]


def digests_of(model: Any) -> dict[str, int]:
    """Return the digest of every tensor of a model."""
    weights = weights_of(model)
    digests = digest_layout(weights.layout, weights.storages).tolist()
    return dict(zip((tensor.name for tensor in weights.layout.tensors), digests, strict=True))


def held_by(engine: VllmEngine) -> dict[str, int]:
    """Return the digest of every tensor that an engine of one worker holds."""
    (digests,), (layout,) = engine.digest_task(None).results(), engine.layouts()
    return dict(zip((tensor.name for tensor in layout.tensors), digests.tolist(), strict=True))
