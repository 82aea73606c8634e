"""A Transformers model held whole: every tensor in a parameter of its own name.

Since version 5, transformers fuses the experts of a layer in memory: ``experts.gate_up_proj`` of shape (experts, 2 ×
intermediate, hidden) and ``experts.down_proj`` of shape (experts, hidden, intermediate). Checkpoints still have three
tensors for each expert. Adapters of the fused parameters are divided likewise: those of an expert's gate and up
projection have one ``lora_A``, in the same memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterator, Mapping

import msgspec

from tandem.config.models import lora
from tandem.refit.adapters import catalogue, deployment, geometry
from tandem.refit.adapters.parameters import ParameterFill, RankBuilder, stack
from tandem.refit.layout import Box, Layout, LayoutBuilder, LayoutPiece, Tensor, whole

_IN_LAYER = re.compile(r"^model\.layers\.\d+\.")
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_OUTSIDE_LANGUAGE = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|connector|multi_modal_projector)\.")
_FUSED = re.compile(r"^(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(\.lora_[AB]\.weight)?$")


class Parameter(msgspec.Struct, frozen=True):
    """A kind of parameter of the whole model; the fields are arguments of `RankBuilder.parameter`."""

    name: str
    shape: tuple[int, ...]
    fills: tuple[ParameterFill, ...]
    experts: range = range(0)


@functools.lru_cache(maxsize=8)
def parameters(model: catalogue.ModelShape, fuses_experts: bool = True) -> tuple[Parameter, ...]:
    """Return every kind of parameter of a model, unsharded, in the order of its tensors.

    Args:
        model: any; if only its tensors are known, each is a kind of its own.
        fuses_experts: whether the experts of a layer are one parameter, as in transformers 5.

    """
    if model.geometry is None:
        return tuple(_plain(tensor.name, tensor.shape) for tensor in model.tensors)
    experts = model.geometry.experts
    kinds: dict[str, Parameter] = {}
    for tensor in model.tensors:
        if tensor.name in model.names_of_scales:
            continue  # Added with the tensors that they scale.
        name = _OF_EXPERT.sub(".experts.{expert}.", _IN_LAYER.sub(geometry.LAYER, tensor.name))
        if "{expert}" not in name:
            kinds.setdefault(name, _plain(name, tensor.shape))
        elif not fuses_experts:
            assert experts is not None, "the tensors of experts come from its sizes"
            plain = _plain(name, tensor.shape)
            kinds.setdefault(name, msgspec.structs.replace(plain, experts=range(experts.num_experts)))
    if experts is not None and fuses_experts:
        kinds |= {parameter.name: parameter for parameter in _list_fused(model)}
    return tuple(kinds.values())


def _plain(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, shape, (ParameterFill(name, whole(shape), (0,) * len(shape)),))


def _list_fused(model: catalogue.ModelShape) -> Iterator[Parameter]:
    hidden, experts = model.required_geometry.hidden_size, model.required_geometry.experts
    assert experts is not None, "only called for a model with experts"
    prefix = geometry.LAYER + "mlp.experts."
    gate_up = (experts.intermediate_size, hidden)
    parts = stack(*((f"{prefix}{{expert}}.{part}_proj.weight", whole(gate_up)) for part in ("gate", "up")))
    down = ParameterFill(f"{prefix}{{expert}}.down_proj.weight", whole(gate_up[::-1]), (0, 0, 0))
    of_layer = range(experts.num_experts)
    fused = tuple(msgspec.structs.replace(part, at=(0, *part.at)) for part in parts)
    yield Parameter(prefix + "gate_up_proj", (experts.num_experts, 2 * gate_up[0], hidden), fused, of_layer)
    yield Parameter(prefix + "down_proj", (experts.num_experts, *gate_up[::-1]), (down,), of_layer)
    for name, projections in ("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)):
        for kind in (lora.A, lora.B):
            tensors = [f"{prefix}{{expert}}.{projection}.{kind}" for projection in projections]
            shape = model.shape_of(tensors[0])
            if shape is not None:
                # All projections in a fused parameter have one lora_A.
                rows = 0 if kind == lora.A else shape[0]
                places = [(0, number * rows, 0) for number in range(len(tensors))]
                adapter = tuple(
                    ParameterFill(*each) for each in zip(tensors, [whole(shape)] * len(tensors), places, strict=True)
                )
                num_rows = rows * len(tensors) or shape[0]
                yield Parameter(f"{prefix}{name}.{kind}", (experts.num_experts, num_rows, shape[1]), adapter, of_layer)


def is_outside_language(name: str) -> bool:
    """Return whether a parameter is of the tower that turns images into features, or of its projector.

    Names in memory begin with ``model.``; some in checkpoints do not.
    """
    return _OUTSIDE_LANGUAGE.match(name) is not None


class HuggingFace(deployment.ParallelDeployment, frozen=True):
    """One process, or several replicas that each hold the whole model."""

    num_replicas: int = 1
    fuses_experts: bool = True

    @property
    def num_ranks(self) -> int:
        """Number of processes in the program."""
        return self.num_replicas

    def place(self, rank: int) -> Hashable:
        """Return the same key for all ranks."""
        return ()

    def parameters(self, model: catalogue.ModelShape, rank: int) -> Layout:
        """Return a rank's layout without its host."""
        num_layers = model.geometry.num_layers if model.geometry else 0
        builder = RankBuilder(model, range(num_layers))
        for parameter in parameters(model, self.fuses_experts):
            builder.parameter(parameter.name, parameter.shape, parameter.fills, parameter.experts)
        return builder.build()


