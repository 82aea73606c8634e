"""The choice of replicas to send from: trainers send about equally many bytes.

Replica sets are served from the smallest to the largest. Like water filling vessels, the bytes of a set go to the
members that have sent least, until all are level. Byte ranges are cut where one member's bytes end and the next one's
begin. So a large tensor is split among replicas, and a small one goes to the member with its middle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.refit.columns import ColumnTable, Ints
from tandem.refit.planning.sharing import ReplicaSet, SharingPattern


class SegmentColumns(ColumnTable, frozen=True, eq=False):
    """Parts of byte ranges, each from one trainer to one engine: X rows."""

    pattern_X: Ints
    range_X: Ints
    host_X: Ints
    """Node of the pattern."""
    sharer_X: Ints
    """Number of the receiver among the byte range's sharers."""
    member_X: Ints
    """Trainer that sends it."""
    transport_X: Ints
    """Number of the transport."""
    low_X: Ints
    high_X: Ints


class _Items(ColumnTable, frozen=True, eq=False):
    """The parts of byte ranges that engines receive, before their senders are chosen."""

    pattern_I: Ints
    range_I: Ints
    host_I: Ints
    sharer_I: Ints
    replicas_I: Ints
    low_I: Ints
    high_I: Ints


def choose(patterns: Sequence[SharingPattern], replica_sets: Sequence[ReplicaSet], num_members: int) -> SegmentColumns:
    """Assign all byte ranges to trainers."""
    items = _items(patterns)
    loads = {near: np.zeros(num_members, np.int64) for near in (False, True)}  # copies and messages do not compete
    first_S = np.searchsorted(items.replicas_I, np.arange(len(replica_sets) + 1))
    size_S = np.array([len(replicas.member_R) for replicas in replica_sets], np.int64)
    only = [replicas if len(replicas.member_R) == 1 else None for replicas in replica_sets]
    member_S = np.array([-1 if s is None else s.member_R[0] for s in only], np.int64)
    transport_S = np.array([-1 if s is None else s.transport_R[0] for s in only], np.int64)
    is_near_S = np.array([replicas.is_near for replicas in replica_sets], np.bool_)
    single = items.rows(np.flatnonzero(member_S[items.replicas_I] >= 0) if len(items) else slice(0))
    replicas_I = single.replicas_I
    segments = [_segments(single, member_S[replicas_I], transport_S[replicas_I], single.low_I, single.high_I)]
    for near in (False, True):
        matches_I = is_near_S[replicas_I] == near
        np.add.at(loads[near], member_S[replicas_I[matches_I]], (single.high_I - single.low_I)[matches_I])
    for number in np.argsort(size_S, kind="stable").tolist():
        mine = items.rows(slice(first_S[number], first_S[number + 1]))
        if size_S[number] > 1 and len(mine):
            segments.append(_assign(patterns, mine, replica_sets[number], loads[replica_sets[number].is_near]))
    columns = (np.concatenate([getattr(s, field) for s in segments]) for field in SegmentColumns.__struct_fields__)
    return SegmentColumns(*columns)


def fill(loads_R: Ints, amount: int) -> Ints:
    """Return how much of an amount each member gets so that the largest resulting load is minimal."""
    order = np.argsort(loads_R, kind="stable")
    ordered = loads_R[order]
    # Amount given out once the n least loaded members are level with the next one.
    amount_to_level = ordered * np.arange(len(ordered)) - (np.cumsum(ordered) - ordered)
    num = int(np.searchsorted(amount_to_level, amount, "right"))
    level, extra = divmod(amount + int(ordered[:num].sum()), num)
    shares = np.zeros_like(loads_R)
    shares[order[:num]] = level - ordered[:num]
    shares[order[:extra]] += 1
    return shares


