"""Models that see under Megatron-Core: a tower of Transformers before the first stage of a language model.

Every tensor-parallel rank of the first stage has the whole tower and encodes the same images, so its gradients are
equal on all of them, and are not summed. Features replace embeddings of image tokens before activations are split
along the sequence. Every stage computes the rotation of its positions by itself.

Shapes: ``N`` tokens of the row; ``E`` elements of an embedding; ``X`` numbers of a position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models.families import MEGATRON_VISION
from tandem.config.models.hf_config import model_class
from tandem.config.models.vision_families import VISION, VisionFamily
from tandem.config.schema import Model
from tandem.refit.adapters.megatron import TOWER
from tandem.refit.adapters.vision import is_of_tower, language_config, names_in_checkpoint
from tandem.refit.layout import Box
from tandem.samples.images import towers
from tandem.trainer.backends.megatron.model import Chunk
from tandem.trainer.backends.megatron.rows import Row
from tandem.trainer.backends.megatron.sources import SafetensorsFolder, TensorsInMemory
from tandem.trainer.backends.pictures import PixelSource, frozen_prefixes
from tandem.trainer.micro_batches import RowImages
from tandem.trainer.models import load_model


def language_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model's language model, as of a model of text. Raises `ModelError`."""
    if model["model_type"] not in MEGATRON_VISION:
        known = ", ".join(MEGATRON_VISION)
        raise ModelError(f"Megatron-Core trains {known} with images here, not {model['model_type']}")
    return language_config(model)


