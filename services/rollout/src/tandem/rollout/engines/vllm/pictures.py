"""Images as vLLM's vision models take them: pixels of ours, at the image tokens of our prompts.

vLLM's own processors are not used. They tokenize prompts anew, resize images with whatever is installed, and need
packages that a vLLM for CPUs lacks. So vLLM is given what they would make: the prompt with all of its image tokens, and
for each image its tensors and the place of its tokens. Only `serve` knows that there are processors, and replaces them.

An image's digest names its features in vLLM's caches. Features are forgotten with the weights that made them.

Shapes: ``T`` tokens of a prompt; ``N`` tokens drawn in a step, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.common.errors import DataError, ModelError
from tandem.config.models.families import VLLM_SEEING
from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.vllm import float8, insides
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.rollout.engines.vllm.insides import UNDRAWABLE
from tandem.samples.images import towers
from tandem.samples.images.families import ImageSettings, grid_of, num_tokens, read_settings
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits, decode
from tandem.samples.images.store import ReadThrough

_MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "smolvlm": ("smolvlm", "SmolVLMForConditionalGeneration"),
    "idefics3": ("idefics3", "Idefics3ForConditionalGeneration"),
}
"""Module and class of each family in vLLM."""
_IMAGE = "image"
_MAX_PIXEL_BYTES = 2**29
_LONGEST_SIDE = 4096


class PreparedImage(NamedTuple):
    """An image as vLLM takes it."""

    item: Any
    """Its tensors, as a ``MultiModalKwargsItem``."""
    num_tokens: int
    """Image tokens that the tower makes of it."""
    num_bytes: int


class SeeingVllmEngine(VllmEngine):
    """`VllmEngine` of a vision model."""

    def __init__(
        self,
        model_folder: Path,
        settings: VllmCfg,
        *,
        read_image: Callable[[str], bytes],
        undrawable: Sequence[int],
        limits: ImageLimits = DEFAULT_LIMITS,
        **kwargs: Any,
    ) -> None:
        """Start vLLM; see `VllmEngine` for what is not said here.

        `read_image` returns an image's encoded bytes by its digest, or raises `DataError`; `undrawable` are the tokens
        that are never drawn (`tandem.samples.images.families.undrawable_ids`); larger images than `limits` allow are
        refused.

        Raises `ModelError`, also if vLLM cannot be given images of the family, and `ConfigError`.
        """
        self._images: ImageSettings = read_settings(model_folder)
        if settings.precision == float8.PRECISION:
            raise ModelError(f"{self._images.family.model_type}, which sees, is not built in float8")
        self._undrawable = list(undrawable)
        self._read_image, self._limits = read_image, limits
        self._processor = towers.load_processor(model_folder)
        self._prepared = ReadThrough(self._prepare, lambda prepared: prepared.num_bytes, _MAX_PIXEL_BYTES)
        super().__init__(model_folder, settings, **kwargs)

    def sleep(self) -> None:
        """Release the caches; on a GPU the weights wait in host memory. Refuses while requests run."""
        super().sleep()
        self._llm.engine.reset_encoder_cache()

    def _arguments(self, model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
        arguments, name = super()._arguments(model_folder, settings, extra), self._images.family.model_type
        serve(name)
        return {
            **arguments,
            "hf_overrides": {**arguments["hf_overrides"], "architectures": [_MODELS[name][1]]},
            "additional_config": {**arguments.get("additional_config", {}), UNDRAWABLE: self._undrawable},
            "mm_processor_cache_gb": 0,
            "mm_device_do_normalize": False,
            "mm_encoder_tp_mode": "data",  # each worker has the tower whole
        }

    def _prompt(self, request: SequenceRequest, salt: str) -> dict[str, Any]:
        """Return a prompt with its images. Raises `DataError` and `ModelError`."""
        prompt = super()._prompt(request, salt)
        places = places_of(request, self._images.image_token_id)
        if not places:
            return prompt
        from vllm.multimodal.inputs import MultiModalKwargsItems

        items = [self._item(request, place) for place in range(len(places))]
        return prompt | {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems({_IMAGE: items}),
            "mm_hashes": {_IMAGE: [image.digest for image in request.media]},
            "mm_placeholders": {_IMAGE: places},
        }

    def _item(self, request: SequenceRequest, place: int) -> Any:
        """Return an image of a request. Raises `ModelError` if the tower makes other features than there are tokens."""
        image = request.media[place]
        prepared = self._prepared.get(image.digest)
        if prepared.num_tokens != image.num_tokens:
            raise ModelError(
                f"vLLM's tower makes {prepared.num_tokens} tokens of image {place + 1} ({image.digest[:12]}), the "
                f"prompt has {image.num_tokens}: the processor is not the one that made the prompt"
            )
        return prepared.item

    def _prepare(self, digest: str) -> PreparedImage:
        image = decode(self._read_image(digest), f"image {digest[:12]}", self._limits)
        return prepared(self._images, towers.pixels(self._images.family, self._processor, image))

    def _take_weights(self) -> None:
        super()._take_weights()
        self._llm.engine.reset_encoder_cache()


def prepared(settings: ImageSettings, pixels: towers.TowerPixels) -> PreparedImage:
    """Return an image as vLLM takes it."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    size_1 = torch.tensor([len(pixels.tensors["pixel_values"])])
    fields = {name: MultiModalFieldConfig.flat_from_sizes(_IMAGE, size_1) for name in pixels.tensors}
    number = MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True)
    if settings.family.is_qwen:
        inputs = {**pixels.tensors, "image_grid_thw": torch.tensor([pixels.grid])}
        fields["image_grid_thw"] = number
    else:
        inputs = {**pixels.tensors, "num_patches": size_1}
        fields["num_patches"] = number
    (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)[_IMAGE]
    return PreparedImage(item, num_tokens(settings, pixels.grid), pixels.num_bytes)


