"""Plans for low-rank adapters: engines receive base and adapter, and merge the weights themselves.

Trainers of adapters describe a layer's ``lora_A`` and ``lora_B`` beside its weight; engines want the weight. For each
slice of such a weight, an engine gets staging memory for the trainer's base, for the rows of ``lora_B`` and for the
columns of ``lora_A``. `Merging` writes the place that the engine named. So any engine that can describe its weights can
be given adapters, however it shards and fuses the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from tandem.common.errors import CoverageError, RefitError
from tandem.config.models import lora
from tandem.refit.columns import pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZES, Box, Layout, LayoutBuilder, PieceColumns, Tensor, contiguous_strides
from tandem.refit.planning.names import CONVERTIBLE
from tandem.refit.program import AdapterProducts, Merging, Staging

_WEIGHT, _A, _B = ".weight", f".{lora.A}", f".{lora.B}"
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
                    weight = tensor.name.removesuffix(kind) + _WEIGHT
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
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
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
        if tensor.shape != (adapter.b.shape[0], adapter.a.shape[1]):
            product = f"{adapter.b.name} and {adapter.a.name} of shape {(adapter.b.shape[0], adapter.a.shape[1])}"
            raise RefitError(f"{self._engine} wants {tensor.name} of shape {tensor.shape}, the product of {product}")
        if tensor.dtype not in CONVERTIBLE:
            raise RefitError(
                f"{self._engine} wants {tensor.name} as {tensor.dtype}: no adapter can be merged into that"
            )
        boxes = [self._layout.piece(row).box for row in rows]
        low = [min(box.start[dim] for box in boxes) for dim in range(2)]
        high = [max(box.stop[dim] for box in boxes) for dim in range(2)]
        rank = adapter.a.shape[0]
        a = self._receive(adapter.a, Box((0, low[1]), (rank, high[1] - low[1])))
        b = self._receive(adapter.b, Box((low[0], 0), (high[0] - low[0], rank)))
        self._names.append(tensor.name)
        self._scales.append(adapter.b.product_scale)
        size, item_size = ITEM_SIZES[tensor.dtype], ITEM_SIZES[_DTYPE]
        for row, box in zip(rows, boxes, strict=True):
            piece = self._layout.piece(row)
            base = self._stage(f"base of {tensor.name}{box}", box, tensor.dtype)
            self._builder.add(index, box, base, 0, contiguous_strides(box.shape, size))
            a_stride = (high[1] - low[1]) * item_size
            self._rows.append(
                (
                    len(self._names) - 1,
                    DTYPES.index(tensor.dtype),
                    box.shape,
                    int(self._layout.pieces.storage_P[row]),
                    piece.offset,
                    piece.strides,
                    base,
                    rank,
                    a,
                    (box.start[1] - low[1]) * item_size,
                    a_stride,
                    b,
                    (box.start[0] - low[0]) * rank * item_size,
                )
            )

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
