"""Assignment of digests to processes, so that the arrival of every version can be verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES, Layout
from tandem.refit.planning.choose import fill
from tandem.refit.planning.frozen import FrozenPart
from tandem.refit.planning.names import PairedTensors, SideTensors
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.program import NOTHING, ProcessVerification


def verifications(
    sources: Mapping[str, Layout],
    destinations: Mapping[str, Layout],
    tensors: PairedTensors,
    source_shards: SourceShards,
) -> dict[str, ProcessVerification]:
    """Return the verification of every process on both sides.

    Of the trainers that hold the same slice, the one with the least to digest does it. For tensors that are quantised
    in transit, both sides digest the sent data in the trainers' precision. Engines keep it in staging memory, and check
    themselves that values and scales were computed from it. Scales computed in transit are left out.
    """
    dtype_G = np.where(tensors.is_quantised_G, tensors.source_dtype_G, tensors.wanted_dtype_G)
    dtype_G[tensors.source_dtype_G < 0] = -1
    dtype_G[tensors.quantised_of_G >= 0] = -1
    chosen_H = _choose(source_shards, dtype_G)
    member_H = source_shards.member_H[chosen_H]
    order = np.lexsort((source_shards.row_H[chosen_H], member_H))
    rows_H = source_shards.row_H[chosen_H][order]
    first_M = np.searchsorted(member_H[order], np.arange(len(sources) + 1))
    dtypes_by_id: dict[int, tuple[str, ...]] = {}
    by_member: dict[str, ProcessVerification] = {}
    for index, (member, layout) in enumerate(sources.items()):
        dtypes = _dtypes(layout, tensors.sources, member, dtype_G, dtypes_by_id)
        by_member[member] = ProcessVerification(rows_H[first_M[index] : first_M[index + 1]], dtypes)
    shared: dict[tuple[int, int], Ints] = {}
    for member, layout in destinations.items():
        key = id(layout.pieces), id(layout.tensors)
        if key not in shared:
            numbers_P = tensors.destinations.by_member[member][layout.pieces.tensor_P]
            shared[key] = np.flatnonzero(dtype_G[numbers_P] >= 0)
        by_member[member] = ProcessVerification(
            shared[key], _dtypes(layout, tensors.destinations, member, dtype_G, dtypes_by_id)
        )
    return by_member


def join(parts: Sequence[tuple[FrozenPart, Mapping[str, ProcessVerification]]]) -> dict[str, ProcessVerification]:
    """Return the verification of every process for all parts of a plan together."""
    merged: dict[str, ProcessVerification] = {}
    for part, verified in parts:
        for member, verification in verified.items():
            before = merged.get(member, NOTHING)
            rows = verification.rows if part.rows is None else part.rows[member][verification.rows]
            dtypes = tuple(
                earlier or later
                for earlier, later in zip(before.dtypes or verification.dtypes, verification.dtypes, strict=True)
            )
            row_sets = (before.rows, rows) if part.is_frozen else (rows, before.frozen_rows)
            merged[member] = ProcessVerification(row_sets[0], dtypes, row_sets[1])
    return merged


def _dtypes(
    layout: Layout, side: SideTensors, member: str, dtype_G: Ints, dtypes_by_id: dict[int, tuple[str, ...]]
) -> tuple[str, ...]:
    if id(layout.tensors) not in dtypes_by_id:
        names = (*DTYPES, "")
        dtypes_by_id[id(layout.tensors)] = tuple(names[code] for code in dtype_G[side.by_member[member]].tolist())
    return dtypes_by_id[id(layout.tensors)]


def _choose(source_shards: SourceShards, dtype_G: Ints) -> Ints:
    """Return the row of `SourceShards` that digests each slice."""
    boxes = source_shards.index
    size_B = np.where(dtype_G[boxes.tensor_B] >= 0, boxes.shape_BD.prod(axis=1), 0)
    by_set = np.argsort(source_shards.set_B, kind="stable")
    first_S = np.searchsorted(source_shards.set_B[by_set], np.arange(len(source_shards.sets) + 1))
    loads_M = np.zeros(len(source_shards.members), np.int64)
    chosen_B = source_shards.first_B[:-1].copy()
    for number in sorted(range(len(source_shards.sets)), key=lambda n: len(source_shards.sets[n][0])):
        mine = by_set[first_S[number] : first_S[number + 1]]
        member_R, _ = source_shards.sets[number]
        ends = np.cumsum(size_B[mine])
        shares_R = fill(loads_M[member_R], int(ends[-1]))
        middle = ends - size_B[mine] // 2
        rank = np.searchsorted(np.cumsum(shares_R), middle, "left").clip(max=len(member_R) - 1)
        chosen_B[mine] += rank
        np.add.at(loads_M, member_R[rank], size_B[mine])
    return chosen_B[size_B > 0]