def places_of(request: SequenceRequest, image_token_id: int) -> list[Any]:
    """Return the place of each image's tokens in a prompt, as vLLM's ``PlaceholderRange``.

    Raises `DataError` if the prompt has other image tokens than its images need.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    is_image_T = np.array(request.prompt_ids) == image_token_id
    tokens, sizes = np.flatnonzero(is_image_T), [image.num_tokens for image in request.media]
    if len(tokens) != sum(sizes):
        raise DataError(f"the prompt has {len(tokens)} image tokens, its {len(sizes)} images need {sum(sizes)}")
    places = []
    for image_tokens in np.split(tokens, np.cumsum(sizes)[:-1]) if sizes else ():
        start, stop = int(image_tokens[0]), int(image_tokens[-1]) + 1
        is_whole = stop - start == len(image_tokens)  # else there are the tags of crops between them
        mask_T = None if is_whole else torch.from_numpy(is_image_T[start:stop])
        places.append(PlaceholderRange(offset=start, length=stop - start, is_embed=mask_T))
    return places


def serve(name: str) -> None:
    """Have vLLM, in this process, take images of a family as `prepared` makes them. Raises `ModelError`."""
    if name not in VLLM_SEEING:
        raise ModelError(f"vLLM cannot be given images of {name} here, only of {', '.join(VLLM_SEEING)}")
    module, kind = _MODELS[name]
    getattr(insides.import_models(module), kind)._processor_factory = _Factory


class _Factory:
    """A source of processors, as vLLM's classes of models have one."""

    @staticmethod
    def info(context: Any) -> Any:
        """Return what vLLM has to know of images before it is given any."""
        from vllm.multimodal.processing import BaseProcessingInfo

        class Info(BaseProcessingInfo):  # type: ignore[misc]
            def get_supported_mm_limits(self) -> dict[str, None]:
                return {_IMAGE: None}

            def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
                return {_IMAGE: largest(read_settings(Path(self.model_id)), seq_len)[1]}

        return Info(context)

    @staticmethod
    def build_processor(context: Any) -> _Processor:
        """Return the processor."""
        return _Processor(_Factory.info(context))


class _Processor:
    """A processor that is never given an image."""

    def __init__(self, info: Any) -> None:
        self.info = info

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> dict[str, Any]:
        """Return large images, with which vLLM measures how much memory a tower takes."""
        from PIL import Image

        folder = Path(self.info.model_id)
        settings = read_settings(folder)
        side, _num_tokens = largest(settings, self.info.ctx.model_config.max_model_len)
        blank, processor = Image.new("RGB", (side, side)), towers.load_processor(folder)
        item = prepared(settings, towers.pixels(settings.family, processor, blank)).item
        return {"mm_kwargs": {_IMAGE: [item] * mm_counts[_IMAGE]}}


def largest(settings: ImageSettings, max_tokens: int) -> tuple[int, int]:
    """Return the side and the tokens of about the largest square image that has at most `max_tokens`.

    Where even the smallest has more, that one is meant: then no prompt has an image.
    """
    side, least = _LONGEST_SIDE, settings.patch_size * settings.merge_size
    while (size := num_tokens(settings, grid_of(settings, side, side))) > max_tokens and side > least:
        side = max(least, side * 9 // 10)
    return side, size