class SeeingChunk(Chunk):
    """A chunk whose first stage has a tower, and takes images beside tokens."""

    def __init__(self, *args: Any, hugging_face: Any, image_token: int, **kwargs: Any) -> None:
        """Begin as any chunk does; `hugging_face` is the configuration of the whole model."""
        super().__init__(*args, **kwargs, scatter_embedding_sequence_parallel=False)
        self._image_token = image_token
        if self.pre_process:
            self.add_module(TOWER, make_tower(hugging_face, self.config.params_dtype))

    def forward(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        pixels: towers.Inputs | None = None,
        blank: towers.Inputs | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return hidden states, as any chunk does, of a row with the images in `pixels`, if there are any.

        An image in `blank` is encoded too, for gradients of zero, and the language model gets nothing of it.
        """
        embedded = self._embedded(input_ids, pixels, blank) if self.pre_process else None
        return super().forward(input_ids, *args, decoder_input=embedded, **kwargs)

    def _embedded(
        self, token_ids_1N: torch.Tensor, pixels: towers.Inputs | None, blank: towers.Inputs | None
    ) -> torch.Tensor:
        """Return the embeddings of a row, ``[N, 1, E]``, with features in the places of image tokens."""
        embedded: torch.Tensor = self.embedding(input_ids=token_ids_1N, position_ids=None)
        if pixels is not None:
            features = self._features(pixels).to(embedded.dtype)
            embedded = embedded.masked_scatter((token_ids_1N == self._image_token).T[..., None], features)
        if blank is not None:  # an empty sum: zero, whatever the features are
            embedded = embedded + self._features(blank)[:0].sum().to(embedded.dtype)
        if self.config.sequence_parallel:
            embedded = tensor_parallel.scatter_to_sequence_parallel_region(embedded)
        return embedded

    def _features(self, pixels: towers.Inputs) -> torch.Tensor:
        """Return the features of images, end to end."""
        found = towers.features_of(towers.encode(self.get_submodule(TOWER), pixels))
        return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def linear_in_tower(model: Any) -> tuple[str, ...]:
    """Return the names of the linear layers of a model of Transformers that are not in its language model."""
    family = VISION[model.config.model_type]
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_of_tower(name, family)
    )


def make_tower(hugging_face: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Return what makes features of images in a model of this configuration; parameters have names of the model.

    The language model has no memory: its place in the model is empty.
    """
    family = VISION[hugging_face.model_type]
    with torch.device("meta"):
        whole: Any = model_class(hugging_face).from_config(hugging_face, dtype=dtype, trust_remote_code=False)
    inner = whole.model
    for name, child in list(inner.named_children()):
        if f"model.{name}." == family.language_prefix:
            delattr(inner, name)
        elif hasattr(child, "_from_config"):
            setattr(inner, name, type(child)._from_config(child.config, dtype=dtype))
        else:
            setattr(inner, name, type(child)(hugging_face).to(dtype))
    tower = torch.nn.Module()
    tower.model = inner
    return tower.eval()


class Pictures:
    """Gives chunks the inputs that come from the images of rows."""

    def __init__(self, config: Config, section: Model, family: VisionFamily, device: torch.device) -> None:
        """Read the settings for images of a section's model. Raises `ModelError`."""
        self._source, self._family = PixelSource(config, section, family, device), family
        self.undrawable = self._source.undrawable
        """Tokens that no policy draws, and that have no probability."""
        self._section = section

    def chunk_of(self, hugging_face: Any) -> Callable[..., SeeingChunk]:
        """Return what makes chunks of a whole model of this configuration."""
        return functools.partial(SeeingChunk, hugging_face=hugging_face, image_token=self._source.image_token)

    def freeze(self, chunk: torch.nn.Module) -> None:
        """Freeze the parts of a chunk that ``freeze_config`` names."""
        prefixes = frozen_prefixes(self._family, self._section.dtensor_cfg)
        for name, parameter in chunk.named_parameters():
            own = name.removeprefix(f"{TOWER}.")
            if own.startswith(prefixes) if own != name else self._family.language_prefix in prefixes:
                parameter.requires_grad_(False)

    def tensors(self) -> SeeingFolder | TensorsInMemory:
        """Return the weights that the model starts from, which need no conversion. Raises `ModelError`."""
        folder = Path(self._section.model_name)
        if self._section.new_model is not None and not any(folder.glob("*.safetensors")):
            return TensorsInMemory(load_model(str(folder), self._section, torch.float32).state_dict())
        return self.opened(folder)

    def opened(self, folder: Path) -> SeeingFolder:
        """Return the tensors of a checkpoint's files. Raises `ModelError`."""
        return SeeingFolder(folder, self._family)

    def __call__(self, row: Row, chunk: torch.nn.Module) -> dict[str, Any]:
        """Return inputs of a chunk beside the row's tokens. Raises `DataError` for an image that cannot be read."""
        inputs: dict[str, Any] = {}
        images = None if row.batch is None else row.batch.images
        if self._family.has_mrope:
            inputs["position_ids"] = _positions(row, images)
        bare: Any = unwrap_model(chunk)
        if not bare.pre_process:
            return inputs
        if images is not None and images.digests:
            inputs["pixels"] = self._source.pixels(images)
        elif torch.is_grad_enabled() and any(each.requires_grad for each in bare.get_submodule(TOWER).parameters()):
            inputs["blank"] = self._source.blank  # every trained parameter gets a gradient of every row
        return inputs


def _positions(row: Row, images: RowImages | None) -> torch.Tensor:
    """Return the positions of a row's tokens, ``[3, 1, N]``; those of padding are arbitrary."""
    counted_31N = row.position_ids_1M.expand(3, 1, -1)
    if images is None or images.position_ids is None:
        return counted_31N
    found = images.position_ids.reshape(3, 1, -1)  # padded rows end to end
    return torch.cat([found, counted_31N[..., found.shape[-1] :]], dim=-1)


class SeeingFolder:
    """The tensors of a checkpoint's files, by their names in memory; some files have older names."""

    def __init__(self, folder: Path, family: VisionFamily) -> None:
        """Open the files. Raises `ModelError`."""
        self._files, self._family = SafetensorsFolder(folder), family

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        there = next((each for each in names_in_checkpoint(name, self._family) if each in self._files), name)
        return self._files.read(there, shape, box)

