"""Parameters by a backend's names, filled with slices of a checkpoint's tensors.

An adapter describes each kind of parameter once for all layers and experts: its name, its shape in this process, and
which slices of which tensors lie where in it. `RankBuilder` turns that into the columns of a layout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Sequence

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.columns import Ints
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutBuilder, Tensor, contiguous_strides


class ParameterFill(msgspec.Struct, frozen=True):
    """A slice of a tensor and its position in a parameter."""

    tensor: str
    """Name pattern of the tensor, with ``{layer}`` and ``{expert}`` in place of their numbers."""
    box: Box
    """Slice of the tensor."""
    at: tuple[int, ...]
    """Index in the parameter of the slice's first element."""
    axes: tuple[int, ...] = ()
    """Dimension of the parameter for each of the tensor's; empty for the last ones, in order."""

    def dims(self, num_dims: int) -> tuple[int, ...]:
        """Return `axes` explicitly, for a parameter of `num_dims` dimensions."""
        return self.axes or tuple(range(num_dims - len(self.box.shape), num_dims))

    def clip(self, window: Box) -> ParameterFill | None:
        """Return the part inside a window of the parameter, positioned relative to the window; or None."""
        dims = self.dims(len(window.start))
        place, shape = list(self.at), [1] * len(window.start)
        for dim, n in zip(dims, self.box.shape, strict=True):
            shape[dim] = n
        common = Box(tuple(place), tuple(shape)).intersect(window)
        if common is None:
            return None
        start = tuple(a + common.start[dim] - self.at[dim] for a, dim in zip(self.box.start, dims, strict=True))
        at = tuple(a - b for a, b in zip(common.start, window.start, strict=True))
        return ParameterFill(self.tensor, Box(start, tuple(common.shape[dim] for dim in dims)), at, self.axes)


def stack(*parts: tuple[str, Box]) -> tuple[ParameterFill, ...]:
    """Return slices one after the other along the first dimension of a parameter, as `numpy.concatenate` would."""
    fills, row = [], 0
    for tensor, box in parts:
        fills.append(ParameterFill(tensor, box, (row, *(0 for _ in box.shape[1:]))))
        row += box.shape[0]
    return tuple(fills)


def cut(shape: Sequence[int], dim: int, rank: int, size: int) -> Box:
    """Return the slice of one of `size` ranks along a dimension. Raises `RefitError` if it does not divide evenly."""
    if shape[dim] % size:
        raise RefitError(f"{shape[dim]} elements cannot be split evenly over {size} ranks")
    n = shape[dim] // size
    start, share = [0] * len(shape), list(shape)
    start[dim], share[dim] = rank * n, n
    return Box(tuple(start), tuple(share))


def gate_and_up(model: ModelShape, prefix: str, kind: str, rank: int, size: int) -> tuple[tuple[str, Box], ...]:
    """Return one rank's rows of the gate and of the up projection; empty if the model has none.

    Args:
        model: the model.
        prefix: of the names of its dense feed-forward layers.
        kind: weight or bias.
        rank: in the group that shares them.
        size: of that group.

    """
    parts: list[tuple[str, Box]] = []
    for part in ("gate", "up"):
        layer, first = model.required_geometry.rows_of(part)
        name = f"{prefix}{layer}.{kind}"
        shape = model.shape_of(name)
        if shape is None:
            return ()
        if layer != f"{part}_proj":
            shape = (model.required_geometry.intermediate_size, *shape[1:])
        box = cut(shape, 0, rank, size)
        parts.append((name, Box((first + box.start[0], *box.start[1:]), box.shape)))
    return tuple(parts)


