"""Transfer programs assembled from flows: offsets, copies, order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.layout import ITEM_SIZE_OF_CODE, Layout, Storage
from tandem.refit.planning.destination_shards import DestinationShards
from tandem.refit.planning.flows import FlowColumns, link_keys
from tandem.refit.planning.merge import merge
from tandem.refit.planning.names import PairedTensors
from tandem.refit.planning.sharing import SharingPattern
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.planning.sweep import ranges
from tandem.refit.transfer import CopyColumns, LinkTransfer
from tandem.refit.transports import registry

Turn = tuple[int, int, int]
"""Round, position in it, and engine: the order in which both ends serve links."""


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
        shards: Sequence[DestinationShards],
        patterns: Sequence[SharingPattern],
        moved: FlowColumns,
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
        key_F = link_keys(moved, len(self._engines), len(self._source_shards.members))
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
        self, engine: int, copies: CopyColumns, group_C: Ints, flow_of_link: FlowColumns
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

    def _overlaps(self, pattern: SharingPattern, moved: FlowColumns) -> _Overlaps:
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

    def _copies(self, overlaps: _Overlaps, moved: FlowColumns) -> CopyColumns:
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
        self, pattern: SharingPattern, slot: int, overlaps: _Overlaps
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


def _read_in_place(copies: CopyColumns, transport_C: Ints, shards: DestinationShards) -> Ints:
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