def as_checkpoint(layout: Layout) -> Layout:
    """Return a layout of transformers' parameters, or shards of them, with experts named as in a checkpoint.

    ``experts.gate_up_proj`` becomes ``experts.<n>.gate_proj.weight`` and ``experts.<n>.up_proj.weight`` for each
    expert, and ``experts.down_proj`` becomes ``experts.<n>.down_proj.weight``. So it is with adapters of them. The
    memory stays the same. Experts that are fused in another way are left alone.
    """
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    fused = {index for index, tensor in enumerate(layout.tensors) if _is_fused(tensor.name, shapes)}
    if not fused:
        return layout
    builder = LayoutBuilder(layout.host, layout.device)
    for storage in layout.storages:
        builder.storage(storage.name, storage.num_bytes, storage.address)
    places: dict[int, list[tuple[int, Box]]] = {}
    for index, tensor in enumerate(layout.tensors):
        parts = _experts_in(tensor) if index in fused else [(tensor, whole(tensor.shape))]
        places[index] = [
            (builder.tensor(part.name, part.shape, part.dtype, block=part.block, scales=part.scales), box)
            for part, box in parts
        ]
    for row, index in enumerate(layout.pieces.tensor_P.tolist()):
        piece, number_of_storage = layout.piece(row), int(layout.pieces.storage_P[row])
        for number, place in places[index]:
            _add_common(builder, number, place, piece, number_of_storage, 1 if index in fused else 0)
    return builder.build()


def _is_fused(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a parameter fuses the experts of a layer as `parameters` describes."""
    match = _FUSED.match(name)
    if match is None:
        return False
    gate_up, down = (shapes.get(f"{match[1]}{part}", ()) for part in ("gate_up_proj", "down_proj"))
    return len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])


def _experts_in(tensor: Tensor) -> Iterator[tuple[Tensor, Box]]:
    """Yield each checkpoint tensor inside a fused one, with its slice of it."""
    match = _FUSED.match(tensor.name)
    assert match is not None, "only called for fused tensors"
    prefix, part, kind = match[1], match[2], match[3] or ".weight"
    num_experts, num_rows, num_columns = tensor.shape
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    # All projections in a fused parameter have the rows of one lora_A.
    num_each = num_rows if kind == f".{lora.A}" else num_rows // len(names)
    for expert in range(num_experts):
        for index, name in enumerate(names):
            box = Box((expert, index * num_each % num_rows, 0), (1, num_each, num_columns))
            yield Tensor(f"{prefix}{expert}.{name}{kind}", (num_each, num_columns), tensor.dtype), box


def _add_common(
    builder: LayoutBuilder, tensor: int, place: Box, piece: LayoutPiece, storage: int, num_dropped: int
) -> None:
    """Add the part of a piece that overlaps a tensor at `place`, without the first `num_dropped` dimensions."""
    if not piece.box.shape:
        builder.add(tensor, piece.box, storage, piece.offset, piece.strides)
        return
    common = piece.box.intersect(place)
    if common is not None:
        start = tuple(a - b for a, b in zip(common.start, place.start, strict=True))
        box = Box(start[num_dropped:], common.shape[num_dropped:])
        builder.add(tensor, box, storage, piece.offset_of(common), piece.strides[num_dropped:])
