"""Destination shards: the slices that an engine receives, cut along source shards, each byte once.

Engines with identical layouts (data-parallel replicas) form a class, which is resolved once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import numpy as np

from tandem.common.errors import CoverageError
from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, Box, Layout, PieceColumns, PrivateMemory, Storage
from tandem.refit.planning.names import PairedTensors
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.planning.sweep import group_rows
from tandem.refit.program import Quantisation, QuantisedRegions, QuantizedDestinations, Staging

ALIGNMENT = 64
"""Regions start at multiples of this number of bytes."""


class StagedRegions(msgspec.Struct, frozen=True, eq=False):
    """Regions to fetch in the source's precision (Q rows), and how to quantise them."""

    tensor_Q: Ints
    """Global number of the tensor of values."""
    start_QD: Ints
    shape_QD: Ints
    staging_Q: Ints
    """Index into `staging`."""
    offset_Q: Ints
    strides_QD: Ints
    staging: tuple[Staging, ...]
    quantisations: tuple[Quantisation, ...]


def stage(layout: Layout, tensors: PairedTensors, tensor_P: Ints, row_P: Ints) -> StagedRegions:
    """Plan the quantisation of some pieces of a layout, both values and their scales.

    Args:
        layout: of the pieces.
        tensors: with the block shape of each.
        tensor_P: global numbers of the pieces' tensors.
        row_P: rows of the pieces in the layout.

    """
    pieces, num_dims = layout.pieces.rows(row_P), tensors.table.num_dims
    start_PD, shape_PD = pad_dims(pieces.start_PD, num_dims, 0), pad_dims(pieces.shape_PD, num_dims, 1)
    of_P = tensors.quantised_of_G[tensor_P]
    is_scale_P = of_P >= 0
    value_P = np.where(is_scale_P, of_P, tensor_P)
    block_PD, limit_PD = tensors.block_GD[value_P], tensors.table.shape_TD[value_P]
    is_scale_P1 = is_scale_P[:, None]
    first_PD = np.where(is_scale_P1, start_PD, start_PD // block_PD)  # in blocks
    stop_PD = np.where(is_scale_P1, start_PD + shape_PD, -(-(start_PD + shape_PD) // block_PD))
    region_start_PD = first_PD * block_PD
    region_shape_PD = np.minimum(stop_PD * block_PD, limit_PD) - region_start_PD
    chosen_Q, region_P = group_rows(value_P, region_start_PD, region_shape_PD)

    scales_dtype_G = np.full(len(tensors.quantised_of_G), DTYPES.index("float32"))
    scale_numbers = np.flatnonzero(tensors.quantised_of_G >= 0)
    scales_dtype_G[tensors.quantised_of_G[scale_numbers]] = tensors.wanted_dtype_G[scale_numbers]
    tensor_Q = value_P[chosen_Q]
    dtype_Q = tensors.source_dtype_G[tensor_Q]
    kind_first, kind_Q = group_rows(
        tensors.wanted_dtype_G[tensor_Q], dtype_Q, scales_dtype_G[tensor_Q], tensors.block_GD[tensor_Q]
    )
    shape_QD = region_shape_PD[chosen_Q]
    strides_QD = _contiguous_strides(shape_QD, ITEM_SIZE_OF_CODE[dtype_Q])
    offset_Q = np.zeros(len(tensor_Q), np.int64)
    place_start_PD = np.where(is_scale_P1, 0, start_PD - region_start_PD)  # a region of scales is taken whole
    places = QuantizedDestinations(
        region_P, place_start_PD, shape_PD, pieces.storage_P, pieces.offset_P, pad_dims(pieces.strides_PD, num_dims, 0)
    )
    staging: list[Staging] = []
    quantisations: list[Quantisation] = []
    for kind, first in enumerate(kind_first.tolist()):
        mine = np.flatnonzero(kind_Q == kind)
        sizes = shape_QD[mine].prod(axis=1) * ITEM_SIZE_OF_CODE[dtype_Q[mine]]
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT)
        offset_Q[mine] = ends - ends[0] if len(mine) == 1 else np.concatenate([[0], ends[:-1]])
        staging.append(Staging(f"staging for quantisation {kind}", int(ends[-1])))
        numbers, local = np.unique(tensor_Q[mine], return_inverse=True)
        local_of_Q = np.full(len(tensor_Q), -1)
        local_of_Q[mine] = np.arange(len(mine))
        value = int(tensor_Q[first])
        value_tensor = tensors.destinations.tensor_of[value][0]
        of_kind_P = kind_Q[region_P] == kind
        quantisations.append(
            Quantisation(
                dtype=value_tensor.dtype,
                block=value_tensor.block,
                scales_dtype=DTYPES[scales_dtype_G[value]],
                staging=staging[-1].name,
                staging_dtype=DTYPES[dtype_Q[first]],
                tensors=tuple(tensors.names.tensors[number].name for number in numbers.tolist()),
                storages=tuple(storage.name for storage in layout.storages),
                regions=QuantisedRegions(local, region_start_PD[chosen_Q[mine]], shape_QD[mine], offset_Q[mine]),
                values=_number(places, of_kind_P & ~is_scale_P, local_of_Q),
                scales=_number(places, of_kind_P & is_scale_P, local_of_Q),
            )
        )
    return StagedRegions(
        tensor_Q,
        region_start_PD[chosen_Q],
        shape_QD,
        kind_Q,
        offset_Q,
        strides_QD,
        tuple(staging),
        tuple(quantisations),
    )


def _number(places: QuantizedDestinations, chosen_P: Ints, local_of_Q: Ints) -> QuantizedDestinations:
    mine = places.rows(chosen_P)
    return msgspec.structs.replace(mine, region_R=local_of_Q[mine.region_R])


def _contiguous_strides(shape_ND: Ints, item_size_N: Ints) -> Ints:
    """Return byte strides of row-major arrays."""
    strides_ND = np.ones_like(shape_ND)
    strides_ND[:, :-1] = shape_ND[:, :0:-1].cumprod(axis=1)[:, ::-1]
    return strides_ND * item_size_N[:, None]


class DestinationShards(msgspec.Struct, frozen=True, eq=False):
    """The shards that engines of a class receive (P rows), and their overlaps with source shards (N rows).

    Overlaps are in the order in which they are written. `storages` are those of the layout, then staging.
    """

    layout: Layout
    """Layout of one engine of the class."""
    storages: tuple[Storage, ...]
    staging: tuple[Staging, ...]
    quantisations: tuple[Quantisation, ...]
    tensor_P: Ints
    """Global number of the tensor."""
    start_PD: Ints
    storage_P: Ints
    offset_P: Ints
    strides_PD: Ints
    dtype_P: Ints
    want_N: Ints
    """Row of the destination shard."""
    box_N: Ints
    """Row of a distinct slice in `SourceShards`."""
    start_ND: Ints
    shape_ND: Ints
    num_bytes_N: Ints
    """Bytes on a link from a trainer, in the smaller element type."""
    widening_N: Ints
    """Size in the engine's element type as a multiple of those bytes."""
    reading_N: Ints
    """Size in the trainer's element type as a multiple of those bytes."""


def classes(destinations: Mapping[str, Layout]) -> tuple[dict[str, int], list[str]]:
    """Return the class of each engine, and one engine of each class."""
    by_id: dict[int, bytes] = {}
    by_content: dict[tuple[bytes, ...], int] = {}
    class_of: dict[str, int] = {}
    examples: list[str] = []
    for member, layout in destinations.items():
        if id(layout.tensors) not in by_id:
            by_id[id(layout.tensors)] = hashlib.sha256(msgspec.msgpack.encode(layout.tensors)).digest()
        if id(layout.pieces) not in by_id:
            hasher = hashlib.sha256()
            for field in PieceColumns.__struct_fields__:
                column = np.ascontiguousarray(getattr(layout.pieces, field))
                hasher.update(repr(column.shape).encode())
                hasher.update(column.data)
            by_id[id(layout.pieces)] = hasher.digest()
        sizes = msgspec.msgpack.encode([(s.name, s.num_bytes) for s in layout.storages])
        key = by_id[id(layout.tensors)], by_id[id(layout.pieces)], sizes
        class_of[member] = by_content.setdefault(key, len(examples))
        if class_of[member] == len(examples):
            examples.append(member)
    return class_of, examples


def resolve(engine: str, layout: Layout, tensors: PairedTensors, source_shards: SourceShards) -> DestinationShards:
    """Return the shards that the class of an engine receives.

    Raises:
        CoverageError: a wanted element has no source; names the tensor and the slice.

    """
    num_dims = tensors.table.num_dims
    pieces = layout.pieces
    tensor_P = tensors.destinations.by_member[engine][pieces.tensor_P]
    is_staged_P = tensors.is_quantised_G[tensor_P] | (tensors.quantised_of_G[tensor_P] >= 0)
    direct, row_P = pieces.rows(~is_staged_P), np.flatnonzero(is_staged_P)
    staged = stage(layout, tensors, tensor_P[row_P], row_P)
    tensor_P = np.concatenate([tensor_P[~is_staged_P], staged.tensor_Q])
    start_PD = np.concatenate([pad_dims(direct.start_PD, num_dims, 0), staged.start_QD])
    shape_PD = np.concatenate([pad_dims(direct.shape_PD, num_dims, 1), staged.shape_QD])
    storage_P = np.concatenate([direct.storage_P, staged.staging_Q + len(layout.storages)])
    offset_P = np.concatenate([direct.offset_P, staged.offset_Q])
    strides_PD = np.concatenate([pad_dims(direct.strides_PD, num_dims, 0), staged.strides_QD])
    dtypes_G = np.where(tensors.is_quantised_G, tensors.source_dtype_G, tensors.wanted_dtype_G)

    met = list(source_shards.index.meet(tensor_P, start_PD, shape_PD))
    none = np.zeros(0, np.int64), np.zeros((0, num_dims), np.int64)
    want_N = np.concatenate([none[0], *(m.want_N for m in met)])
    box_N = np.concatenate([none[0], *(m.box_N for m in met)])
    start_ND = np.concatenate([none[1], *(m.start_ND for m in met)])
    shape_ND = np.concatenate([none[1], *(m.shape_ND for m in met)])
    num_elements_N = shape_ND.prod(axis=1)
    # Source shards are disjoint, and so are their overlaps with a piece: if these add up to it, they cover it.
    found_P = np.zeros(len(tensor_P), np.int64)
    np.add.at(found_P, want_N, num_elements_N)
    short = np.flatnonzero(found_P != shape_PD.prod(axis=1))
    if len(short):
        row = int(short[0])
        is_found_N = want_N == row
        raise _missing(
            engine, tensors, (tensor_P[row], start_PD[row], shape_PD[row]), start_ND[is_found_N], shape_ND[is_found_N]
        )
    begins_N = offset_P[want_N] + ((start_ND - start_PD[want_N]) * strides_PD[want_N]).sum(axis=1)
    order = np.lexsort((begins_N, storage_P[want_N]))
    want_N, num_elements_N = want_N[order], num_elements_N[order]
    item_G = np.minimum(ITEM_SIZE_OF_CODE[tensors.source_dtype_G], ITEM_SIZE_OF_CODE[dtypes_G])
    extra = [Storage(s.name, s.num_bytes, PrivateMemory()) for s in staged.staging]
    return DestinationShards(
        layout=layout,
        storages=(*layout.storages, *extra),
        staging=staged.staging,
        quantisations=staged.quantisations,
        tensor_P=tensor_P,
        start_PD=start_PD,
        storage_P=storage_P,
        offset_P=offset_P,
        strides_PD=strides_PD,
        dtype_P=dtypes_G[tensor_P],
        want_N=want_N,
        box_N=box_N[order],
        start_ND=start_ND[order],
        shape_ND=shape_ND[order],
        num_bytes_N=num_elements_N * item_G[tensor_P[want_N]],
        widening_N=(ITEM_SIZE_OF_CODE[dtypes_G] // item_G)[tensor_P[want_N]],
        reading_N=(ITEM_SIZE_OF_CODE[tensors.source_dtype_G] // item_G)[tensor_P[want_N]],
    )


def _missing(
    engine: str, tensors: PairedTensors, wanted_box: tuple[Ints, Ints, Ints], start_ND: Ints, shape_ND: Ints
) -> CoverageError:
    """Return an error that names the part of a destination shard that no trainer holds."""
    number, start_D, shape_D = wanted_box
    missing = [Box(tuple(start_D.tolist()), tuple(shape_D.tolist()))]
    for start, shape in zip(start_ND.tolist(), shape_ND.tolist(), strict=True):
        held_box = Box(tuple(start), tuple(shape))
        remaining: list[Box] = []
        for box in missing:
            common = box.intersect(held_box)
            remaining.extend([box] if common is None else box.subtract(common))
        missing = remaining
    lost = missing[0]
    description = tensors.names.describe(int(number), np.array(lost.start), np.array(lost.shape))
    return CoverageError(f"{engine} wants {description}, which no trainer holds")
