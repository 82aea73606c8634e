"""The images of micro-batches: pixels for a vision model, and gradients to its tower.

With FSDP2 every rank takes part in gathering each layer of the tower, in each forward and backward pass. So the tower
always runs: in a micro-batch without images it encodes a small blank one, of which the language model gets nothing, and
whose gradients are zeros. That also gives optimizers and ranks the same parameters with gradients in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models.model_sizes import local_folder
from tandem.config.models.vision_families import VISION, VisionFamily, family_of, list_frozen_prefixes
from tandem.config.schema import ModelConfig
from tandem.config.schema.policy import DtensorCfg
from tandem.samples.images import blocks, families, rows, store, towers
from tandem.samples.images.reading import ImageLimits, decode
from tandem.samples.model_files import load_tokenizer
from tandem.trainer.attention import OUTSIDE_OF_GRAPHS, attend, use_attention
from tandem.trainer.backends.sharding import RankMesh
from tandem.trainer.batching.images import ImageBlock, RowImages
from tandem.trainer.micro_batches import MicroBatch

if TYPE_CHECKING:
    from PIL.Image import Image

_WHITE = (255, 255, 255)
WITH_IMAGES = "tandem_rows_with_images"


def attend_with_images(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    image_blocks: Sequence[ImageBlock] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `attend` does, and in both directions among the tokens of an image."""
    attended_BTHD, _ = attend(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs)
    scaling, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    causal_BTHD = attended_BTHD
    attended_BTHD = attended_BTHD.clone()
    for row, size, source_M in image_blocks:
        num = len(source_M)
        attended_1MHD = blocks.attend_blocks(
            causal_BTHD[row, source_M][None],
            query_BHTD[row, :, source_M][None],
            key_BHTD[row, :, source_M][None],
            value_BHTD[row, :, source_M][None],
            [blocks.ImageTokens(0, num - size, num)],
            scaling,
            window,
        )
        attended_BTHD[row, source_M[num - size :]] = attended_1MHD[0, num - size :]
    return attended_BTHD, None


transformers.AttentionInterface.register(WITH_IMAGES, attend_with_images)
OUTSIDE_OF_GRAPHS[WITH_IMAGES] = attend_with_images


class _Reader:
    """The images of a run as towers take them; the models of a process share it."""

    def __init__(self, folder: Path, family: VisionFamily, images: store.ImageFolder, limits: ImageLimits) -> None:
        self._family, self._images, self._limits = family, images, limits
        self._processor = towers.load_processor(folder)
        self.cache = towers.PixelCache(self._read)

    def pixels(self, image: Image) -> towers.TowerPixels:
        """Return an image as a tower takes it."""
        return towers.pixels(self._family, self._processor, image)

    def _read(self, digest: str) -> towers.TowerPixels:
        return self.pixels(decode(self._images.get(digest), f"image {digest[:12]}", self._limits))


@cache
def _reader(folder: Path, model_type: str, images: Path, max_pixels: int) -> _Reader:
    return _Reader(folder, VISION[model_type], store.ImageFolder(images), ImageLimits(max_pixels=max_pixels))


class PixelSource:
    """The pixels of a run's images, for one model."""

    def __init__(self, config: Config, section: ModelConfig, family: VisionFamily, device: torch.device) -> None:
        """Read the settings for images of a section's model.

        Raises `ModelError` if it counts their tokens differently from the policy.
        """
        name = config.policy.tokenizer.name
        folder = local_folder(name) or Path(name)
        settings = families.read_settings(folder, name)
        if settings.family != family:
            seen = settings.family.model_type
            raise ModelError(
                f"{section.model_name} is a {family.model_type}, and images are tokens of a {seen}: {name}"
            )
        self.image_token = settings.image_token_id
        """The token whose embeddings features replace."""
        self.undrawable = families.undrawable_ids(load_tokenizer(config), family)
        """Tokens that no policy draws, and that have no probability."""
        reader = _reader(folder, family.model_type, rows.image_folder(config).folder, config.data.max_image_pixels)
        self._cache = reader.cache
        self._family, self._device = family, device
        self.blank = self._blank_inputs(reader, settings.patch_size * settings.merge_size)
        """The inputs of a tower for a small white image."""

    def pixels(self, images: RowImages) -> towers.Inputs:
        """Return the inputs of a tower for images. Raises `DataError` for one that cannot be read."""
        prepared = [self._cache.get(digest) for digest in images.digests]
        for image, grid, digest in zip(prepared, images.grids, images.digests, strict=True):
            _check_grid(image.grid, grid, digest)
        return towers.tower_inputs(self._family, prepared, self._device)

    def _blank_inputs(self, reader: _Reader, side: int) -> towers.Inputs:
        """Return the inputs of a tower for a white image: black crops count as padding."""
        from PIL.Image import new

        blank = reader.pixels(new("RGB", (side, side), _WHITE))
        if self._family.has_crops:  # one of them
            blank = blank._replace(tensors={name: tensor[:1] for name, tensor in blank.tensors.items()})
        return towers.tower_inputs(self._family, [blank], self._device)


