"""Plans for low-rank adapters: engines receive base and adapter, and merge the weights themselves.

Trainers of adapters describe a layer's ``lora_A`` and ``lora_B`` beside its weight; engines want the weight. For each
slice of such a weight, an engine gets staging memory for the trainer's base, for the rows of ``lora_B`` and for the
columns of ``lora_A``. `Merging` writes the place that the engine named. So any engine that can describe its weights can
be given adapters, however it shards and fuses the weights.

The adapter of a weight of three dimensions, which is named without ``.weight``, is one of each of its matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from tandem.common.errors import CoverageError, RefitError
from tandem.config.models import lora
from tandem.refit.columns import pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZES, Box, Layout, LayoutBuilder, PieceColumns, Tensor, contiguous_strides
from tandem.refit.planning.names import CONVERTIBLE
from tandem.refit.program import AdapterProducts, Merging, Staging

_WEIGHT, _A, _B = ".weight", f".{lora.A}", f".{lora.B}"
_MATRIX = 2
"""Dimensions of a matrix."""
_DTYPE = "float32"
"""Element type of adapters in engines: they are small, and their product is rounded only once, when it is added."""


class AdapterLayout(msgspec.Struct, frozen=True):
    """The layout that an engine receives, and the merge that follows."""

    layout: Layout
    """Layout that includes the staging storages."""
    staging: tuple[Staging, ...] = ()
    merging: Merging | None = None


class _Adapter(msgspec.Struct, frozen=True):
    a: Tensor
    b: Tensor


def adapt(sources: Mapping[str, Layout], destinations: Mapping[str, Layout]) -> dict[str, AdapterLayout]:
    """Return what each engine receives: the layout it wants, unless trainers hold adapters.

    Raises:
        CoverageError: no trainer holds one of an adapter's two matrices.
        RefitError: an adapter does not fit its weight, or the engine's element type cannot be merged into.

    """
    adapters = _adapters(sources)
    if not adapters:
        return {engine: AdapterLayout(layout) for engine, layout in destinations.items()}
    cache: dict[tuple[int, int, bytes], AdapterLayout] = {}
    adapter_layouts: dict[str, AdapterLayout] = {}
    for engine, layout in destinations.items():
        sizes = msgspec.msgpack.encode([(storage.name, storage.num_bytes) for storage in layout.storages])
        key = id(layout.tensors), id(layout.pieces), sizes
        if key not in cache:
            cache[key] = _Rewriting(engine, layout, adapters).result()
        adapted = cache[key]
        of_staging = adapted.layout.storages[len(layout.storages) :]
        engine_layout = msgspec.structs.replace(
            adapted.layout, host=layout.host, device=layout.device, storages=(*layout.storages, *of_staging)
        )
        adapter_layouts[engine] = msgspec.structs.replace(adapted, layout=engine_layout)
    return adapter_layouts


def _adapters(sources: Mapping[str, Layout]) -> dict[str, _Adapter]:
    """Return the trainers' adapters, by the name of the weight."""
    matrices: dict[str, dict[str, tuple[Tensor, str]]] = {}
    tuples = {id(layout.tensors): (layout.tensors, member) for member, layout in sources.items()}
    for tensors, member in tuples.values():
        for tensor in tensors:
            for kind in (_A, _B):
                if tensor.name.endswith(kind):
                    is_stack = len(tensor.shape) > _MATRIX
                    weight = tensor.name.removesuffix(kind) + ("" if is_stack else _WEIGHT)
                    first_tensor, who = matrices.setdefault(weight, {}).setdefault(kind, (tensor, member))
                    if first_tensor.product_scale != tensor.product_scale:
                        scales = f"{first_tensor.product_scale:g}, {member} by {tensor.product_scale:g}"
                        raise RefitError(f"{who} multiplies the product of {tensor.name} by {scales}")
    return {
        weight: _check(weight, {kind: tensor for kind, (tensor, _) in of.items()}) for weight, of in matrices.items()
    }


def _check(weight: str, of: Mapping[str, Tensor]) -> _Adapter:
    for kind in (_A, _B):
        if kind not in of:
            raise CoverageError(f"the adapter of {weight} has no {kind.strip('.')}, which no trainer holds")
    a, b = of[_A], of[_B]
    shapes = len(a.shape), len(b.shape)
    if shapes not in ((2, 2), (3, 3)) or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
        raise RefitError(f"{a.name} of shape {a.shape} and {b.name} of shape {b.shape} have no product")
    return _Adapter(a, b)


