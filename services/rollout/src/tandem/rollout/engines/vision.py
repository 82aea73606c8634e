"""The embedded engine of vision models: an image becomes features once, and stands in its prompts.

It is attached to the model by two hooks. Before a forward pass one adds the features of the step's images and, for
families whose positions are three numbers, their positions. After it the other one takes all probability from tokens
that stand for images. So the engine of a text model executes none of this.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from tandem.common.errors import DataError
from tandem.common.messages import ImageRef
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.attention import BLOCKS_ATTENTION_NAME, AttentionStep, slot_attention
from tandem.rollout.engines.slots import EngineSequence, EngineSlots
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.images import blocks, store, towers
from tandem.samples.images.families import ImageSettings, Int64s, positions, read_settings
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits, decode
from tandem.samples.routed_experts import RoutedExperts
from tandem.samples.sampling_masks import MaskFormat

MAX_FEATURE_BYTES = 2**30
"""Most bytes of features that are kept for prompts to come."""
_MAX_PIXEL_BYTES = 2**29
_MAX_ENCODED_BYTES = 2**28


class EncoderCache(store.BoundedCache[Any]):
    """Outputs of the tower, up to a number of bytes; forgotten when the weights that made them are not in use."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(towers.num_bytes, max_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class EngineImage:
    """An image of unfinished requests."""

    image: ImageRef
    data: bytes
    """Its encoded bytes: its features may be needed again, when weights have changed."""


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt, shared by the unfinished requests that begin with it."""

    pictures: tuple[EngineImage, ...]
    positions_XT: Int64s
    """Positions of the prompt's tokens, a row or three."""
    block_starts: tuple[int, ...]
    """First token of each image whose tokens attend to each other in both directions."""
    delta: int
    """Difference of the position and the index of a token made later."""

    def positions(self, length: int) -> Int64s:
        """Return the positions of the prompt and of the tokens made after it, `length` in all."""
        made_T = np.arange(self.positions_XT.shape[1], length) + self.delta
        made_XT = np.broadcast_to(made_T, (len(self.positions_XT), len(made_T)))
        return np.concatenate((self.positions_XT, made_XT), axis=1)


class VisionSlots(EngineSlots):
    """Slots that also know the positions of new tokens."""

    def __init__(self, num_slots: int, max_length: int, experts: RoutedExperts | None = None) -> None:
        super().__init__(num_slots, max_length, experts)
        self.delta_S = np.zeros(num_slots, np.int64)
        self.views: dict[int, PromptImages] = {}
        """Views of unfinished requests, by request."""

    def join(self, sequence: EngineSequence) -> None:
        """Give the sequence the next slot, its prompt counted as cached."""
        self.delta_S[self.num_running] = self.views[sequence.request.request_id].delta
        super().join(sequence)


