"""Numbers of all tensors: one per name, with one shape, and one element type per side; as columns."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import CoverageError, RefitError
from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, Box, Layout, Tensor, whole

CONVERTIBLE = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Element types that copies convert into one another, rounding to nearest."""

QUANTISED = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Element types that are quantised from those, with one scale per block."""
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class TensorTable(msgspec.Struct, frozen=True, eq=False):
    """Properties of tensors: T rows of D ≥ 1 dimensions, right-aligned, missing ones of size 1."""

    tensors: tuple[Tensor, ...]
    shape_TD: Ints
    num_dims_T: Ints
    dtype_T: Ints
    """Index into `DTYPES`, or -1 for an unknown type."""
    item_size_T: Ints
    """Bytes per element; 1 for an unknown type."""

    @property
    def num_dims(self) -> int:
        """Number of dimensions, D."""
        return int(self.shape_TD.shape[1])


_MOST_KEPT = 16
_tables: dict[int, TensorTable] = {}
_lock = threading.Lock()


def tensor_table(tensors: tuple[Tensor, ...]) -> TensorTable:
    """Return the tensors as columns; ranks that share one tuple share one table."""
    with _lock:
        table = _tables.get(id(tensors))  # the table holds the tuple, so its id is not reused
        if table is None or table.tensors is not tensors:
            while len(_tables) >= _MOST_KEPT:
                del _tables[next(iter(_tables))]
            table = _tables[id(tensors)] = make_table(tensors)
        return table


def make_table(tensors: tuple[Tensor, ...]) -> TensorTable:
    """Return the tensors as columns."""
    num_dims_T = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    num_dims = max(1, int(num_dims_T.max(initial=0)))
    shapes = [(1,) * (num_dims - len(tensor.shape)) + tensor.shape for tensor in tensors]
    dtype_T = np.array([_CODES.get(tensor.dtype, -1) for tensor in tensors], np.int64)
    item_size_T = np.where(dtype_T < 0, 1, ITEM_SIZE_OF_CODE[dtype_T])
    return TensorTable(
        tensors, np.array(shapes, np.int64).reshape(len(tensors), num_dims), num_dims_T, dtype_T, item_size_T
    )


class SideTensors:
    """Descriptions of each tensor by the layouts of one side: G rows, one for each global number."""

    def __init__(self, names: TensorNumbers, layouts: Mapping[str, Layout]) -> None:
        self.by_member: dict[str, Ints] = {}
        """Global numbers of a process's tensors, by process."""
        self.tensor_of: dict[int, tuple[Tensor, str]] = {}
        """By global number: the tensor as this side describes it, and a process that does, for error messages."""
        numbers_by_id: dict[int, Ints] = {}
        is_noted: dict[int, NDArray[np.bool_]] = {}
        for member, layout in layouts.items():
            key = id(layout.tensors)
            if key not in numbers_by_id:
                numbers_by_id[key] = names.number(layout.tensors, member)
            self.by_member[member] = numbers_by_id[key]
            is_new = np.zeros(len(layout.tensors), bool)
            is_new[layout.pieces.tensor_P] = True
            is_new &= ~is_noted.setdefault(key, np.zeros(len(layout.tensors), bool))
            is_noted[key] |= is_new
            for local in np.flatnonzero(is_new).tolist():
                self._note(int(numbers_by_id[key][local]), layout.tensors[local], member)

    def _note(self, number: int, tensor: Tensor, member: str) -> None:
        first_tensor, who = self.tensor_of.setdefault(number, (tensor, member))
        if first_tensor is not tensor and (first_tensor.dtype, first_tensor.block, first_tensor.scales) != (
            tensor.dtype,
            tensor.block,
            tensor.scales,
        ):
            raise RefitError(
                f"{who} has {tensor.name} as {_kind(first_tensor)}, {member} as {_kind(tensor)}: "
                "all processes of one side must agree on the element type"
            )


