"""Images of a model that sees, as vLLM's models take them: pixels of ours, at the image tokens of our prompts.

vLLM's own processors are not used. They would tokenize anew what is tokens already, resize by whatever backend is
installed, and need packages that a vLLM for CPUs lacks. So vLLM is given what they would make: the prompt with all of
its image tokens, and for each image its tensors and the place of its tokens. Only `serve` knows that there are other
processors, and replaces them.

An image's digest names its features in vLLM's caches. Features are forgotten with the weights that made them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.common.errors import DataError, ModelError
from tandem.common.messages import ImageRef
from tandem.config.models.families import VLLM_SEEING
from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engine import Request
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.rollout.engines.vllm.insides import SEES
from tandem.samples.images import towers
from tandem.samples.images.bounded import ReadThrough
from tandem.samples.images.families import ImageSettings, grid_of, num_tokens, read_settings
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits, decode

_MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "gemma3": ("gemma3_mm", "Gemma3ForConditionalGeneration"),
    "smolvlm": ("smolvlm", "SmolVLMForConditionalGeneration"),
    "idefics3": ("idefics3", "Idefics3ForConditionalGeneration"),
}
"""Module and class of each family in vLLM."""
_MAX_PIXEL_BYTES = 2**29
_IMAGE = "image"
_NEED_TORCHVISION = (
    "transformers.models.gemma3.image_processing_gemma3",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
)
"""Modules that vLLM's models import for their processors, and that cannot be imported without torchvision."""


class Prepared(NamedTuple):
    """An image as vLLM takes it."""

    item: Any
    """A ``MultiModalKwargsItem``."""
    num_tokens: int
    """Image tokens that the tower makes of it."""
    num_bytes: int


