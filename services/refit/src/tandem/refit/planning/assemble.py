"""Transfer programs assembled from flows: offsets, order, and regions merged into few copies.

Of the copies, two regions are joined if one continues where the other ends, along the outermost dimension. Any number
of equal regions at equal distances become one region with one more dimension, such as the same matrix of every expert
in a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import ITEM_SIZE_OF_CODE, Layout, Storage
from tandem.refit.planning import destination_shards, flows, sharing
from tandem.refit.planning.names import PairedTensors
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.planning.sweep import ranges
from tandem.refit.transfer import CopyColumns, LinkTransfer
from tandem.refit.transports import registry

Turn = tuple[int, int, int]
"""Round, position in it, and engine: the order in which both ends serve links."""
_LARGEST = np.iinfo(np.int64).max


def merge(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Return fewer copies that move the same elements, and the link of each.

    Args:
        copies: dimensions in any order.
        link_C: copies of different links are not joined.

    Returns:
        Copies sorted by link, then by destination.

    """
    order = np.lexsort((copies.destination_offset_C, copies.destination_C, link_C))
    copies, link_C = _simplify(copies.rows(order)), link_C[order]
    copies, link_C = _join_neighbours(copies, link_C)
    num = len(link_C) + 1
    while len(link_C) < num:  # repeat for series of series, such as gate and up of every expert
        num = len(link_C)
        copies, link_C = _join_series(copies, link_C)
    return copies, link_C


def _simplify(copies: CopyColumns) -> CopyColumns:
    """Return the same copies with fused dimensions, from outermost to innermost at the destination."""
    is_one_CD = copies.shape_CD == 1  # such a dimension is outermost
    order_CD = np.argsort(-np.where(is_one_CD, _LARGEST, copies.destination_strides_CD), axis=1, kind="stable")
    columns = (
        np.take_along_axis(column_CD, order_CD, axis=1)
        for column_CD in (
            copies.shape_CD,
            np.where(is_one_CD, 0, copies.source_strides_CD),
            np.where(is_one_CD, 0, copies.destination_strides_CD),
        )
    )
    return _replace_dims(copies, *_fuse(*columns))


def _fuse(shape_CD: Ints, source_CD: Ints, destination_CD: Ints) -> tuple[Ints, Ints, Ints]:
    """Fuse neighbouring dimensions where both sides step evenly over both; right-align the rest."""
    num, num_dims = shape_CD.shape
    fused = np.ones_like(shape_CD), np.zeros_like(shape_CD), np.zeros_like(shape_CD)
    rows, place_C = np.arange(num), np.full(num, num_dims - 1)
    now = [shape_CD[:, -1].copy(), source_CD[:, -1].copy(), destination_CD[:, -1].copy()]
    for dim in reversed(range(num_dims - 1)):
        outer = shape_CD[:, dim], source_CD[:, dim], destination_CD[:, dim]
        is_long_C = outer[0] > 1
        is_even_C = (outer[1] == now[0] * now[1]) & (outer[2] == now[0] * now[2]) & is_long_C
        is_new_C = is_long_C & ~is_even_C
        is_kept_C = is_new_C & (now[0] > 1)
        for column, value in zip(fused, now, strict=True):
            column[rows[is_kept_C], place_C[is_kept_C]] = value[is_kept_C]
        place_C = place_C - is_kept_C
        now[0] = np.where(is_even_C, now[0] * outer[0], np.where(is_new_C, outer[0], now[0]))
        now[1:] = (np.where(is_new_C, theirs, mine) for theirs, mine in zip(outer[1:], now[1:], strict=True))
    for column, value in zip(fused, now, strict=True):
        column[rows, place_C] = value
    return fused