class TensorNumbers:
    """Global numbers of tensors, in the order of their first appearance."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Tensors as first described, by global number."""
        self._numbers: dict[str, int] = {}
        self._members: list[str] = []

    def number(self, tensors: tuple[Tensor, ...], member: str) -> Ints:
        """Return the global number of each tensor of a process.

        Raises:
            CoverageError: processes give a tensor different shapes.
            RefitError: a process names a tensor twice.

        """
        numbers = np.zeros(len(tensors), np.int64)
        for index, tensor in enumerate(tensors):
            number = self._numbers.setdefault(tensor.name, len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(tensor)
                self._members.append(member)
            elif self.tensors[number].shape != tensor.shape:
                raise CoverageError(
                    f"{self._members[number]} holds {tensor.name} of shape {self.tensors[number].shape}, "
                    f"{member} describes it as {tensor.shape}"
                )
            numbers[index] = number
        if len(np.unique(numbers)) != len(numbers):
            twice = tensors[int(np.flatnonzero(np.bincount(numbers)[numbers] > 1)[0])].name
            raise RefitError(f"{member} describes {twice} twice")
        return numbers

    def find(self, name: str) -> int | None:
        """Return the number of a tensor, or None."""
        return self._numbers.get(name)

    def describe(self, number: int, start: Ints, shape: Ints) -> str:
        """Return a tensor's name and a slice of it, without padded dimensions."""
        tensor = self.tensors[number]
        first = len(start) - len(tensor.shape)
        return f"{tensor.name}{Box(tuple(start[first:].tolist()), tuple(shape[first:].tolist()))}"


class PairedTensors(msgspec.Struct, frozen=True, eq=False):
    """Both sides' view of every tensor: G rows of D dimensions."""

    names: TensorNumbers
    sources: SideTensors
    destinations: SideTensors
    table: TensorTable
    source_dtype_G: Ints
    """Index into `DTYPES`; -1 if no source holds the tensor."""
    wanted_dtype_G: Ints
    """Index into `DTYPES`; -1 if no engine wants the tensor."""
    block_GD: Ints
    """Block shape of tensors that are quantised in transit, right-aligned; 0 for all others."""
    quantised_of_G: Ints
    """For scales that are computed in transit, the number of the tensor that they scale; else -1."""

    @property
    def is_quantised_G(self) -> NDArray[np.bool_]:
        """Whether the tensor is quantised in transit."""
        is_quantised: NDArray[np.bool_] = self.block_GD.max(axis=1) > 0
        return is_quantised


def match(sources: Mapping[str, Layout], destinations: Mapping[str, Layout]) -> PairedTensors:
    """Assign numbers to the tensors of both sides, and find how each is converted.

    Raises:
        CoverageError: an engine wants a tensor that no source holds, or in another shape.
        RefitError: two processes contradict each other, or a conversion is missing.

    """
    names = TensorNumbers()
    source_side, destination_side = SideTensors(names, sources), SideTensors(names, destinations)
    table = make_table(tuple(names.tensors))
    num = len(names.tensors)
    num_dims = max(
        [table.num_dims, *(layout.pieces.start_PD.shape[1] for layout in [*sources.values(), *destinations.values()])]
    )
    pairs = PairedTensors(
        names,
        source_side,
        destination_side,
        msgspec.structs.replace(table, shape_TD=pad_dims(table.shape_TD, num_dims, 1)),
        np.full(num, -1),
        np.full(num, -1),
        np.zeros((num, num_dims), np.int64),
        np.full(num, -1),
    )
    for number, (tensor, _) in source_side.tensor_of.items():
        pairs.source_dtype_G[number] = DTYPES.index(tensor.dtype)
    for number, (tensor, member) in destination_side.tensor_of.items():
        pairs.wanted_dtype_G[number] = DTYPES.index(tensor.dtype)
        if number in source_side.tensor_of:
            _match_types(pairs, number, tensor, member)
    for number, (tensor, member) in destination_side.tensor_of.items():
        if number not in source_side.tensor_of and pairs.quantised_of_G[number] < 0:
            raise CoverageError(f"{member} wants {tensor.name}{whole(tensor.shape)}, which no trainer holds")
    return pairs


def _match_types(pairs: PairedTensors, number: int, tensor: Tensor, member: str) -> None:
    """Refuse a missing conversion; note a quantisation, and the scales that it computes."""
    source, holder = pairs.sources.tensor_of[number]
    if source.dtype == tensor.dtype or {source.dtype, tensor.dtype} <= CONVERTIBLE:
        return
    if source.dtype not in CONVERTIBLE or tensor.dtype not in QUANTISED or not tensor.block:
        raise RefitError(
            f"{member} wants {tensor.name} as {_kind(tensor)}, {holder} holds {_kind(source)}: there is no conversion"
        )
    if len(tensor.block) > len(tensor.shape) or min(tensor.block) < 1:
        raise RefitError(f"{member} wants {tensor.name} of shape {tensor.shape} in blocks of {tensor.block}")
    num_dims = pairs.block_GD.shape[1]
    pairs.block_GD[number] = (1,) * (num_dims - len(tensor.block)) + tensor.block
    scales = pairs.names.find(tensor.scales)
    if scales is None:
        return
    block = (1,) * (len(tensor.shape) - len(tensor.block)) + tensor.block
    expected = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    if pairs.names.tensors[scales].shape != expected:
        raise RefitError(
            f"{member} wants scales {tensor.scales} of shape {pairs.names.tensors[scales].shape}; "
            f"{tensor.name} of shape {tensor.shape} in blocks of {tensor.block} has {expected}"
        )
    pairs.quantised_of_G[scales] = number


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} in blocks of {tensor.block}" if tensor.block else tensor.dtype
