"""Which replica sends what: every trainer about as many bytes as any other that could send the same.

Supplies are served from the smallest to the largest. The bytes that a supply has to send are dealt out to its members
as water fills vessels: who has sent least gets most, until all stand level. Lines are cut where one member's share ends
and the next one's begins, so a large tensor is split among replicas and a small one goes to whom its middle belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.refit.columns import Ints, Table
from tandem.refit.planning.sharing import Pattern, Supply


class Segments(Table, frozen=True, eq=False):
    """Stretches of lines, each from one trainer to one engine: X rows."""

    pattern_X: Ints
    line_X: Ints
    host_X: Ints
    """Which node of the pattern."""
    sharer_X: Ints
    """Which of the line's sharers receives it."""
    member_X: Ints
    """Trainer that it comes from."""
    transport_X: Ints
    """Number of the transport."""
    low_X: Ints
    high_X: Ints


class _Items(Table, frozen=True, eq=False):
    """What each engine receives of each line, before it is known from whom."""

    pattern_I: Ints
    line_I: Ints
    host_I: Ints
    sharer_I: Ints
    supply_I: Ints
    low_I: Ints
    high_I: Ints


def choose(patterns: Sequence[Pattern], supplies: Sequence[Supply], num_members: int) -> Segments:
    """Deal all lines out to trainers."""
    items = _items(patterns)
    loads = {near: np.zeros(num_members, np.int64) for near in (False, True)}  # copies and messages do not compete
    first_S = np.searchsorted(items.supply_I, np.arange(len(supplies) + 1))
    size_S = np.array([len(supply.member_R) for supply in supplies], np.int64)
    only = [supply if len(supply.member_R) == 1 else None for supply in supplies]
    member_S = np.array([-1 if s is None else s.member_R[0] for s in only], np.int64)
    transport_S = np.array([-1 if s is None else s.transport_R[0] for s in only], np.int64)
    is_near_S = np.array([supply.is_near for supply in supplies], np.bool_)
    single = items.rows(np.flatnonzero(member_S[items.supply_I] >= 0) if len(items) else slice(0))
    supply_I = single.supply_I
    found = [_segments(single, member_S[supply_I], transport_S[supply_I], single.low_I, single.high_I)]
    for near in (False, True):
        here = is_near_S[supply_I] == near
        np.add.at(loads[near], member_S[supply_I[here]], (single.high_I - single.low_I)[here])
    for number in np.argsort(size_S, kind="stable").tolist():
        mine = items.rows(slice(first_S[number], first_S[number + 1]))
        if size_S[number] > 1 and len(mine):
            found.append(_deal(patterns, mine, supplies[number], loads[supplies[number].is_near]))
    columns = (np.concatenate([getattr(s, field) for s in found]) for field in Segments.__struct_fields__)
    return Segments(*columns)


def fill(loads_R: Ints, amount: int) -> Ints:
    """Return what each member gets of an amount, so that the largest load in the end is as small as can be."""
    order = np.argsort(loads_R, kind="stable")
    ordered = loads_R[order]
    # With the n least loaded level with the next one, so much has been given out.
    given = ordered * np.arange(len(ordered)) - (np.cumsum(ordered) - ordered)
    num = int(np.searchsorted(given, amount, "right"))
    level, extra = divmod(amount + int(ordered[:num].sum()), num)
    shares = np.zeros_like(loads_R)
    shares[order[:num]] = level - ordered[:num]
    shares[order[:extra]] += 1
    return shares


def _items(patterns: Sequence[Pattern]) -> _Items:
    """Return what every engine receives, sorted by supply and then by engine; sharers take equal parts of a line."""
    found: list[list[Ints]] = []
    for number, pattern in enumerate(patterns):
        num_L = np.array([len(sharers) for sharers in pattern.sharers_L], np.int64)
        line_I = np.repeat(np.arange(len(num_L)), num_L)
        sharer_I = np.arange(len(line_I)) - np.repeat(np.cumsum(num_L) - num_L, num_L)
        slot_I = np.array([slot for sharers in pattern.sharers_L for slot in sharers], np.int64)
        low_L, size_L = pattern.low_L, pattern.high_L - pattern.low_L
        low_I, high_I = (
            pattern.snap(low_L[line_I] + size_L[line_I] * at_I // num_L[line_I]) for at_I in (sharer_I, sharer_I + 1)
        )
        num_hosts = len(pattern.hosts)
        host_I = np.repeat(np.arange(num_hosts), len(line_I))
        columns = (line_I, sharer_I, slot_I, pattern.supply_L[line_I], low_I, high_I)
        line_I, sharer_I, slot_I, supply_I, low_I, high_I = (np.tile(column, num_hosts) for column in columns)
        found.append([np.full_like(host_I, number), line_I, host_I, sharer_I, supply_I, low_I, high_I, slot_I])
    none = np.zeros(0, np.int64)
    columns_I = [np.concatenate([none, *parts]) for parts in zip(*found, strict=True)] if found else [none] * 8
    pattern_I, _, host_I, _, supply_I, low_I, high_I, slot_I = columns_I
    order = np.lexsort((slot_I, host_I, pattern_I, supply_I))
    order = order[high_I[order] > low_I[order]]
    return _Items(*(column[order] for column in columns_I[:-1]))


def _deal(patterns: Sequence[Pattern], items: _Items, supply: Supply, loads_M: Ints) -> Segments:
    """Deal the items of one supply out to its members, whose loads grow by it."""
    ends_I = np.cumsum(items.high_I - items.low_I)
    total = int(ends_I[-1])
    shares_R = fill(loads_M[supply.member_R], total)
    # Where each share ends: in which item, and at which position of its line.
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
    found = []
    for rank, (begin, stop) in enumerate(zip(begin_R.tolist(), stop_R.tolist(), strict=True)):
        part = items.rows(slice(begin, stop + 1))
        low_X, high_X = part.low_I.copy(), part.high_I.copy()
        low_X[0], high_X[-1] = from_R[rank], to_R[rank]
        keep = high_X > low_X
        loads_M[supply.member_R[rank]] += int((high_X - low_X)[keep].sum())
        number = np.full(len(part), supply.member_R[rank])
        transport = np.full(len(part), supply.transport_R[rank])
        found.append(_segments(part, number, transport, low_X, high_X).rows(keep))
    columns = (np.concatenate([getattr(s, field) for s in found]) for field in Segments.__struct_fields__)
    return Segments(*columns)


def _segments(items: _Items, member_X: Ints, transport_X: Ints, low_X: Ints, high_X: Ints) -> Segments:
    return Segments(items.pattern_I, items.line_I, items.host_I, items.sharer_I, member_X, transport_X, low_X, high_X)