class _Rewriting:
    """Rewriting of one engine's layout."""

    def __init__(self, engine: str, layout: Layout, adapters: Mapping[str, _Adapter]) -> None:
        self._engine = engine
        self._layout = layout
        self._adapters = adapters
        self._builder = LayoutBuilder(layout.host, layout.device)
        self._staging: list[Staging] = []
        self._storages = [storage.name for storage in layout.storages]
        self._names: list[str] = []
        self._scales: list[float] = []
        self._rows: list[tuple[object, ...]] = []

    def result(self) -> AdapterLayout:
        """Return the layout that the engine receives."""
        layout = self._layout
        is_merged_T = np.array([tensor.name in self._adapters for tensor in layout.tensors], np.bool_)
        is_merged_P = is_merged_T[layout.pieces.tensor_P]
        if not is_merged_P.any():
            return AdapterLayout(layout)
        self._builder.add_tensors(layout.tensors)
        for storage in layout.storages:
            self._builder.storage(storage.name, storage.num_bytes, storage.address)
        rows_of: dict[int, list[int]] = {}
        for row in np.flatnonzero(is_merged_P).tolist():
            rows_of.setdefault(int(layout.pieces.tensor_P[row]), []).append(row)
        for index, rows in rows_of.items():
            self._add_tensor(index, rows)
        added = self._builder.build()
        merged_layout = msgspec.structs.replace(added, pieces=_join(layout.pieces.rows(~is_merged_P), added.pieces))
        columns = zip(*self._rows, strict=True)
        products = AdapterProducts(*(np.array(column, np.int64) for column in columns))
        merging = Merging(tuple(self._names), tuple(self._scales), tuple(self._storages), products)
        return AdapterLayout(merged_layout, tuple(self._staging), merging)

    def _add_tensor(self, index: int, rows: list[int]) -> None:
        """Receive base and adapter of a weight, for the pieces at `rows` that the engine wants."""
        tensor = self._layout.tensors[index]
        adapter = self._adapters[tensor.name]
        product_shape = (*adapter.b.shape[:-1], adapter.a.shape[-1])
        if tensor.shape != product_shape:
            product = f"{adapter.b.name} and {adapter.a.name} of shape {product_shape}"
            raise RefitError(f"{self._engine} wants {tensor.name} of shape {tensor.shape}, the product of {product}")
        if tensor.dtype not in CONVERTIBLE:
            raise RefitError(
                f"{self._engine} wants {tensor.name} as {tensor.dtype}: no adapter can be merged into that"
            )
        matrices = [matrix for row in rows for matrix in self._matrices(row)]
        boxes = [box for _, box, _, _ in matrices]
        stack = range(len(tensor.shape) - _MATRIX)
        low = [min(box.start[dim] for box in boxes) for dim in range(len(tensor.shape))]
        high = [max(box.stop[dim] for box in boxes) for dim in range(len(tensor.shape))]
        rank, leading = adapter.a.shape[-2], low[: len(stack)]
        num_leading = [high[dim] - low[dim] for dim in stack]
        num_rows, num_columns = (high[dim] - low[dim] for dim in (-2, -1))
        a = self._receive(adapter.a, Box((*leading, 0, low[-1]), (*num_leading, rank, num_columns)))
        b = self._receive(adapter.b, Box((*leading, low[-2], 0), (*num_leading, num_rows, rank)))
        self._names.append(tensor.name)
        self._scales.append(adapter.b.product_scale)
        size, item_size = ITEM_SIZES[tensor.dtype], ITEM_SIZES[_DTYPE]
        for storage, box, offset, strides in matrices:
            base = self._stage(f"base of {tensor.name}{box}", box, tensor.dtype)
            self._builder.add(index, box, base, 0, contiguous_strides(box.shape, size))
            number = box.start[0] - low[0] if stack else 0  # of the matrix, among those of the engine
            self._rows.append(
                (
                    len(self._names) - 1,
                    DTYPES.index(tensor.dtype),
                    box.shape[-2:],
                    storage,
                    offset,
                    strides[-2:],
                    base,
                    rank,
                    a,
                    (number * rank * num_columns + box.start[-1] - low[-1]) * item_size,
                    num_columns * item_size,
                    b,
                    (number * num_rows + box.start[-2] - low[-2]) * rank * item_size,
                )
            )

    def _matrices(self, row: int) -> Iterator[tuple[int, Box, int, tuple[int, ...]]]:
        """Yield each matrix in a piece that the engine wants: its storage, box, offset and strides."""
        piece, storage = self._layout.piece(row), int(self._layout.pieces.storage_P[row])
        box = piece.box
        if len(box.shape) == _MATRIX:
            yield storage, box, piece.offset, piece.strides
            return
        for number in range(box.start[0], box.stop[0]):
            inner = Box((number, *box.start[1:]), (1, *box.shape[1:]))
            yield storage, inner, piece.offset_of(inner), piece.strides

    def _receive(self, tensor: Tensor, box: Box) -> int:
        """Receive a slice of a matrix; return the number of its storage."""
        index = self._builder.tensor(tensor.name, tensor.shape, _DTYPE)
        storage = self._stage(tensor.name, box, _DTYPE)
        self._builder.add(index, box, storage, 0, contiguous_strides(box.shape, ITEM_SIZES[_DTYPE]))
        return storage

    def _stage(self, name: str, box: Box, dtype: str) -> int:
        num_bytes = math.prod(box.shape) * ITEM_SIZES[dtype]
        self._staging.append(Staging(name, num_bytes, dtype))
        self._storages.append(name)
        return self._builder.storage(name, num_bytes)


def _join(unmerged: PieceColumns, added: PieceColumns) -> PieceColumns:
    num_dims = max(unmerged.start_PD.shape[1], added.start_PD.shape[1])
    fills = {"start_PD": 0, "shape_PD": 1, "strides_PD": 0}
    columns = []
    for field in PieceColumns.__struct_fields__:
        parts = [getattr(unmerged, field), getattr(added, field)]
        if field in fills:
            parts = [pad_dims(column, num_dims, fills[field]) for column in parts]
        columns.append(np.concatenate(parts))
    return PieceColumns(*columns)