class ModelImageInputs:
    """Gives a model the inputs that come from images: `tandem.trainer.micro_batches.MediaInputs`."""

    def __init__(self, config: Config, section: ModelConfig, family: VisionFamily, model: Any, ranks: RankMesh) -> None:
        """Take a whole model, which `ranks` will shard, of a section of the configuration.

        Raises `ModelError` if the model cannot be given images, or counts their tokens differently from the policy.
        """
        towers.check_model(model)
        self.family = family
        self._source = PixelSource(config, section, family, ranks.device)
        self.undrawable = self._source.undrawable
        """Tokens that no policy draws, and that have no probability."""
        self._model, self._ranks = model, ranks
        self._needs_blank = False
        if family.has_image_blocks:  # after the attention was chosen for rows
            use_attention(model, WITH_IMAGES)
        language = model.get_submodule(family.language_prefix.removesuffix("."))
        language.register_forward_pre_hook(self._run_blank_tower, with_kwargs=True)

    def __call__(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the inputs of the model beside its tokens. Raises `DataError` for an image that cannot be read."""
        images: RowImages | None = batch.media
        inputs: dict[str, Any] = {}
        if images is not None and images.position_ids is not None:
            inputs["position_ids"] = images.position_ids
        if images is not None and images.blocks:
            inputs["image_blocks"] = images.blocks
        self._needs_blank = images is None or not images.digests
        if images is None or self._needs_blank:
            return inputs
        return inputs | self._source.pixels(images)

    def _run_blank_tower(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Run the tower on the blank image before the language model, where there is no other."""
        if not self._needs_blank or not self._must_run():
            return None
        self._needs_blank = False
        features = towers.features_of(towers.encode(self._model, self._source.blank))
        embedded = kwargs["inputs_embeds"]
        for level_features in features:  # an empty sum: zero, whatever the features are
            embedded = embedded + level_features[:0].sum().to(embedded.dtype)
        return args, kwargs | {"inputs_embeds": embedded}

    def _must_run(self) -> bool:
        return self._ranks.num_shards > 1 or (torch.is_grad_enabled() and self._is_trained)

    @cached_property
    def _is_trained(self) -> bool:
        """Whether the part of the model that makes features is trained."""
        prefixes = (self.family.tower_prefix, self.family.projector_prefix)
        return any(each.requires_grad for name, each in self._model.named_parameters() if name.startswith(prefixes))


def attach(config: Config, settings: ModelConfig, model: Any, ranks: RankMesh, *, freezes: bool) -> ModelImageInputs:
    """Give a whole vision model images. Freeze the parts that its section names, if `freezes`. Raises `ModelError`."""
    family = family_of(settings)
    assert family is not None, "the model takes more than text"
    if freezes:
        freeze(model, family, settings.dtensor_cfg)
    return ModelImageInputs(config, settings, family, model, ranks)


def freeze(model: Any, family: VisionFamily, settings: DtensorCfg) -> None:
    """Freeze the parts of a model that ``automodel_kwargs.freeze_config`` names."""
    prefixes = list_frozen_prefixes(family, settings)
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)


def _check_grid(actual: families.Grid, expected: families.Grid, digest: str) -> None:
    if tuple(actual) != tuple(expected):
        raise ModelError(
            f"image {digest[:12]} is divided into {actual} by its processor, and its prompt has tokens for {expected}"
        )
