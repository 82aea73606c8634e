"""The elements that a process digests, and their places in memory."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.refit.columns import ColumnTable, Ints, pad_dims
from tandem.refit.digests import terms
from tandem.refit.layout import DTYPES, ITEM_SIZES, Box, Layout
from tandem.refit.program import ProcessVerification, Quantisation

_SMALL_TENSOR = 2**12
"""Largest number of elements of a tensor that is always digested whole."""


class ElementSampling(msgspec.Struct, frozen=True):
    """A choice of elements by global index: every process makes the same choice, however tensors are sharded.

    It takes every `one_in`-th row of a tensor (an index along its longest dimension except the last) and starts at
    another row for each version. So it catches a stale or swapped tensor, and a shard shifted by more than `one_in`
    rows, at once. Any `one_in` successive versions read every element. Small tensors are always taken whole.
    """

    version: int
    one_in: int

    def first(self, name: str) -> int:
        """Return the first sampled row of a tensor."""
        return int(self.first_rows(np.array([_spread(name)]))[0])

    def first_rows(self, spread_T: Ints) -> Ints:
        """Return the first sampled row of each tensor, given the hash of its name."""
        first_T: Ints = (self.version + spread_T) % self.one_in
        return first_T


class DigestColumns(ColumnTable, frozen=True, eq=False):
    """Slices to digest, as columns: P rows, D dimensions, right-aligned."""

    tensor_P: Ints
    """Index into `Layout.tensors`."""
    storage_P: Ints
    """Index into the storages of the list's `storage_names`."""
    dtype_P: Ints
    """Element type in memory, as an index into `DTYPES`."""
    hashed_P: Ints
    """Element type to convert to before digesting, likewise."""
    start_PD: Ints
    step_PD: Ints
    """Difference of successive global indices along each dimension."""
    shape_PD: Ints
    """Number of indices along each dimension."""
    offset_P: Ints
    """Offset in bytes."""
    strides_PD: Ints
    """Bytes from one index to the next."""


