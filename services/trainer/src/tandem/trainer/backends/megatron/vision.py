"""Vision models under Megatron-Core: Transformers' tower before the first stage of a language model.

Every tensor-parallel rank of the first stage has the whole tower and encodes the same images, so its gradients are
equal on all of them, and are not summed. Features replace embeddings of image tokens before activations are split
along the sequence. Every stage computes the rotation of its positions by itself.

Qwen3-VL also adds features to the outputs of its first layers ("deepstack"). They travel with the bounds of the row's
sequences, which every layer gets, so that each pass finds its own, also with pipelines and recomputation.

Shapes: ``N`` tokens of the row, ``M`` of them on this rank between layers; ``E`` elements of an embedding; ``F``
    features; ``D`` elements of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models import families, hf_config, vision_families
from tandem.config.schema import ModelConfig
from tandem.refit.adapters.megatron import TOWER
from tandem.refit.adapters.vision import is_of_tower, language_config, names_in_checkpoint
from tandem.refit.layout import Box
from tandem.samples.images import towers
from tandem.trainer.backends.megatron import routing, rows, weights
from tandem.trainer.backends.megatron.model import LayerChunk
from tandem.trainer.backends.pictures import PixelSource
from tandem.trainer.batching.images import RowImages
from tandem.trainer.models import checkpoint_activations, load_model


def language_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model's language model, as of a model of text. Raises `ModelError`."""
    if model["model_type"] not in families.MEGATRON_VISION:
        supported = ", ".join(families.MEGATRON_VISION)
        raise ModelError(f"Megatron-Core trains {supported} with images here, not {model['model_type']}")
    return language_config(model)


@dataclasses.dataclass
class SeeingSequences(routing.RoutedSequences):
    """Bounds of a row's sequences, with what is added to the outputs of the first layers."""

    added: tuple[torch.Tensor, ...] = ()
    """For each of these layers, ``[M, 1, E]``."""