class VisionEngine(TransformersEngine):
    """The embedded engine of a vision model."""

    _slots_kind = VisionSlots
    _slots: VisionSlots

    def __init__(
        self,
        model_folder: Path,
        *,
        num_slots: int,
        max_total_sequence_length: int,
        dtype: Literal["float32", "bfloat16"],
        read_image: Callable[[str], bytes],
        undrawable: tuple[int, ...],
        limits: ImageLimits = DEFAULT_LIMITS,
        num_threads: int | None = None,
        with_weights: bool = False,
        experts: RoutedExperts | None = None,
        mask_format: MaskFormat | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        max_feature_bytes: int = MAX_FEATURE_BYTES,
    ) -> None:
        """Build the engine of a vision model; see `TransformersEngine` for what is not said here.

        `read_image` returns an image's encoded bytes by its digest, or raises `DataError`; `undrawable` are the tokens
        that are never drawn (`tandem.samples.images.families.undrawable_ids`); larger images than `limits` allow are
        refused; `max_feature_bytes` are kept for prompts to come.

        Raises `ModelError`.
        """
        self._settings: ImageSettings = read_settings(model_folder)
        super().__init__(
            model_folder,
            num_slots=num_slots,
            max_total_sequence_length=max_total_sequence_length,
            dtype=dtype,
            num_threads=num_threads,
            with_weights=with_weights,
            experts=experts,
            mask_format=mask_format,
            config_overrides=config_overrides,
        )
        towers.check_model(self._model)
        self._has_blocks = self._settings.family.has_image_blocks
        self._limits = limits
        self._processor = towers.load_processor(model_folder)
        self._encoded = store.BoundedImages(read_image, _MAX_ENCODED_BYTES)
        self._pixels = towers.PixelCache(self._process, _MAX_PIXEL_BYTES)
        self._features = EncoderCache(max_feature_bytes)
        self._pictures: weakref.WeakValueDictionary[str, EngineImage] = weakref.WeakValueDictionary()
        self._views: weakref.WeakValueDictionary[tuple[object, ...], PromptImages] = weakref.WeakValueDictionary()
        self._undrawable = torch.tensor(undrawable, device=self._model.device)
        self._model.register_forward_pre_hook(self._show, with_kwargs=True)
        self._model.register_forward_hook(self._forbid)

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request; it joins at the next `step` with room.

        Raises `DataError` if it can make no token, if an image is missing or damaged, and if the prompt has other
        image tokens than its images need.
        """
        self._require_room(request)
        self._slots.views[request.request_id] = self._view(request)
        super().add_request(request)

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version, `ModelError` if its weights give a probability that is
        not a number.
        """
        completions = super().step()
        for completion in completions:
            del self._slots.views[completion.request_id]
        return completions

    def abort(self, request_id: int) -> EngineCompletion | None:
        """Stop a request and return what it has made; None if it is unknown."""
        completion = super().abort(request_id)
        self._slots.views.pop(request_id, None)
        return completion

    def sleep(self) -> None:
        """Release the key-value cache and the features. Refuses while requests run."""
        super().sleep()
        self._features.clear()

    def close(self) -> None:
        """Release everything."""
        super().close()
        self._features.clear()
        self._slots.views.clear()

    def _take_weights(self) -> None:
        super()._take_weights()
        self._features.clear()

    def _view(self, request: SequenceRequest) -> PromptImages:
        """Return what a request sees, read and checked once for all requests with its prompt. Raises `DataError`."""
        key = (request.prompt_ids, request.media)
        view = self._views.get(key)
        if view is None:
            positions_XT, delta = positions(self._settings, request.prompt_ids, [image.grid for image in request.media])
            pictures = tuple(self._picture(image) for image in request.media)
            starts = self._block_starts(request.prompt_ids) if self._has_blocks else ()
            view = self._views[key] = PromptImages(pictures, positions_XT, starts, delta)
        return view

    def _block_starts(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first image token of each image; all of an image stand side by side."""
        places = np.flatnonzero(np.array(prompt_ids) == self._settings.image_token_id)
        return tuple(places[:: self._settings.tokens_per_image].tolist())

    def _picture(self, image: ImageRef) -> EngineImage:
        picture = self._pictures.get(image.digest)
        if picture is None:
            picture = EngineImage(image, self._encoded.get(image.digest))
            self._pictures[image.digest] = picture
        if image.digest not in self._features:  # else it was processed before
            grid = self._pixels.get(image.digest).grid
            if grid != image.grid:
                raise DataError(f"image {image.digest[:12]} is divided into {grid}, its reference says {image.grid}")
        return picture

    def _process(self, digest: str) -> towers.TowerPixels:
        image = decode(self._pictures[digest].data, f"image {digest[:12]}", self._limits)
        return towers.pixels(self._settings.family, self._processor, image)

    def _show(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Add the positions and images of a step to the arguments of the forward pass."""
        step: AttentionStep = kwargs["slot_step"]
        sequences = self._slots.sequences
        views = [self._slots.views[sequences[prompt.first_slot].request.request_id] for prompt in step.prompts]
        if self._settings.family.has_mrope:
            num = step.num_running
            delta_R = torch.from_numpy(self._slots.delta_S[:num]).to(step.position_R.device)
            parts = [(step.position_R + delta_R).expand(3, -1)]
            if views:
                prompt_views = zip(views, step.prompts, strict=True)
                prompts_XN = np.concatenate([view.positions(prompt.length) for view, prompt in prompt_views], axis=1)
                parts.append(torch.from_numpy(prompts_XN).to(delta_R.device))
            kwargs["position_ids"] = torch.cat(parts, dim=1)[:, None]
        if self._has_blocks:
            size = self._settings.tokens_per_image
            kwargs["image_blocks"] = [
                blocks.ImageTokens(prompt.start, prompt.start + start, prompt.start + start + size)
                for view, prompt in zip(views, step.prompts, strict=True)
                for start in view.block_starts
            ]
        pictures = [picture for view in views for picture in view.pictures]
        if pictures:
            outputs = self._outputs(pictures)
            # A new mapping each time: the model writes into it.
            kwargs["mm_encoder_outputs"] = {"image": towers.join([outputs[each.image.digest] for each in pictures])}
        return args, kwargs

    def _outputs(self, pictures: list[EngineImage]) -> dict[str, Any]:
        """Return the tower's outputs for a step's images by digest, each made once while it is kept.

        One by one, so that an image has the same features whatever joins beside it.
        """
        outputs: dict[str, Any] = {}
        for digest in dict.fromkeys(picture.image.digest for picture in pictures):
            output = self._features.find(digest)
            if output is None:
                inputs = towers.tower_inputs(self._settings.family, [self._pixels.get(digest)], self._model.device)
                output = towers.features_only(towers.encode(self._model, inputs))
                self._features.put(digest, output)
            outputs[digest] = output
        return outputs

    def _forbid(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        """Take all probability from the tokens that stand for images."""
        output.logits[..., self._undrawable] = -torch.inf


def slot_attention_with_blocks(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    image_blocks: Iterable[blocks.ImageTokens] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `slot_attention` does, and within the images of the step's prompts in both directions.

    Raises `ModelError` as `slot_attention` does.
    """
    inputs = query_1HND, key_1HND, value_1HND
    output_1NHD, _ = slot_attention(
        module, *inputs, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
    )
    if image_blocks:
        output_1NHD = blocks.attend_blocks(output_1NHD, *inputs, image_blocks, scaling, sliding_window)
    return output_1NHD, None


transformers.AttentionInterface.register(BLOCKS_ATTENTION_NAME, slot_attention_with_blocks)
