"""The engine of a model: the embedded one or vLLM's, that of texts or that of models that see."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tandem.rollout.engine import Engine
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits
from tandem.samples.tokenizer import Tokenizer


def engine_kind(
    backend: str, tokenizer: Tokenizer, read_image: Callable[[str], bytes], limits: ImageLimits = DEFAULT_LIMITS
) -> Callable[..., Engine]:
    """Return what builds the engine of the tokenizer's model, by the arguments of `VllmEngine` or `TransformersEngine`.

    `backend` is ``vllm``, or ``transformers`` for the embedded engine. `read_image` returns the encoded bytes of an
    image by its digest, within `limits`; a text model asks for none.
    """
    make_engine = _vllm_engine(sees=tokenizer.sees) if backend == "vllm" else _embedded_engine(sees=tokenizer.sees)
    if not tokenizer.sees:
        return make_engine
    from tandem.samples.images.chat import VisionTokenizer
    from tandem.samples.images.families import undrawable_ids

    assert isinstance(tokenizer, VisionTokenizer), "no other one sees"
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)
    return functools.partial(make_engine, read_image=read_image, undrawable=undrawable, limits=limits)


def adapters_kind(backend: str) -> Callable[..., Engine]:
    """Return what builds an engine of a text model that holds the adapters of several versions.

    It takes the arguments of the engine that holds one, and ``num_sets``.
    """
    if backend == "vllm":
        from tandem.rollout.engines.vllm.adapters import AdaptersVllmEngine

        return AdaptersVllmEngine
    from tandem.rollout.engines.adapters import AdaptersEngine

    return AdaptersEngine


def _vllm_engine(*, sees: bool) -> Callable[..., Engine]:
    if sees:
        from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine

        return SeeingVllmEngine
    from tandem.rollout.engines.vllm.engine import VllmEngine

    return VllmEngine


def _embedded_engine(*, sees: bool) -> Callable[..., Engine]:
    if sees:
        from tandem.rollout.engines.vision import VisionEngine

        return VisionEngine
    from tandem.rollout.engines.transformers import TransformersEngine

    return TransformersEngine
