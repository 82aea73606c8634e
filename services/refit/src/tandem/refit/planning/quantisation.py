"""Plans for tensors that are quantised in transit: the blocks that a receiver needs, and their places."""

from __future__ import annotations

import msgspec
import numpy as np

from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, Layout
from tandem.refit.planning.names import PairedTensors
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