def _items(patterns: Sequence[SharingPattern]) -> _Items:
    """Return the parts of all engines, sorted by replica set, then engine; sharers divide a range equally."""
    column_groups: list[list[Ints]] = []
    for number, pattern in enumerate(patterns):
        num_L = np.array([len(sharers) for sharers in pattern.sharers_L], np.int64)
        range_I = np.repeat(np.arange(len(num_L)), num_L)
        sharer_I = np.arange(len(range_I)) - np.repeat(np.cumsum(num_L) - num_L, num_L)
        slot_I = np.array([slot for sharers in pattern.sharers_L for slot in sharers], np.int64)
        low_L, size_L = pattern.low_L, pattern.high_L - pattern.low_L
        low_I, high_I = (
            pattern.snap(low_L[range_I] + size_L[range_I] * at_I // num_L[range_I]) for at_I in (sharer_I, sharer_I + 1)
        )
        num_hosts = len(pattern.hosts)
        host_I = np.repeat(np.arange(num_hosts), len(range_I))
        columns = (range_I, sharer_I, slot_I, pattern.replicas_L[range_I], low_I, high_I)
        range_I, sharer_I, slot_I, replicas_I, low_I, high_I = (np.tile(column, num_hosts) for column in columns)
        column_groups.append(
            [np.full_like(host_I, number), range_I, host_I, sharer_I, replicas_I, low_I, high_I, slot_I]
        )
    none = np.zeros(0, np.int64)
    columns_I = (
        [np.concatenate([none, *columns]) for columns in zip(*column_groups, strict=True)]
        if column_groups
        else [none] * 8
    )
    pattern_I, _, host_I, _, replicas_I, low_I, high_I, slot_I = columns_I
    order = np.lexsort((slot_I, host_I, pattern_I, replicas_I))
    order = order[high_I[order] > low_I[order]]
    return _Items(*(column[order] for column in columns_I[:-1]))


def _assign(patterns: Sequence[SharingPattern], items: _Items, replicas: ReplicaSet, loads_M: Ints) -> SegmentColumns:
    """Assign the items of one replica set to its members, and add to their loads."""
    ends_I = np.cumsum(items.high_I - items.low_I)
    total = int(ends_I[-1])
    shares_R = fill(loads_M[replicas.member_R], total)
    # End of each member's bytes: the item, and the position in its byte range.
    ends_R = np.cumsum(shares_R)[:-1]
    item_R = np.searchsorted(ends_I, ends_R, "right").clip(max=len(items) - 1)
    position_R = items.high_I[item_R] - (ends_I[item_R] - ends_R)
    for row, item in enumerate(item_R.tolist()):
        snapped = patterns[items.pattern_I[item]].snap(position_R[row : row + 1])
        position_R[row] = snapped.clip(items.low_I[item], items.high_I[item])[0]
    begin_R = np.concatenate([[0], item_R])
    stop_R = np.concatenate([item_R, [len(items) - 1]])
    from_R = np.concatenate([items.low_I[:1], position_R])
    to_R = np.concatenate([position_R, items.high_I[-1:]])
    segments = []
    for rank, (begin, stop) in enumerate(zip(begin_R.tolist(), stop_R.tolist(), strict=True)):
        member_items = items.rows(slice(begin, stop + 1))
        low_X, high_X = member_items.low_I.copy(), member_items.high_I.copy()
        low_X[0], high_X[-1] = from_R[rank], to_R[rank]
        keep = high_X > low_X
        loads_M[replicas.member_R[rank]] += int((high_X - low_X)[keep].sum())
        number = np.full(len(member_items), replicas.member_R[rank])
        transport = np.full(len(member_items), replicas.transport_R[rank])
        segments.append(_segments(member_items, number, transport, low_X, high_X).rows(keep))
    columns = (np.concatenate([getattr(s, field) for s in segments]) for field in SegmentColumns.__struct_fields__)
    return SegmentColumns(*columns)


def _segments(items: _Items, member_X: Ints, transport_X: Ints, low_X: Ints, high_X: Ints) -> SegmentColumns:
    return SegmentColumns(
        items.pattern_I, items.range_I, items.host_I, items.sharer_I, member_X, transport_X, low_X, high_X
    )
