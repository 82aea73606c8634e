"""Flows: byte ranges gathered by link, each from one process to another in one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tandem.refit.columns import ColumnTable, Ints
from tandem.refit.layout import Layout
from tandem.refit.planning import choose, destination_shards, sharing
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.planning.sweep import ranges
from tandem.refit.transfer import link_name
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route


class FlowColumns(ColumnTable, frozen=True, eq=False):
    """Parts of byte ranges on links: F rows, by engine."""

    engine_F: Ints
    """Index of the receiver among all engines."""
    round_F: Ints
    source_F: Ints
    """Index of a trainer in round 0, of an engine in round 1."""
    transport_F: Ints
    """Number of the transport."""
    pattern_F: Ints
    slot_F: Ints
    """Slot of the receiver."""
    source_slot_F: Ints
    """Slot of the sender in round 1, else -1."""
    low_F: Ints
    high_F: Ints
    num_bytes_F: Ints
    num_read_F: Ints
    """Bytes in the source's memory."""


class FlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that one process gets from another in one round."""

    source: str
    destination: str
    transport: str
    reason: str
    """Reason for this transport, as a phrase."""
    round: int
    num_bytes: int
    num_read: int
    """Bytes in the source's memory: more than `num_bytes` if elements are converted to a smaller type."""
    num_copies: int
    """Largest number of copies: a program joins contiguous ones."""
    num_tensors: int

    @property
    def name(self) -> str:
        """Name under which bytes are counted."""
        return link_name(self.source, self.destination)


def flows(
    patterns: Sequence[sharing.SharingPattern], segments: choose.SegmentColumns, destinations: Mapping[str, Layout]
) -> FlowColumns:
    """Return the flows from trainers, and those between engines of a node that pass bytes on."""
    number = {engine: index for index, engine in enumerate(destinations)}
    between = _BetweenEngines(destinations)
    column_groups: list[list[Ints]] = []
    for index, pattern in enumerate(patterns):
        mine = segments.rows(np.flatnonzero(segments.pattern_X == index))
        engine_HS = np.array([[number[engine] for engine in host] for host in pattern.hosts], np.int64)
        num_L = np.array([len(sharers) for sharers in pattern.sharers_L], np.int64)
        first_L = np.cumsum(num_L) - num_L
        flat = np.array([slot for sharers in pattern.sharers_L for slot in sharers], np.int64)
        slot_X = flat[first_L[mine.range_X] + mine.sharer_X]
        # Round 0: from trainers. Round 1: every sharer passes its bytes on to the others.
        x_F, other_F = ranges(first_L[mine.range_X], num_L[mine.range_X])
        passed = flat[other_F] != slot_X[x_F]
        x_F, other_F = x_F[passed], other_F[passed]
        passer_F, receiver_F = (engine_HS[mine.host_X[x_F], slot] for slot in (slot_X[x_F], flat[other_F]))
        for rows, slot, source, transport, source_slot in (
            (np.arange(len(mine)), slot_X, mine.member_X, mine.transport_X, np.full(len(mine), -1)),
            (x_F, flat[other_F], passer_F, between.transports(passer_F, receiver_F), slot_X[x_F]),
        ):
            engine = engine_HS[mine.host_X[rows], slot]
            round_F = (source_slot >= 0).astype(np.int64)
            pattern_F = np.full(len(rows), index)
            low, high = mine.low_X[rows], mine.high_X[rows]
            passed_on = pattern.bytes_inside(low, high, pattern.widening_R)
            num_bytes = np.where(round_F == 0, high - low, passed_on)
            num_read = np.where(round_F == 0, pattern.bytes_inside(low, high, pattern.reading_R), passed_on)
            column_groups.append([engine, round_F, source, transport, pattern_F, slot, source_slot, low, high])
            column_groups[-1] += [num_bytes, num_read]
    columns = [np.concatenate([np.zeros(0, np.int64), *rows]) for rows in zip(*column_groups, strict=True)]
    if not column_groups:
        return FlowColumns(*([np.zeros(0, np.int64)] * len(FlowColumns.__struct_fields__)))
    order = np.argsort(columns[0], kind="stable")
    return FlowColumns(*(column[order] for column in columns))