def _replace_dims(copies: CopyColumns, shape_CD: Ints, source_CD: Ints, destination_CD: Ints) -> CopyColumns:
    """Return copies with other dimensions; a single element gets the strides of a range, so that it can be joined."""
    is_single_C = (shape_CD == 1).all(axis=1)
    source_CD[is_single_C, -1] = ITEM_SIZE_OF_CODE[copies.source_dtype_C[is_single_C]]
    destination_CD[is_single_C, -1] = ITEM_SIZE_OF_CODE[copies.destination_dtype_C[is_single_C]]
    used = np.flatnonzero((shape_CD > 1).any(axis=0))
    first = int(used[0]) if len(used) else shape_CD.shape[1] - 1
    return msgspec.structs.replace(
        copies,
        shape_CD=shape_CD[:, first:],
        source_strides_CD=source_CD[:, first:],
        destination_strides_CD=destination_CD[:, first:],
    )


def _are_alike(copies: CopyColumns, link_C: Ints, shape_CD: Ints) -> NDArray[np.bool_]:
    """Return for each copy but the last whether the next one differs only in its offsets, given `shape_CD`."""
    flat = (
        link_C,
        copies.source_C,
        copies.destination_C,
        copies.source_dtype_C,
        copies.destination_dtype_C,
    )
    wide = (shape_CD, copies.source_strides_CD, copies.destination_strides_CD)
    alike = np.ones(max(len(link_C) - 1, 0), bool)
    for column in flat:
        alike &= column[1:] == column[:-1]
    for column in wide:
        alike &= (column[1:] == column[:-1]).all(axis=1)
    return alike


