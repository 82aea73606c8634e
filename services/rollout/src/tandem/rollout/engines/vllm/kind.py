"""The vLLM engine of a model: that of texts, or that of models that see."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tandem.rollout.engine import Engine
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits
from tandem.samples.tokenizer import Tokenizer


def vllm_engine(
    tokenizer: Tokenizer, read_image: Callable[[str], bytes], limits: ImageLimits = DEFAULT_LIMITS
) -> Callable[..., Engine]:
    """Return what builds the engine of the tokenizer's model, by the arguments of `VllmEngine`.

    `read_image` returns the encoded bytes of an image by its digest, within `limits`; a text model asks for none.
    """
    if not tokenizer.sees:
        from tandem.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine
    from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine
    from tandem.samples.images.chat import VisionTokenizer
    from tandem.samples.images.families import undrawable_ids

    assert isinstance(tokenizer, VisionTokenizer), "no other one sees"
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)
    return functools.partial(SeeingVllmEngine, read_image=read_image, undrawable=undrawable, limits=limits)