class RankBuilder:
    """Builder of one process's layout from its parameters."""

    def __init__(self, model: ModelShape, layers: Sequence[int] = (), names: Sequence[str] = ()) -> None:
        """Start with no parameters.

        Args:
            model: with the tensors that fill the parameters.
            layers: the layers of this process, by their numbers in the checkpoint.
            names: replacements of ``{layer}`` in parameter names, one for each of `layers`; default: its number.

        """
        self._model = model
        self._layers = np.asarray(layers, np.int64)
        self._names = list(names) or [str(layer) for layer in layers]
        # The host is filled in later, for each process with this layout.
        self._builder = LayoutBuilder(host="")
        self._builder.add_tensors(model.tensors)

    def replicate(self, name: str, tensor: str, only: Container[int] | None = None) -> None:
        """Add a parameter that is a whole tensor, as `parameter` does."""
        self.share(name, tensor, 0, 0, 1, only)

    def share(self, name: str, tensor: str, dim: int, rank: int, size: int, only: Container[int] | None = None) -> None:
        """Add a parameter that is one rank's slice of a tensor cut along `dim` over `size` ranks."""
        shape = self._model.shape_of(tensor)
        if shape is not None:
            box = cut(shape, dim, rank, size)
            self.parameter(name, box.shape, stack((tensor, box)), only=only)

    def padding(self, name: str, shape: Sequence[int], tensor: str) -> None:
        """Add a parameter of a tensor's element type that contains only padding."""
        if self._model.shape_of(tensor) is not None:
            dtype = self._model.tensors[self._model.index[tensor]].dtype
            self._builder.storage(name, math.prod(shape) * ITEM_SIZES[dtype])

    def copy(self) -> RankBuilder:
        """Return a builder that has the same parameters, and gets others."""
        builder = copy.copy(self)
        builder._builder = self._builder.copy()
        return builder

    def build(self) -> Layout:
        """Return the layout, without a host."""
        return self._builder.build()

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        fills: Sequence[ParameterFill],
        experts: range = range(0),
        only: Container[int] | None = None,
    ) -> None:
        """Add a parameter for each layer of this process that has its tensors; none if the model lacks them.

        Args:
            name: of the parameter, with ``{layer}``, and ``{expert}`` if each expert has its own parameter.
            shape: of the parameter in this process.
            fills: its contents; the rest is padding.
            experts: those of this process, if the tensors are experts'. In a fused parameter, each expert lies one
                further along the first dimension; ``{expert}`` in `name` counts from 0.
            only: layers that may have it; None for all.

        Raises:
            RefitError: a layer has only some of the tensors, or their element types differ.

        """
        if not fills or not math.prod(shape):
            return
        indices = [self._find(fill.tensor, experts) for fill in fills]
        rows = np.flatnonzero(np.any([(tensors_LE >= 0).any(axis=1) for tensors_LE in indices], axis=0))
        if only is not None:
            rows = rows[[int(layer) in only for layer in self._layers[rows]]]
        if not len(rows):
            return
        tensors = [tensors_LE[rows] for tensors_LE in indices]
        if any((tensors_LE < 0).any() for tensors_LE in tensors):
            raise RefitError(f"{name}: the model lacks some of the tensors that lie in it")
        formats = [self._model.formats[tensors_LE] for tensors_LE in tensors]
        if any((formats_LE != formats[0][0, 0]).any() for formats_LE in formats):
            raise RefitError(f"{name}: the tensors that lie in it have different element types")
        self._place(name, tuple(shape), fills, tensors, rows)
        first = self._model.tensors[tensors[0][0, 0]]
        if first.block:
            scales = [self._scales_of(tensors_LE) for tensors_LE in tensors]
            scaled = [
                _scale_fill(fill, first.block, self._model.tensors[t[0, 0]])
                for fill, t in zip(fills, tensors, strict=True)
            ]
            self._place(name + "_scale_inv", _blocks(shape, first.block), scaled, scales, rows)

    def _find(self, pattern: str, experts: range) -> Ints:
        """Return indices of tensors, shape (layers, experts), 1 for a missing placeholder; -1 for a missing tensor."""
        indices: Ints = self._model.indices(pattern)
        if "{layer}" in pattern:
            indices = indices[self._layers]
        if "{expert}" in pattern:
            return indices[:, experts.start : experts.stop : experts.step]
        return indices.reshape(-1, 1)

    def _place(
        self, name: str, shape: tuple[int, ...], fills: Sequence[ParameterFill], tensors: Sequence[Ints], rows: Ints
    ) -> None:
        item_size = ITEM_SIZES[self._model.tensors[tensors[0][0, 0]].dtype]
        num_experts = tensors[0].shape[1]
        is_one_each = "{expert}" in name
        storages_LE = self._storages(name, rows, num_experts if is_one_each else 1, math.prod(shape) * item_size)
        strides = contiguous_strides(shape, item_size)
        steps_E = np.arange(num_experts) * (0 if is_one_each or num_experts == 1 else strides[0])
        for fill, tensor_LE in zip(fills, tensors, strict=True):
            offset = sum(index * stride for index, stride in zip(fill.at, strides, strict=True))
            storage_LE, offset_LE = (np.broadcast_to(v, tensor_LE.shape) for v in (storages_LE, offset + steps_E))
            self._builder.add_many(
                tensor_LE.ravel(),
                fill.box.start,
                fill.box.shape,
                storage_LE.ravel(),
                offset_LE.ravel(),
                [strides[dim] for dim in fill.dims(len(shape))],
            )

    def _storages(self, name: str, rows: Ints, num_experts: int, num_bytes: int) -> Ints:
        """Add the storage of each layer and expert; shape (layers, experts)."""
        names = [self._names[row] for row in rows] if "{layer}" in name else [""]
        return np.array(
            [
                [self._builder.storage(name.format(layer=layer, expert=e), num_bytes) for e in range(num_experts)]
                for layer in names
            ],
            dtype=np.int64,
        )

    def _scales_of(self, tensors_LE: Ints) -> Ints:
        index, tensors = self._model.index, self._model.tensors
        flat = [index[tensors[tensor].scales] for tensor in tensors_LE.ravel()]
        return np.array(flat, np.int64).reshape(tensors_LE.shape)


def _blocks(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks that cover an array; `block` applies to the last dimensions."""
    num_leading = len(shape) - len(block)
    return *shape[:num_leading], *(-(-n // size) for n, size in zip(shape[num_leading:], block, strict=True))


def _scale_fill(fill: ParameterFill, block: Sequence[int], tensor: Tensor) -> ParameterFill:
    """Return the position of a fill's scales in the parameter of scales."""
    at = list(fill.at)
    for dim, size, a, b, n in zip(fill.dims(len(at)), block, fill.box.start, fill.box.stop, tensor.shape, strict=True):
        if a % size or fill.at[dim] % size or (b % size and b != n):
            raise RefitError(f"{tensor.name}{fill.box} does not end where its blocks of {size} elements do")
        at[dim] //= size
    start = tuple(a // size for a, size in zip(fill.box.start, block, strict=True))
    return ParameterFill(fill.tensor, Box(start, _blocks(fill.box.shape, block)), tuple(at), fill.axes)