def _join_neighbours(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Join copies that continue, along the outermost dimension, where the one before ends."""
    if len(link_C) < 2:
        return copies, link_C
    rows = np.arange(len(link_C))
    is_long_CD = copies.shape_CD > 1
    outer_C = np.where(is_long_CD.any(axis=1), is_long_CD.argmax(axis=1), is_long_CD.shape[1] - 1)
    inner_CD = copies.shape_CD.copy()
    inner_CD[rows, outer_C] = 0
    goes_on = _are_alike(copies, link_C, inner_CD)
    num_C = copies.shape_CD[rows, outer_C]
    for offset_C, strides_CD in (
        (copies.source_offset_C, copies.source_strides_CD),
        (copies.destination_offset_C, copies.destination_strides_CD),
    ):
        goes_on &= offset_C[1:] == (offset_C + num_C * strides_CD[rows, outer_C])[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    shape_CD = copies.shape_CD[first]
    shape_CD[np.arange(len(first)), outer_C[first]] = np.add.reduceat(num_C, first)
    joined = msgspec.structs.replace(copies.rows(first), shape_CD=shape_CD)
    return _simplify(joined), link_C[first]


def _join_series(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Join equal copies at equal distances on both sides."""
    if len(link_C) < 2:
        return copies, link_C
    source_step = np.diff(copies.source_offset_C)
    destination_step = np.diff(copies.destination_offset_C)
    alike = _are_alike(copies, link_C, copies.shape_CD) & (source_step > 0) & (destination_step > 0)
    first, length = _series(alike, source_step, destination_step)
    leaders = copies.rows(first)
    is_long = length > 1
    num_dims = copies.shape_CD.shape[1] + 1
    shape_CD, source_CD, destination_CD = (
        pad_dims(column_CD, num_dims, fill)
        for column_CD, fill in (
            (leaders.shape_CD, 1),
            (leaders.source_strides_CD, 0),
            (leaders.destination_strides_CD, 0),
        )
    )
    shape_CD[:, 0] = length
    source_CD[is_long, 0] = source_step[first[is_long]]
    destination_CD[is_long, 0] = destination_step[first[is_long]]
    series = msgspec.structs.replace(
        leaders, shape_CD=shape_CD, source_strides_CD=source_CD, destination_strides_CD=destination_CD
    )
    return _simplify(series), link_C[first]


def _series(alike: NDArray[np.bool_], *steps: Ints) -> tuple[Ints, Ints]:
    """Cut rows into series of equal steps, from the first row on.

    Step i leads from row i to the next. It is taken if it equals the one before, or if the one before is not taken and
    row i is still free. So the result is known where steps are equal or rows differ, and alternates in between.

    Returns:
        The first row of each series, and its number of rows.

    """
    num = len(alike)
    equal = np.concatenate([[False], alike[1:] & alike[:-1]])
    for step in steps:
        equal[1:] &= step[1:] == step[:-1]
    rows = np.arange(num)
    last_known = np.maximum.accumulate(np.where(equal | ~alike, rows, -1))
    is_taken = np.where(last_known < 0, False, equal[last_known]) ^ ((rows - last_known) % 2 == 1)
    first = np.flatnonzero(np.concatenate([[True], ~is_taken]))
    return first, np.diff(np.concatenate([first, [num + 1]]))


class _Overlaps(msgspec.Struct, frozen=True, eq=False):
    """Slices that move: N rows."""

    flow_N: Ints
    overlap_N: Ints
    """Row of the pattern."""
    tensor_N: Ints
    box_N: Ints
    start_ND: Ints
    shape_ND: Ints

    def rows(self, selection: Ints) -> _Overlaps:
        return _Overlaps(*(getattr(self, field)[selection] for field in self.__struct_fields__))


class TransferAssembler:
    """Assembler of the transfers of one engine after another."""

    def __init__(
        self,
        tensors: PairedTensors,
        source_shards: SourceShards,
        destinations: Mapping[str, Layout],
        class_of: Mapping[str, int],
        shards: Sequence[destination_shards.DestinationShards],
        patterns: Sequence[sharing.SharingPattern],
        moved: flows.FlowColumns,
    ) -> None:
        self._tensors = tensors
        self._source_shards = source_shards
        self._engines = tuple(destinations)
        self._are_on_cpus = [layout.device == "cpu" for layout in destinations.values()]
        self._class_of = class_of
        self._destination_shards = shards
        self._patterns = patterns
        self._moved = moved
        self._first_E = np.searchsorted(moved.engine_F, np.arange(len(self._engines) + 1))

    def transfers(self, engine: int, *, allow_alias: bool) -> list[tuple[Turn, LinkTransfer]]:
        """Return an engine's incoming transfers in the order in which links are served, each with its turn.

        Receivers start with different senders and go round, so that few wait for the same one. A sender serves its
        receivers in the order of their turns as well, so both ends reach a link at the same time.
        """
        moved = self._moved.rows(slice(self._first_E[engine], self._first_E[engine + 1]))
        if not len(moved):
            return []
        key_F = flows.link_keys(moved, len(self._engines), len(self._source_shards.members))
        _, flow_of_link, link_F = np.unique(key_F, return_index=True, return_inverse=True)
        overlaps = self._overlaps(self._patterns[int(moved.pattern_F[0])], moved)
        copies, link_C = merge(self._copies(overlaps, moved), link_F[overlaps.flow_N])
        transport_C = moved.transport_F[flow_of_link][link_C]
        if allow_alias and self._are_on_cpus[engine]:  # what is read in place is host memory, where no GPU computes
            shards = self._destination_shards[self._class_of[self._engines[engine]]]
            transport_C = _read_in_place(copies, transport_C, shards)
        group_C = link_C * len(registry.list_numbered()) + transport_C
        order = np.argsort(group_C, kind="stable")
        transfers = self._number(engine, copies.rows(order), group_C[order], moved.rows(flow_of_link))
        return sorted(transfers, key=lambda item: item[0])

    def _number(
        self, engine: int, copies: CopyColumns, group_C: Ints, flow_of_link: flows.FlowColumns
    ) -> Iterator[tuple[Turn, LinkTransfer]]:
        """Yield a transfer for each group of copies, numbering the storages and tensors that it uses.

        Args:
            engine: the receiver.
            copies: sorted by group.
            group_C: link and number of the transport, combined.
            flow_of_link: any flow of each link.

        """
        receiver = self._engines[engine]
        shards = self._destination_shards[self._class_of[receiver]]
        tensors, tensors_from, tensor_C = _number_within(group_C, copies.tensor_C)
        sources, sources_from, source_C = _number_within(group_C, copies.source_C)
        destinations, destinations_from, destination_C = _number_within(group_C, copies.destination_C)
        item_C = np.minimum(ITEM_SIZE_OF_CODE[copies.source_dtype_C], ITEM_SIZE_OF_CODE[copies.destination_dtype_C])
        num_bytes_C = copies.shape_CD.prod(axis=1) * item_C
        copies = msgspec.structs.replace(copies, tensor_C=tensor_C, source_C=source_C, destination_C=destination_C)
        first_G = np.flatnonzero(np.concatenate([[True], group_C[1:] != group_C[:-1]]))
        num_bytes_G = np.add.reduceat(num_bytes_C, first_G).tolist()
        ends = [*first_G.tolist(), len(group_C)]
        names, transports = self._tensors.names.tensors, registry.list_numbered()
        for index, (first, last) in enumerate(itertools.pairwise(ends)):
            link, number = divmod(int(group_C[first]), len(transports))
            transport = transports[number]
            source, round_ = int(flow_of_link.source_F[link]), int(flow_of_link.round_F[link])
            members = self._engines if round_ else self._source_shards.members
            storages = self._storages_of(source, round_)
            turn = (source - engine * len(members) // len(self._engines)) % len(members)
            yield (
                (round_, turn, engine),
                LinkTransfer(
                    source=members[source],
                    destination=receiver,
                    transport=transport.name,
                    round=round_,
                    num_bytes=0 if transport.in_place_of else num_bytes_G[index],
                    copies=copies.rows(slice(first, last)),
                    source_storages=tuple(
                        [storages[n] for n in sources[sources_from[index] : sources_from[index + 1]]]
                    ),
                    destination_storages=tuple(
                        [
                            shards.storages[n].name
                            for n in destinations[destinations_from[index] : destinations_from[index + 1]]
                        ]
                    ),
                    tensors=tuple([names[n].name for n in tensors[tensors_from[index] : tensors_from[index + 1]]]),
                ),
            )

    def _storages_of(self, source: int, round_: int) -> tuple[Storage, ...]:
        if round_:
            return self._destination_shards[self._class_of[self._engines[source]]].storages
        return self._source_shards.layouts[source].storages

    def _overlaps(self, pattern: sharing.SharingPattern, moved: flows.FlowColumns) -> _Overlaps:
        """Cut the overlaps of a pattern at the ends of the flows."""
        first_F = np.searchsorted(pattern.high_R, moved.low_F, "right")
        last_F = np.searchsorted(pattern.low_R, moved.high_F, "left")
        flow_N, overlap_N = ranges(first_F, last_F - first_F)
        low_N = np.maximum(moved.low_F[flow_N], pattern.low_R[overlap_N]) - pattern.low_R[overlap_N]
        high_N = np.minimum(moved.high_F[flow_N], pattern.high_R[overlap_N]) - pattern.low_R[overlap_N]
        slot_N, row_N = pattern.slot_R[overlap_N], pattern.row_R[overlap_N]
        num_dims = self._tensors.table.num_dims
        tensor_N, box_N = np.zeros(len(slot_N), np.int64), np.zeros(len(slot_N), np.int64)
        start_ND, shape_ND = np.zeros((len(slot_N), num_dims), np.int64), np.zeros((len(slot_N), num_dims), np.int64)
        for slot in np.unique(slot_N).tolist():
            rows = np.flatnonzero(slot_N == slot)
            shards, shard_rows = self._destination_shards[pattern.slots[slot]], row_N[rows]
            tensor_N[rows] = shards.tensor_P[shards.want_N[shard_rows]]
            box_N[rows], start_ND[rows], shape_ND[rows] = (
                shards.box_N[shard_rows],
                shards.start_ND[shard_rows],
                shards.shape_ND[shard_rows],
            )
        axis_N, step_N = pattern.axis_R[overlap_N], pattern.step_R[overlap_N]
        rows = np.arange(len(overlap_N))
        start_ND[rows, axis_N] += low_N // step_N
        shape_ND[rows, axis_N] = (high_N - low_N) // step_N
        return _Overlaps(flow_N, overlap_N, tensor_N, box_N, start_ND, shape_ND)

    def _copies(self, overlaps: _Overlaps, moved: flows.FlowColumns) -> CopyColumns:
        """Resolve both ends of each overlap to byte offsets."""
        pattern = self._patterns[int(moved.pattern_F[0])]
        slot = int(moved.slot_F[0])
        storage_N, offset_N, strides_ND, dtype_N = self._locate_at_engine(pattern, slot, overlaps)
        sources = [np.zeros_like(storage_N), np.zeros_like(offset_N), np.zeros_like(strides_ND), np.zeros_like(dtype_N)]
        source_slot_N = moved.source_slot_F[overlaps.flow_N]
        for source_slot in np.unique(source_slot_N).tolist():
            rows = np.flatnonzero(source_slot_N == source_slot)
            slot_overlaps = overlaps.rows(rows)
            if source_slot < 0:
                columns = self._locate_at_trainers(slot_overlaps, moved.source_F[slot_overlaps.flow_N])
            else:
                columns = self._locate_at_engine(pattern, source_slot, slot_overlaps)
            for column, values in zip(sources, columns, strict=True):
                column[rows] = values
        return CopyColumns(
            tensor_C=overlaps.tensor_N,
            source_C=sources[0],
            destination_C=storage_N,
            source_offset_C=sources[1],
            destination_offset_C=offset_N,
            shape_CD=overlaps.shape_ND,
            source_strides_CD=sources[2],
            destination_strides_CD=strides_ND,
            source_dtype_C=sources[3],
            destination_dtype_C=dtype_N,
        )

    def _locate_at_engine(
        self, pattern: sharing.SharingPattern, slot: int, overlaps: _Overlaps
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Return storage, offset, strides and element type of overlaps in an engine's memory."""
        shards = self._destination_shards[pattern.slots[slot]]
        row_N = shards.want_N[pattern.rows_of(overlaps.overlap_N, slot)]
        strides_ND = shards.strides_PD[row_N]
        offset_N = shards.offset_P[row_N] + ((overlaps.start_ND - shards.start_PD[row_N]) * strides_ND).sum(axis=1)
        return shards.storage_P[row_N], offset_N, strides_ND, shards.dtype_P[row_N]

    def _locate_at_trainers(self, overlaps: _Overlaps, member_N: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        shards = self._source_shards
        row_N = shards.pieces(overlaps.box_N, member_N)
        strides_ND = shards.strides_HD[row_N]
        offset_N = shards.offset_H[row_N] + (
            (overlaps.start_ND - shards.index.start_BD[overlaps.box_N]) * strides_ND
        ).sum(axis=1)
        return shards.storage_H[row_N], offset_N, strides_ND, self._tensors.source_dtype_G[overlaps.tensor_N]


def _number_within(group_C: Ints, value_C: Ints) -> tuple[list[int], list[int], Ints]:
    """Assign numbers to the distinct values in each group; groups ascend.

    Returns:
        ``(values, first, number_C)``: the values of all groups, one group after another; the start of each group's
        values, followed by the end of the last; and the number of each row's value in its group.

    """
    radix = int(value_C.max()) + 1
    keys, key_C = np.unique(group_C * radix + value_C, return_inverse=True)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] // radix != keys[:-1] // radix]))
    index_C = np.cumsum(np.concatenate([[0], group_C[1:] != group_C[:-1]]))
    return (keys % radix).tolist(), [*first.tolist(), len(keys)], key_C - first[index_C]


def _read_in_place(copies: CopyColumns, transport_C: Ints, shards: destination_shards.DestinationShards) -> Ints:
    """Return the transports of copies, replacing those that can be read in place."""
    num_parameters = len(shards.layout.storages)  # staging memory comes after the parameters
    num_bytes = [s.num_bytes if number < num_parameters else 0 for number, s in enumerate(shards.storages)]
    chosen_C = transport_C.copy()
    for number, transport in enumerate(registry.list_numbered()):
        for spared, replaced in enumerate(registry.list_numbered()):
            if transport.in_place_of == replaced.name:
                is_spared_C = transport.reads_in_place(copies, np.array(num_bytes, np.int64))
                chosen_C[is_spared_C & (transport_C == spared)] = number
    return chosen_C