class SeeingChunk(LayerChunk):
    """A chunk whose first stage has a tower, and takes images beside tokens."""

    def __init__(self, *args: Any, hugging_face: Any, image_token: int, **kwargs: Any) -> None:
        """Begin as any chunk does; `hugging_face` is the configuration of the whole model."""
        super().__init__(*args, **kwargs, scatter_embedding_sequence_parallel=False)
        self._image_token = image_token
        if hugging_face.model_type == "qwen3_vl":
            rope = hugging_face.text_config.rope_parameters
            self.rotary_pos_emb = InterleavedRotation(self.config.kv_channels, rope["rope_theta"])
        if not self.pre_process:
            return
        tower = make_tower(hugging_face, self.config.params_dtype)
        if self.config.recompute_granularity == "full":
            checkpoint_activations(tower)
        self.add_module(TOWER, tower)
        levels = getattr(hugging_face.vision_config, "deepstack_visual_indexes", ())
        layers = list(self.decoder.layers)
        if len(levels) > len(layers):
            raise ModelError(
                f"images reach the first {len(levels)} layers, and the first pipeline stage has {len(layers)}: "
                "policy.megatron_cfg.num_layers_in_first_pipeline_stage makes it larger"
            )
        for level, layer in enumerate(layers[: len(levels)]):
            layer.register_forward_hook(functools.partial(_add, level), with_kwargs=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        packed_seq_params: routing.RoutedSequences,
        pixels: towers.Inputs | None = None,
        blank: towers.Inputs | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return hidden states, as any chunk does, of a row with the images in `pixels`, if there are any.

        An image in `blank` is encoded too, for gradients of zero, and the language model gets nothing of it.
        """
        embedded = None
        if self.pre_process:
            embedded, added = self._embedded(input_ids, pixels, blank)
            if added:
                packed_seq_params = SeeingSequences(**vars(packed_seq_params), added=added)
        return super().forward(input_ids, *args, decoder_input=embedded, packed_seq_params=packed_seq_params, **kwargs)

    def _embedded(
        self, token_ids_1N: torch.Tensor, pixels: towers.Inputs | None, blank: towers.Inputs | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return a row's embeddings, ``[M, 1, E]``, with features for image tokens; and `SeeingSequences.added`."""
        embedded: torch.Tensor = self.embedding(input_ids=token_ids_1N, position_ids=None)
        deeper: list[torch.Tensor] = []
        if pixels is not None:
            first_FE, *deeper_features = (level_FE.to(embedded.dtype) for level_FE in self._features(pixels))
            is_image_N11 = (token_ids_1N == self._image_token).T[..., None]
            embedded = embedded.masked_scatter(is_image_N11, first_FE)
            deeper = [torch.zeros_like(embedded).masked_scatter(is_image_N11, each_FE) for each_FE in deeper_features]
        if blank is not None:  # an empty sum: zero, whatever the features are
            embedded = embedded + torch.stack([each_FE[:0].sum() for each_FE in self._features(blank)]).sum()
        if self.config.sequence_parallel:
            embedded, *deeper = (
                tensor_parallel.scatter_to_sequence_parallel_region(each) for each in (embedded, *deeper)
            )
        if not any(each.requires_grad for each in deeper):
            return embedded, tuple(deeper)
        leaves = tuple(each.detach().requires_grad_() for each in deeper)
        embedded = _Deeper.apply(embedded, leaves, *deeper)  # type: ignore[no-untyped-call]
        return embedded, leaves

    def _features(self, pixels: towers.Inputs) -> list[torch.Tensor]:
        """Return the features of images end to end, ``[F, E]``, and those for each of the first layers."""
        output = towers.encode(self.get_submodule(TOWER), pixels)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return [
            level.flatten(0, -2) if torch.is_tensor(level) else torch.cat([each.flatten(0, -2) for each in level])
            for level in levels
        ]


class _Deeper(torch.autograd.Function):
    """Leaves embeddings as they are, and gives features the gradients that layers behind them have left.

    Layers add leaves in place of the features, because a layer that is recomputed goes backward by itself, through
    everything before its leaves: that would be the tower, once for each layer. All of these have gone backward before
    the embeddings do.
    """

    @staticmethod
    def forward(
        ctx: Any, embedded: torch.Tensor, leaves: tuple[torch.Tensor, ...], *deeper: torch.Tensor
    ) -> torch.Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, *(leaf.grad for leaf in ctx.leaves)


def _add(level: int, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Add what a row has for this layer to its output."""
    added = getattr(kwargs["packed_seq_params"], "added", ())
    if not added:
        return None
    hidden, *other_outputs = output
    return (hidden + added[level], *other_outputs)


class InterleavedRotation(torch.nn.Module):
    """Rotary embeddings for positions of three numbers, whose frequencies take turns, as in Qwen3-VL."""

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self._head_dim, self._base = head_dim, base

    def forward(self, position_ids_31N: torch.Tensor, sections: Sequence[int], **_: Any) -> torch.Tensor:
        """Return the angle of each element of a head, ``[N, 1, 1, D]``.

        `sections` counts the frequencies of each number.
        """
        powers = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=position_ids_31N.device)
        angles_3NX = position_ids_31N[:, 0, :, None].float() / self._base ** (powers / self._head_dim)
        angles_NX = angles_3NX[0].clone()
        for number in (1, 2):
            frequencies = slice(number, 3 * sections[number], 3)
            angles_NX[:, frequencies] = angles_3NX[number, :, frequencies]
        return torch.cat([angles_NX, angles_NX], dim=-1)[:, None, None]


def linear_in_tower(model: Any) -> tuple[str, ...]:
    """Return the names of the linear layers of a model of Transformers that are not in its language model."""
    family = vision_families.VISION[model.config.model_type]
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_of_tower(name, family)
    )


def make_tower(hugging_face: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Return what makes features of images in a model of this configuration; parameters have names of the model.

    The language model has no memory: its place in the model is empty.
    """
    family = vision_families.VISION[hugging_face.model_type]
    with torch.device("meta"):
        model: Any = hf_config.find_model_class(hugging_face).from_config(
            hugging_face, dtype=dtype, trust_remote_code=False
        )
    inner = model.model
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


class MegatronImageInputs:
    """Gives chunks the inputs that come from the images of rows."""

    def __init__(
        self, config: Config, section: ModelConfig, family: vision_families.VisionFamily, device: torch.device
    ) -> None:
        """Read the settings for images of a section's model. Raises `ModelError`."""
        self._source, self._family = PixelSource(config, section, family, device), family
        self.undrawable = self._source.undrawable
        """Tokens that no policy draws, and that have no probability."""
        self._section = section

    def chunk_of(self, hugging_face: Any) -> Callable[..., SeeingChunk]:
        """Return what makes chunks of a whole model of this configuration."""
        return functools.partial(SeeingChunk, hugging_face=hugging_face, image_token=self._source.image_token)

    def freeze(self, chunk: Any) -> None:
        """Freeze the parts of a chunk that ``freeze_config`` names. An output layer of its own is in neither."""
        prefixes = vision_families.list_frozen_prefixes(self._family, self._section.dtensor_cfg)
        for name, parameter in chunk.named_parameters():
            part_name = name.removeprefix(f"{TOWER}.")
            if part_name == name and not (
                name.startswith("output_layer.") and not chunk.share_embeddings_and_output_weights
            ):
                part_name = self._family.language_prefix
            if part_name.startswith(prefixes):
                parameter.requires_grad_(False)

    def tensors(self) -> SeeingFolder | weights.TensorsInMemory:
        """Return the weights that the model starts from, which need no conversion. Raises `ModelError`."""
        folder = Path(self._section.model_name)
        if self._section.new_model is not None and not any(folder.glob("*.safetensors")):
            return weights.TensorsInMemory(load_model(str(folder), self._section, torch.float32).state_dict())
        return self.opened(folder)

    def opened(self, folder: Path) -> SeeingFolder:
        """Return the tensors of a checkpoint's files. Raises `ModelError`."""
        return SeeingFolder(folder, self._family)

    def __call__(self, row: rows.MegatronRow, chunk: torch.nn.Module) -> dict[str, Any]:
        """Return inputs of a chunk beside the row's tokens. Raises `DataError` for an image that cannot be read."""
        inputs: dict[str, Any] = {}
        images: RowImages | None = None if row.batch is None else row.batch.media
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


def attach(config: Config, section: ModelConfig, device: torch.device) -> MegatronImageInputs:
    """Return what gives the chunks of a vision model images. Raises `ModelError`."""
    family = vision_families.family_of(section)
    assert family is not None, "the model takes more than text"
    return MegatronImageInputs(config, section, family, device)


def _positions(row: rows.MegatronRow, images: RowImages | None) -> torch.Tensor:
    """Return the positions of a row's tokens, ``[3, 1, N]``; those of padding are arbitrary."""
    counted_31N = row.position_ids_1M.expand(3, 1, -1)
    if images is None or images.position_ids is None:
        return counted_31N
    positions_31N = images.position_ids.reshape(3, 1, -1)  # padded rows end to end
    return torch.cat([positions_31N, counted_31N[..., positions_31N.shape[-1] :]], dim=-1)


class SeeingFolder:
    """The tensors of a checkpoint's files, by their names in memory; some files have older names."""

    def __init__(self, folder: Path, family: vision_families.VisionFamily) -> None:
        """Open the files. Raises `ModelError`."""
        self._files, self._family = weights.SafetensorsFolder(folder), family

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        stored_name = next((each for each in names_in_checkpoint(name, self._family) if each in self._files), name)
        return self._files.read(stored_name, shape, box)