class SeeingVllmEngine(VllmEngine):
    """`VllmEngine` of a model that sees."""

    def __init__(
        self,
        model_folder: Path,
        settings: VllmCfg,
        *,
        read_image: Callable[[str], bytes],
        undrawable: Sequence[int],
        limits: ImageLimits = DEFAULT_LIMITS,
        **others: Any,
    ) -> None:
        """Start vLLM; see `VllmEngine` for what is not said here.

        `read_image` returns an image's encoded bytes by its digest, or raises `DataError`; `undrawable` are the tokens
        that are never drawn (`tandem.samples.images.families.undrawable_ids`); larger images than `limits` allow are
        refused.

        Raises `ModelError`, also if vLLM has no such family, and `ConfigError`.
        """
        self._images = read_settings(model_folder)
        self._undrawable = list(undrawable)
        self._read_image, self._limits = read_image, limits
        self._processor = towers.load_processor(model_folder)
        self._prepared = ReadThrough(self._prepare, lambda found: found.num_bytes, _MAX_PIXEL_BYTES)
        super().__init__(model_folder, settings, **others)

    def sleep(self) -> None:
        """Release the caches; on a GPU the weights wait in host memory. Refuses while requests run."""
        super().sleep()
        self._llm.engine.reset_encoder_cache()

    def _arguments(self, model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
        name = self._images.family.model_type
        serve(name)
        made = super()._arguments(model_folder, settings, extra)
        own = {
            "limit_mm_per_prompt": {_IMAGE: settings.max_model_len},  # each takes a token at least
            "mm_processor_cache_gb": 0,
            "mm_encoder_tp_mode": "data",  # every worker has the tower whole
        }
        made["hf_overrides"].setdefault("architectures", [_MODELS[name][1]])
        made["additional_config"] = {**made.get("additional_config", {}), SEES: self._undrawable}
        return {**made, **own}

    def _prompt(self, request: Request, salt: str) -> dict[str, Any]:
        """Return a prompt and its images. Raises `DataError` and `ModelError`."""
        prompt = super()._prompt(request, salt)
        if not request.images:
            return prompt
        from vllm.multimodal.inputs import MultiModalKwargsItems

        items = [self._item(request, place) for place in range(len(request.images))]
        return prompt | {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems({_IMAGE: items}),
            "mm_hashes": {_IMAGE: [image.digest for image in request.images]},
            "mm_placeholders": {_IMAGE: places_of(request, self._images.image_token_id)},
        }

    def _item(self, request: Request, place: int) -> Any:
        image = request.images[place]
        prepared = self._prepared.get(image.digest)
        if prepared.num_tokens != image.num_tokens:
            raise ModelError(
                f"request {request.request_id}, image {place + 1} ({image.digest[:12]}): the tower makes "
                f"{prepared.num_tokens} tokens of it, the prompt has {image.num_tokens}"
            )
        return prepared.item

    def _prepare(self, digest: str) -> Prepared:
        image = decode(self._read_image(digest), f"image {digest[:12]}", self._limits)
        return prepared(self._images, towers.pixels(self._images.family, self._processor, image))

    def _take_weights(self) -> None:
        super()._take_weights()
        self._llm.engine.reset_encoder_cache()


def prepared(settings: ImageSettings, pixels: towers.Pixels) -> Prepared:
    """Return an image as vLLM takes it."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    tensors = dict(pixels.tensors)
    if settings.family.is_qwen:
        tensors["image_grid_thw"] = torch.tensor([pixels.grid])
    else:
        tensors["num_patches"] = torch.tensor([len(tensors["pixel_values"])])
    size_1 = torch.tensor([len(tensors["pixel_values"])])
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes(_IMAGE, size_1)
        if name.startswith("pixel_")
        else MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True)
        for name in tensors
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[_IMAGE]
    return Prepared(item, num_tokens(settings, pixels.grid), pixels.num_bytes)


def places_of(request: Request, image_token_id: int) -> list[Any]:
    """Return the place of each image's tokens in a prompt, as vLLM's ``PlaceholderRange``.

    Raises `DataError` if the prompt has other image tokens than its images need.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    is_image_T = np.array(request.prompt_ids) == image_token_id
    tokens = np.flatnonzero(is_image_T)
    ends = np.cumsum([image.num_tokens for image in request.images])
    if len(tokens) != ends[-1]:
        raise DataError(
            f"the prompt has {len(tokens)} image tokens, its {len(request.images)} images need {ends[-1]}"
        )
    places = []
    for own in np.split(tokens, ends[:-1]):
        start, stop = int(own[0]), int(own[-1]) + 1
        has_others = stop - start > len(own)  # such as the tags between crops
        mask = torch.from_numpy(is_image_T[start:stop]) if has_others else None
        places.append(PlaceholderRange(offset=start, length=stop - start, is_embed=mask))
    return places


def forbid(model: Any, token_ids: Sequence[int]) -> None:
    """Have a model of vLLM's take all probability from tokens that stand for images."""
    compute_logits = model.compute_logits

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits_NV: torch.Tensor | None = compute_logits(*args, **kwargs)
        if logits_NV is not None:  # the worker that draws has them
            logits_NV[:, token_ids] = -torch.inf
        return logits_NV

    model.compute_logits = compute


def serve(name: str) -> None:
    """Have this process's vLLM take images of a family as `prepared` makes them. Raises `ModelError`."""
    if name not in VLLM_SEEING:
        raise ModelError(f"vLLM cannot be given images of {name} here: it is {', '.join(VLLM_SEEING)}")
    module, kind = _MODELS[name]
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    with contextlib.nullcontext() if has_torchvision else _without(_NEED_TORCHVISION):
        found = importlib.import_module(f"vllm.model_executor.models.{module}")
    getattr(found, kind)._processor_factory = _Factories()


@contextlib.contextmanager
def _without(modules: Sequence[str]) -> Iterator[None]:
    """Let what is imported in this block import names from modules that cannot be."""
    absent = {name: _Absent(name) for name in modules if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


class _Absent(types.ModuleType):
    """A module of which nothing is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Factories:
    """What vLLM asks for the processor of a model's images."""

    def info(self, context: Any) -> Any:
        """Return what vLLM has to know of images."""
        from vllm.multimodal.processing import BaseProcessingInfo

        class Info(BaseProcessingInfo):  # type: ignore[misc]
            def get_supported_mm_limits(self) -> dict[str, None]:
                return {_IMAGE: None}

            def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
                return {_IMAGE: largest(read_settings(Path(self.model_id)), seq_len).num_tokens}

        return Info(context)

    def build_processor(self, context: Any) -> _Processor:
        """Return the processor."""
        return _Processor(self.info(context))


class _Processor:
    """A processor that processes nothing: prompts come with their images' tensors."""

    def __init__(self, info: Any) -> None:
        self.info = info

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> dict[str, Any]:
        """Return the largest image, by which vLLM measures memory."""
        folder = Path(self.info.model_id)
        settings = read_settings(folder)
        image = largest(settings, self.info.ctx.model_config.max_model_len)
        from PIL import Image

        blank = Image.new("RGB", (image.width, image.height))
        item = prepared(settings, towers.pixels(settings.family, towers.load_processor(folder), blank)).item
        return {"mm_kwargs": {_IMAGE: [item] * mm_counts[_IMAGE]}}


def largest(settings: ImageSettings, max_tokens: int) -> ImageRef:
    """Return the size of about the largest image of at most so many tokens, or else of one of the fewest tokens."""
    side = 8192
    while True:
        grid = grid_of(settings, side, side)
        size = num_tokens(settings, grid)
        if size <= max_tokens or side <= settings.patch_size * settings.merge_size:
            return ImageRef(digest="", width=side, height=side, grid=grid, num_tokens=size)
        side = side * 9 // 10
