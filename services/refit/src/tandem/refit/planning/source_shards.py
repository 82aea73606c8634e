"""Source shards: the distinct slices of each wanted tensor at the trainers, with their replicas."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import KINDS_OF_MEMORY, Address, Layout
from tandem.refit.planning.names import PairedTensors
from tandem.refit.planning.sweep import BoxIndex, group_rows

_KINDS: dict[type[Address], int] = {kind: code for code, kind in enumerate(KINDS_OF_MEMORY)}


class SourceShards(msgspec.Struct, frozen=True, eq=False):
    """Held pieces as columns (H rows), their distinct slices (B rows), and sets of holders (S).

    Slices of one tensor are disjoint. Pieces are sorted by slice, then by process, so the holders of slice b are rows
    ``first_B[b]`` to ``first_B[b + 1]``. Slice b belongs to set ``set_B[b]``.
    """

    members: tuple[str, ...]
    layouts: tuple[Layout, ...]
    key_H: Ints
    """Slice and process in one number, ascending."""
    member_H: Ints
    row_H: Ints
    """Row in the process's `Layout.pieces`."""
    kind_H: Ints
    """Kind of memory, as an index into `KINDS_OF_MEMORY`."""
    storage_H: Ints
    offset_H: Ints
    strides_HD: Ints
    index: BoxIndex
    """Index of the distinct slices, by global number of the tensor."""
    first_B: Ints
    """First row of each slice's holders; length B + 1."""
    set_B: Ints
    sets: tuple[tuple[Ints, Ints], ...]
    """For each set of holders: the processes, ascending, and the kind of memory at each."""

    @property
    def num_boxes(self) -> int:
        """Number of distinct slices, B."""
        return len(self.set_B)

    def pieces(self, box_N: Ints, member_N: Ints) -> Ints:
        """Return the row of the piece of each slice at a process that holds it."""
        rows: Ints = np.searchsorted(self.key_H, box_N * len(self.members) + member_N)
        return rows


def collect(sources: Mapping[str, Layout], tensors: PairedTensors) -> SourceShards:
    """Collect the trainers' slices of tensors that engines want.

    Raises:
        RefitError: slices of one tensor overlap without being equal.

    """
    num_dims = tensors.table.shape_TD.shape[1]
    needed_G = (tensors.wanted_dtype_G >= 0) & (tensors.source_dtype_G >= 0)
    columns: list[list[Ints]] = [[] for _ in range(9)]
    for index, (member, layout) in enumerate(sources.items()):
        pieces = layout.pieces
        tensor_P = tensors.sources.by_member[member][pieces.tensor_P]
        row_P = np.flatnonzero(needed_G[tensor_P])
        held_pieces = pieces.rows(row_P)
        kind = np.array([_KINDS[type(s.address)] for s in layout.storages], np.int64)[held_pieces.storage_P]
        member_columns = (
            np.full(len(row_P), index),
            row_P,
            kind,
            held_pieces.storage_P,
            held_pieces.offset_P,
            pad_dims(held_pieces.strides_PD, num_dims, 0),
            tensor_P[row_P],
            pad_dims(held_pieces.start_PD, num_dims, 0),
            pad_dims(held_pieces.shape_PD, num_dims, 1),
        )
        for column, values in zip(columns, member_columns, strict=True):
            column.append(values)
    dims = (5, 7, 8)
    empty = [np.zeros((0, num_dims) if i in dims else 0, np.int64) for i in range(9)]
    member_H, row_H, kind_H, storage_H, offset_H, strides_HD, tensor_H, start_HD, shape_HD = (
        np.concatenate([none, *column]) for none, column in zip(empty, columns, strict=True)
    )
    first_G, box_H = group_rows(tensor_H, start_HD, shape_HD)
    order = np.lexsort((member_H, box_H))
    boxes = BoxIndex(tensor_H[first_G], start_HD[first_G], shape_HD[first_G])
    _check_disjoint(boxes, tuple(sources), member_H[first_G], tensors)
    first_B = np.concatenate([[0], np.cumsum(np.bincount(box_H, minlength=len(first_G)))])
    set_B, sets = _replica_sets(first_B, member_H[order], kind_H[order])
    return SourceShards(
        members=tuple(sources),
        layouts=tuple(sources.values()),
        key_H=(box_H * len(sources) + member_H)[order],
        member_H=member_H[order],
        row_H=row_H[order],
        kind_H=kind_H[order],
        storage_H=storage_H[order],
        offset_H=offset_H[order],
        strides_HD=strides_HD[order],
        index=boxes,
        first_B=first_B,
        set_B=set_B,
        sets=sets,
    )


def _check_disjoint(boxes: BoxIndex, members: tuple[str, ...], member_B: Ints, tensors: PairedTensors) -> None:
    overlap = boxes.overlap()
    if overlap is None:
        return
    descriptions = [
        f"{members[member_B[row]]} holds "
        f"{tensors.names.describe(int(boxes.tensor_B[row]), boxes.start_BD[row], boxes.shape_BD[row])}"
        for row in sorted(overlap, key=lambda row: int(member_B[row]))
    ]
    raise RefitError(f"{descriptions[0]} and {descriptions[1]}: slices of two ranks must be equal or disjoint")


def _replica_sets(first_B: Ints, member_H: Ints, kind_H: Ints) -> tuple[Ints, tuple[tuple[Ints, Ints], ...]]:
    """Group slices by their holders and the kinds of memory there."""
    count_B = np.diff(first_B)
    set_B = np.zeros(len(count_B), np.int64)
    sets: list[tuple[Ints, Ints]] = []
    for count in np.unique(count_B).tolist():
        boxes = np.flatnonzero(count_B == count)
        rows_BR = first_B[boxes][:, None] + np.arange(count)
        first_S, group_B = group_rows(member_H[rows_BR], kind_H[rows_BR])
        set_B[boxes] = len(sets) + group_B
        sets.extend((member_H[rows_BR[row]], kind_H[rows_BR[row]]) for row in first_S.tolist())
    return set_B, tuple(sets)
