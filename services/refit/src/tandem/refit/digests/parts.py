"""Which elements a process digests and where they lie: pieces of its layout, sampled, or staged before quantisation."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints, Table, pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZES, Box, Layout
from tandem.refit.program import Attestation, Quantisation

_SMALL_TENSOR = 2**12
"""Elements of a tensor that is sampled as a whole."""


class Sampling(msgspec.Struct, frozen=True):
    """A choice of elements by their global index, so that every process makes the same, however tensors are sharded.

    Of a tensor it takes every `one_in`-th row (index along the longest dimension but the last), beginning with
    another row at each version, so a stale or swapped tensor and a shifted shard of more than `one_in` rows are caught
    at once, and any `one_in` versions in succession read every element. Small tensors are taken whole every time.
    """

    version: int
    one_in: int

    def first(self, name: str) -> int:
        """Return the first row of a tensor that is taken."""
        return (self.version + _spread(name)) % self.one_in


class Parts(Table, frozen=True, eq=False):
    """What to digest, as columns: P rows, D dimensions, right-aligned."""

    tensor_P: Ints
    """Index into `Layout.tensors`."""
    storage_P: Ints
    """Index into the storages that `parts_of` returns."""
    dtype_P: Ints
    """Of the elements in memory: index into `DTYPES`."""
    hashed_P: Ints
    """Element type that they are converted to before they are digested."""
    start_PD: Ints
    step_PD: Ints
    """Global indices from one to the next along each dimension."""
    shape_PD: Ints
    """How many indices."""
    offset_P: Ints
    """Bytes."""
    strides_PD: Ints
    """Bytes from one index to the next."""


def parts_of(
    layout: Layout,
    attestation: Attestation,
    quantisations: Sequence[Quantisation] = (),
    sampling: Sampling | None = None,
) -> tuple[Parts, tuple[str, ...]]:
    """Return what a process digests, and the names of the storages that it lies in.

    Rows whose tensor has no element type in the attestation, which nobody wants, are left out. Tensors that are
    quantised on the way are read as they were before, out of staging memory, and their scales are left out.

    Raises:
        RefitError: a piece of a tensor that is quantised on the way is not staged, or a sampling takes less than one
            row in one.

    """
    tensors = layout.tensors
    staged = {name for quantisation in quantisations for name in quantisation.tensors}
    made = {tensor.scales for tensor in tensors if tensor.name in staged}
    dtypes = attestation.dtypes or ("",) * len(tensors)
    wanted_T = np.array([d != "" and t.name not in made for t, d in zip(tensors, dtypes, strict=True)], bool)
    pieces = layout.pieces.rows(attestation.rows)
    pieces = pieces.rows(wanted_T[pieces.tensor_P])
    dtype_T = np.array([DTYPES.index(tensor.dtype) for tensor in tensors], np.int64)
    hashed_T = np.array(
        [DTYPES.index(dtype or tensor.dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)], int
    )
    parts = Parts(
        tensor_P=pieces.tensor_P,
        storage_P=pieces.storage_P,
        dtype_P=dtype_T[pieces.tensor_P],
        hashed_P=hashed_T[pieces.tensor_P],
        start_PD=pieces.start_PD,
        step_PD=np.ones_like(pieces.start_PD),
        shape_PD=pieces.shape_PD,
        offset_P=pieces.offset_P,
        strides_PD=pieces.strides_PD,
    )
    names = [storage.name for storage in layout.storages]
    if staged:
        is_staged_T = np.array([tensor.name in staged for tensor in tensors], bool)
        parts = _staged(parts, layout, is_staged_T, quantisations, names)
    return parts if sampling is None else _sampled(parts, layout, sampling), tuple(names)


def _sampled(parts: Parts, layout: Layout, sampling: Sampling) -> Parts:
    """Return the sampled rows of parts, as strided parts."""
    if sampling.one_in < 1:
        raise RefitError(f"cannot sample one row in {sampling.one_in}")
    num_dims = parts.start_PD.shape[1]
    if sampling.one_in == 1:
        return parts
    tensors = layout.tensors
    small_T = np.array([math.prod(tensor.shape) <= _SMALL_TENSOR for tensor in tensors], bool)
    first_T = np.array([sampling.first(tensor.name) for tensor in tensors], np.int64)
    dim_T = np.array([num_dims - len(tensor.shape) + _sampled_dim(tensor.shape) for tensor in tensors], np.int64)
    large = np.flatnonzero(~small_T[parts.tensor_P])
    tensor_L = parts.tensor_P[large]
    at = large, dim_T[tensor_L]
    skipped_L = (first_T[tensor_L] - parts.start_PD[at]) % sampling.one_in
    left_L = np.maximum(parts.shape_PD[at] - skipped_L, 0)
    start_PD, step_PD, shape_PD, offset_P, strides_PD = (
        column.copy() for column in (parts.start_PD, parts.step_PD, parts.shape_PD, parts.offset_P, parts.strides_PD)
    )
    start_PD[at] += skipped_L
    offset_P[large] += skipped_L * strides_PD[at]
    step_PD[at] = sampling.one_in
    shape_PD[at] = -(-left_L // sampling.one_in)
    strides_PD[at] *= sampling.one_in
    sampled = msgspec.structs.replace(
        parts, start_PD=start_PD, step_PD=step_PD, shape_PD=shape_PD, offset_P=offset_P, strides_PD=strides_PD
    )
    return sampled.rows((shape_PD > 0).all(axis=1))


def _sampled_dim(shape: tuple[int, ...]) -> int:
    """Return the longest dimension but the last; the only one of a vector."""
    rows = shape[:-1] or shape
    return rows.index(max(rows)) if rows else 0


@functools.lru_cache(maxsize=2**17)
def _spread(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _staged(
    parts: Parts,
    layout: Layout,
    is_staged_T: NDArray[np.bool_],
    quantisations: Sequence[Quantisation],
    names: list[str],
) -> Parts:
    """Return the parts with those of quantised tensors moved into staging memory; add its storages to `names`."""
    moved = [parts.rows(~is_staged_T[parts.tensor_P])]
    left = parts.rows(is_staged_T[parts.tensor_P])
    indices = {tensor.name: index for index, tensor in enumerate(layout.tensors)}
    for quantisation in quantisations:
        tensor_Q = np.array([indices.get(name, -1) for name in quantisation.tensors], np.int64)
        part_M, region_M = _containing(left, quantisation, tensor_Q[quantisation.regions.tensor_Q])
        moved.append(_inside(left.rows(part_M), quantisation, region_M, len(names)))
        names.append(quantisation.staging)
        left = left.rows(np.setdiff1d(np.arange(len(left)), part_M))
    if len(left):
        box = Box(tuple(left.start_PD[0].tolist()), tuple(left.shape_PD[0].tolist()))
        raise RefitError(f"{layout.tensors[left.tensor_P[0]].name}{box} is quantised but not staged: cannot attest it")
    joined = (np.concatenate([getattr(part, field) for part in moved]) for field in Parts.__struct_fields__)
    return Parts(*joined)


def _containing(parts: Parts, quantisation: Quantisation, tensor_Q: Ints) -> tuple[Ints, Ints]:
    """Return the parts that lie in a region of a quantisation, and for each of them that region."""
    order_Q = np.argsort(tensor_Q, kind="stable")
    low_P, high_P = (np.searchsorted(tensor_Q[order_Q], parts.tensor_P, side) for side in ("left", "right"))
    num_P = high_P - low_P
    part_N = np.repeat(np.arange(len(parts)), num_P)  # each with every region of its tensor
    nth_N = np.arange(len(part_N)) - np.repeat(np.cumsum(num_P) - num_P, num_P)
    region_N = order_Q[low_P[part_N] + nth_N]
    start_QD, shape_QD = _region_boxes(quantisation, parts.start_PD.shape[1])
    start_ND, stop_ND = parts.start_PD[part_N], (parts.start_PD + parts.shape_PD)[part_N]
    inside_N = ((start_QD[region_N] <= start_ND) & (stop_ND <= (start_QD + shape_QD)[region_N])).all(axis=1)
    part_M, kept = np.unique(part_N[inside_N], return_index=True)
    return part_M, region_N[inside_N][kept]


def _inside(parts: Parts, quantisation: Quantisation, region_P: Ints, storage: int) -> Parts:
    """Return parts as they lie in regions of a quantisation, which are row-major without gaps."""
    num_dims = parts.start_PD.shape[1]
    start_QD, shape_QD = _region_boxes(quantisation, num_dims)
    code = DTYPES.index(quantisation.staging_dtype)
    strides_PD = np.full_like(parts.strides_PD, ITEM_SIZES[quantisation.staging_dtype])
    for dim in reversed(range(num_dims - 1)):
        strides_PD[:, dim] = strides_PD[:, dim + 1] * shape_QD[region_P, dim + 1]
    offset_P = quantisation.regions.offset_Q[region_P] + ((parts.start_PD - start_QD[region_P]) * strides_PD).sum(
        axis=1
    )
    return msgspec.structs.replace(
        parts,
        storage_P=np.full_like(parts.storage_P, storage),
        dtype_P=np.full_like(parts.dtype_P, code),
        hashed_P=np.full_like(parts.hashed_P, code),
        offset_P=offset_P,
        strides_PD=strides_PD,
    )


def _region_boxes(quantisation: Quantisation, num_dims: int) -> tuple[Ints, Ints]:
    """Return the regions' starts and shapes in as many dimensions as the layout has."""
    regions = quantisation.regions
    extra = max(0, regions.start_QD.shape[1] - num_dims)  # which have start 0 and shape 1
    return (
        pad_dims(regions.start_QD[:, extra:], num_dims, 0),
        pad_dims(regions.shape_QD[:, extra:], num_dims, 1),
    )