class DigestList:
    """The slices that a process digests at every version, listed once per program, as there can be thousands."""

    def __init__(
        self, layout: Layout, verification: ProcessVerification, quantisations: Sequence[Quantisation] = ()
    ) -> None:
        """List the slices.

        Tensors without an element type in the verification, which no engine wants, are left out. Tensors that are
        quantised in transit are read unquantised from staging memory, and their scales are left out.

        Raises:
            RefitError: a piece of a tensor that is quantised in transit is not staged.

        """
        self._tensors = layout.tensors
        tensors = layout.tensors
        staged = {name for quantisation in quantisations for name in quantisation.tensors}
        scales = {tensor.scales for tensor in tensors if tensor.name in staged}
        dtypes = verification.dtypes or ("",) * len(tensors)
        wanted_T = np.array([d != "" and t.name not in scales for t, d in zip(tensors, dtypes, strict=True)], bool)
        pieces = layout.pieces.rows(verification.rows)
        pieces = pieces.rows(wanted_T[pieces.tensor_P])
        dtype_T = np.array([DTYPES.index(tensor.dtype) for tensor in tensors], np.int64)
        hashed_T = np.array(
            [DTYPES.index(dtype or tensor.dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)], int
        )
        slices = DigestColumns(
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
            slices = _stage(slices, layout, is_staged_T, quantisations, names)
        self.slices = slices
        """Slices of a version that is digested in full."""
        self.storage_names = tuple(names)

    @functools.cached_property
    def salts_T(self) -> NDArray[np.uint64]:
        """The salt of each digested tensor, for the element type that it is digested in; 0 for the others."""
        salts_T = np.zeros(len(self._tensors), np.uint64)
        digested, rows = np.unique(self.slices.tensor_P, return_index=True)
        for index, code in zip(digested.tolist(), self.slices.hashed_P[rows].tolist(), strict=True):
            tensor = self._tensors[index]
            salts_T[index] = terms.salt(tensor.name, tensor.shape, DTYPES[code])
        return salts_T

    @functools.cached_property
    def _sampled_tensors(self) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """For each tensor, whether it is small, the hash of its name, and the dimension of its rows."""
        num_dims = self.slices.start_PD.shape[1]
        return (
            np.array([math.prod(tensor.shape) <= _SMALL_TENSOR for tensor in self._tensors], np.bool_),
            np.array([_spread(tensor.name) for tensor in self._tensors], np.int64),
            np.array([num_dims - len(t.shape) + _choose_sampled_dim(t.shape) for t in self._tensors], np.int64),
        )

    def of_version(self, sampling: ElementSampling) -> DigestColumns:
        """Return the slices to digest for one version that is sampled.

        Raises:
            RefitError: the sampling takes less than one row in one.

        """
        slices = self.slices
        if sampling.one_in == 1:
            return slices
        if sampling.one_in < 1:
            raise RefitError(f"cannot sample one row in {sampling.one_in}")
        small_T, spread_T, dim_T = self._sampled_tensors
        first_T = sampling.first_rows(spread_T)
        large = np.flatnonzero(~small_T[slices.tensor_P])
        tensor_L = slices.tensor_P[large]
        at = large, dim_T[tensor_L]
        skipped_L = (first_T[tensor_L] - slices.start_PD[at]) % sampling.one_in
        left_L = np.maximum(slices.shape_PD[at] - skipped_L, 0)
        changed = ("start_PD", "step_PD", "shape_PD", "offset_P", "strides_PD")
        start_PD, step_PD, shape_PD, offset_P, strides_PD = (getattr(slices, field).copy() for field in changed)
        start_PD[at] += skipped_L
        offset_P[large] += skipped_L * strides_PD[at]
        step_PD[at] = sampling.one_in
        shape_PD[at] = -(-left_L // sampling.one_in)
        strides_PD[at] *= sampling.one_in
        columns = dict(zip(changed, (start_PD, step_PD, shape_PD, offset_P, strides_PD), strict=True))
        return msgspec.structs.replace(slices, **columns).rows((shape_PD > 0).all(axis=1))


def _choose_sampled_dim(shape: tuple[int, ...]) -> int:
    """Return the longest dimension except the last; 0 for a vector."""
    rows = shape[:-1] or shape
    return rows.index(max(rows)) if rows else 0


@functools.lru_cache(maxsize=2**17)
def _spread(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _stage(
    slices: DigestColumns,
    layout: Layout,
    is_staged_T: NDArray[np.bool_],
    quantisations: Sequence[Quantisation],
    names: list[str],
) -> DigestColumns:
    """Return the slices, with those of quantised tensors moved to staging memory; add its storages to `names`."""
    moved = [slices.rows(~is_staged_T[slices.tensor_P])]
    unstaged = slices.rows(is_staged_T[slices.tensor_P])
    indices = {tensor.name: index for index, tensor in enumerate(layout.tensors)}
    for quantisation in quantisations:
        tensor_Q = np.array([indices.get(name, -1) for name in quantisation.tensors], np.int64)
        slice_M, region_M = _containing(unstaged, quantisation, tensor_Q[quantisation.regions.tensor_Q])
        moved.append(_inside(unstaged.rows(slice_M), quantisation, region_M, len(names)))
        names.append(quantisation.staging)
        unstaged = unstaged.rows(np.setdiff1d(np.arange(len(unstaged)), slice_M))
    if len(unstaged):
        box = Box(tuple(unstaged.start_PD[0].tolist()), tuple(unstaged.shape_PD[0].tolist()))
        raise RefitError(
            f"{layout.tensors[unstaged.tensor_P[0]].name}{box} is quantised but not staged: cannot verify it"
        )
    joined = (np.concatenate([getattr(each, field) for each in moved]) for field in DigestColumns.__struct_fields__)
    return DigestColumns(*joined)


def _containing(slices: DigestColumns, quantisation: Quantisation, tensor_Q: Ints) -> tuple[Ints, Ints]:
    """Return the slices inside a region of a quantisation, and that region for each of them."""
    order_Q = np.argsort(tensor_Q, kind="stable")
    low_P, high_P = (np.searchsorted(tensor_Q[order_Q], slices.tensor_P, side) for side in ("left", "right"))
    num_P = high_P - low_P
    slice_N = np.repeat(np.arange(len(slices)), num_P)  # pair each slice with every region of its tensor
    nth_N = np.arange(len(slice_N)) - np.repeat(np.cumsum(num_P) - num_P, num_P)
    region_N = order_Q[low_P[slice_N] + nth_N]
    start_QD, shape_QD = _region_boxes(quantisation, slices.start_PD.shape[1])
    start_ND, stop_ND = slices.start_PD[slice_N], (slices.start_PD + slices.shape_PD)[slice_N]
    inside_N = ((start_QD[region_N] <= start_ND) & (stop_ND <= (start_QD + shape_QD)[region_N])).all(axis=1)
    slice_M, first_M = np.unique(slice_N[inside_N], return_index=True)
    return slice_M, region_N[inside_N][first_M]


def _inside(slices: DigestColumns, quantisation: Quantisation, region_P: Ints, storage: int) -> DigestColumns:
    """Return slices at their positions in the regions of a quantisation, which are row-major without gaps."""
    num_dims = slices.start_PD.shape[1]
    start_QD, shape_QD = _region_boxes(quantisation, num_dims)
    code = DTYPES.index(quantisation.staging_dtype)
    strides_PD = np.full_like(slices.strides_PD, ITEM_SIZES[quantisation.staging_dtype])
    for dim in reversed(range(num_dims - 1)):
        strides_PD[:, dim] = strides_PD[:, dim + 1] * shape_QD[region_P, dim + 1]
    offset_P = quantisation.regions.offset_Q[region_P] + ((slices.start_PD - start_QD[region_P]) * strides_PD).sum(
        axis=1
    )
    return msgspec.structs.replace(
        slices,
        storage_P=np.full_like(slices.storage_P, storage),
        dtype_P=np.full_like(slices.dtype_P, code),
        hashed_P=np.full_like(slices.hashed_P, code),
        offset_P=offset_P,
        strides_PD=strides_PD,
    )


def _region_boxes(quantisation: Quantisation, num_dims: int) -> tuple[Ints, Ints]:
    """Return the regions' starts and shapes with the layout's number of dimensions."""
    regions = quantisation.regions
    extra = max(0, regions.start_QD.shape[1] - num_dims)  # extra dimensions have start 0 and shape 1
    return (
        pad_dims(regions.start_QD[:, extra:], num_dims, 0),
        pad_dims(regions.shape_QD[:, extra:], num_dims, 1),
    )


def everything(layout: Layout) -> ProcessVerification:
    """Return the verification of all pieces of a layout, unconverted."""
    return ProcessVerification(np.arange(len(layout.pieces)), tuple(tensor.dtype for tensor in layout.tensors))