def link_keys(moved: FlowColumns, num_engines: int, num_members: int) -> Ints:
    """Return a number for the link of each flow, sorting by engine, then round, source and transport."""
    num_sources = max(num_engines, num_members, 1)
    keys: Ints = (moved.engine_F * 2 + moved.round_F) * num_sources + moved.source_F
    return keys * len(registry.list_numbered()) + moved.transport_F


def links(
    moved: FlowColumns,
    patterns: Sequence[sharing.SharingPattern],
    shards: Sequence[destination_shards.DestinationShards],
    source_shards: SourceShards,
    destinations: Mapping[str, Layout],
) -> tuple[FlowLink, ...]:
    """Return all links with their totals."""
    engines = tuple(destinations)
    keys, first, link_F = np.unique(
        link_keys(moved, len(engines), len(source_shards.members)), return_index=True, return_inverse=True
    )
    sums = np.zeros((4, len(keys)), np.int64)
    np.add.at(sums[0], link_F, moved.num_bytes_F)
    np.add.at(sums[3], link_F, moved.num_read_F)
    for index, pattern in enumerate(patterns):
        rows = np.flatnonzero(moved.pattern_F == index)
        begin = np.searchsorted(pattern.high_R, moved.low_F[rows], "right")
        end = np.searchsorted(pattern.low_R, moved.high_F[rows], "left")
        tensor_R = np.zeros(len(pattern.slot_R), np.int64)
        for slot, number in enumerate(pattern.slots):
            mine = pattern.slot_R == slot
            tensor_R[mine] = shards[number].tensor_P[shards[number].want_N[pattern.row_R[mine]]]
        changes_R = np.cumsum(np.concatenate([[0], tensor_R[1:] != tensor_R[:-1]])) if len(tensor_R) else tensor_R
        np.add.at(sums[1], link_F[rows], end - begin)
        np.add.at(sums[2], link_F[rows], changes_R[end - 1] - changes_R[begin] + 1)
    flow_links: list[FlowLink] = []
    transports = registry.list_numbered()
    for index, row in enumerate(first.tolist()):
        engine, round_, source, number = (
            int(column[row]) for column in (moved.engine_F, moved.round_F, moved.source_F, moved.transport_F)
        )
        receiver, transport = engines[engine], transports[number]
        reason = "passed on within the host, so that it was sent there once"
        if not round_:
            reason = transport.explain(Route.between(source_shards.layouts[source], destinations[receiver]))
        flow_links.append(
            FlowLink(
                source=engines[source] if round_ else source_shards.members[source],
                destination=receiver,
                transport=transport.name,
                reason=reason,
                round=round_,
                num_bytes=int(sums[0, index]),
                num_read=int(sums[3, index]),
                num_copies=int(sums[1, index]),
                num_tensors=int(sums[2, index]),
            )
        )
    return tuple(flow_links)


class _BetweenEngines:
    """The transports by which engines of a host pass on received bytes."""

    def __init__(self, destinations: Mapping[str, Layout]) -> None:
        devices = np.array([layout.device for layout in destinations.values()])
        self._is_gpu_E = devices != "cpu"
        self._device_E = np.unique(devices, return_inverse=True)[1].reshape(-1)
        self._choices = sharing.TransportChoices(
            sent_only=True
        )  # an engine that passes bytes on must wait until it has received them

    def transports(self, source_F: Ints, destination_F: Ints) -> Ints:
        """Return the number of the transport from one engine to another; an engine's parameters are private."""
        same_device_F = self._device_E[source_F] == self._device_E[destination_F]
        route_F = sharing.number_routes(True, same_device_F, self._is_gpu_E[source_F], self._is_gpu_E[destination_F])
        return self._choices.look_up(np.full_like(route_F, sharing.PRIVATE), route_F)[0]
