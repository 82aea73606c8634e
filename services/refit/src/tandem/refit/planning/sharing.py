"""Bytes that several engines of a node need, and the trainers that could send them.

Nodes that run engines of the same classes share one pattern, computed once. Within a pattern, a *byte range* consists
of overlaps of destination and source shards that the same engines need and the same replica set holds. Its bytes, one
overlap after another in the order of writing, can be cut anywhere and assigned to replicas. Positions count the bytes
along all byte ranges of a pattern.

Transports are asked about kinds of places (`Route`), which are few, and the answers are cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints
from tandem.refit.layout import KINDS_OF_MEMORY, Layout, PrivateMemory
from tandem.refit.planning.destination_shards import DestinationShards
from tandem.refit.planning.source_shards import SourceShards
from tandem.refit.planning.sweep import group_rows
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route

FEWEST_CUTS = 16
"""An overlap is cut along its first dimension with at least this many elements, so that cuts leave long ranges."""


Narrow = NDArray[np.int32]
"""A column with many millions of rows and no large numbers."""
_ROUTES = tuple(Route(*facts) for facts in itertools.product((False, True), repeat=4))
"""Every route by its number; the facts, in order, are the number's binary digits."""

PRIVATE = KINDS_OF_MEMORY.index(PrivateMemory)
"""Code of memory that only its own process can access."""


def number_routes(same_host: object, same_device: object, from_gpu: object, to_gpu: object) -> Ints:
    """Return the number of each route; arguments are the facts of `Route`, as columns or single values."""
    number: Ints = np.zeros(1, np.int64)
    for fact in (same_host, same_device, from_gpu, to_gpu):
        number = number * 2 + np.asarray(fact, np.int64)
    return number


class TransportChoices:
    """The preferred transports, found as they are needed."""

    def __init__(self, *, sent_only: bool = False) -> None:
        """Choose from all transports, or only from those that send."""
        self._sent_only = sent_only
        shape = len(KINDS_OF_MEMORY), len(_ROUTES)
        self._transport_KR = np.full(shape, -1)
        self._preference_KR = np.zeros(shape, np.int64)

    def look_up(self, kind_N: Ints, route_N: Ints) -> tuple[Ints, Ints]:
        """Return the number of the transport for each kind of memory and route, and its preference.

        Raises:
            RefitError: no transport reaches the destination.

        """
        transport_N = self._transport_KR[kind_N, route_N]
        is_new_N = transport_N < 0
        if is_new_N.any():
            for kind, route in set(zip(kind_N[is_new_N].tolist(), route_N[is_new_N].tolist(), strict=True)):
                choice = registry.choose(KINDS_OF_MEMORY[kind], _ROUTES[route], sent_only=self._sent_only)
                self._transport_KR[kind, route], self._preference_KR[kind, route] = choice
            transport_N = self._transport_KR[kind_N, route_N]
        return transport_N, self._preference_KR[kind_N, route_N]


class ReplicaSet(msgspec.Struct, frozen=True, eq=False):
    """Trainers that hold the same bytes and serve an engine equally well, and the transport of each."""

    member_R: Ints
    """Trainers, ascending."""
    transport_R: Ints
    """Number of the transport in `tandem.refit.transports.registry`."""
    is_near: bool
    """Whether receivers copy for themselves."""

    def is_same(self, replicas: ReplicaSet) -> bool:
        """Return whether the other set has the same trainers and transports."""
        return np.array_equal(self.member_R, replicas.member_R) and np.array_equal(
            self.transport_R, replicas.transport_R
        )


class ReplicaSets:
    """All replica sets by number. Sets for engines on hosts without trainers come first: all holders of each slice."""

    def __init__(self, source_shards: SourceShards) -> None:
        self._sets = source_shards.sets
        self._hosts = np.array([layout.host for layout in source_shards.layouts])
        self._devices = np.array([layout.device for layout in source_shards.layouts])
        self._sets_on: dict[str, list[int]] = {layout.host: [] for layout in source_shards.layouts}
        for number, (member_R, _) in enumerate(self._sets):
            for host in set(self._hosts[member_R].tolist()):
                self._sets_on[host].append(number)
        self._choices = TransportChoices()
        self._is_sent = np.array([transport.is_sent for transport in registry.list_numbered()])
        far_M = self._routes(None, "cpu")
        self.all = [self._preferred(number, far_M) for number in range(len(self._sets))]
        self._found: dict[tuple[str | None, str], Ints] = {(None, "cpu"): np.arange(len(self._sets))}

    def has_trainers(self, host: str) -> bool:
        """Return whether a trainer runs on a host."""
        return host in self._sets_on

    def look_up(self, host: str, device: str) -> Ints:
        """Return, for each set of holders, the number of the replica set for an engine in this place."""
        return self._find(host if self.has_trainers(host) else None, device)

    def _find(self, host: str | None, device: str) -> Ints:
        """Return the result of `look_up`; None stands for all hosts without trainers."""
        if (host, device) not in self._found:
            far_device = "cpu" if host is None or device == "cpu" else "gpu"
            replicas_S = self._find(None, far_device).copy()
            route_M = self._routes(host, device)
            for number in range(len(self._sets)) if host is None else self._sets_on[host]:
                replicas = self._preferred(number, route_M)
                if not self.all[replicas_S[number]].is_same(replicas):
                    replicas_S[number] = len(self.all)
                    self.all.append(replicas)
            self._found[host, device] = replicas_S
        return self._found[host, device]

    def _routes(self, host: str | None, device: str) -> Ints:
        """Return the route from each trainer to an engine."""
        is_here_M = self._hosts == host if host is not None else np.zeros(len(self._hosts), np.bool_)
        return number_routes(is_here_M, is_here_M & (self._devices == device), self._devices != "cpu", device != "cpu")

    def _preferred(self, number: int, route_M: Ints) -> ReplicaSet:
        """Return the replica set of the preferred holders."""
        member_R, kind_R = self._sets[number]
        transport_R, preference_R = self._choices.look_up(kind_R, route_M[member_R])
        best_R = preference_R == preference_R.max()
        chosen_R = transport_R[best_R]
        return ReplicaSet(member_R[best_R], chosen_R, not self._is_sent[chosen_R].all())


class SharingPattern(msgspec.Struct, frozen=True, eq=False):
    """The engines of a node by class, and the overlaps (R rows, in byte ranges) that they need.

    A shared overlap is listed under the first engine that needs it.
    """

    slots: tuple[int, ...]
    """The class of each engine."""
    hosts: tuple[tuple[str, ...], ...]
    """The engines of each node, one per slot."""
    slot_R: Narrow
    row_R: Narrow
    """Row N of the `DestinationShards` of that slot."""
    group_R: Narrow
    """Row of `row_KS`, or -1 if only this slot needs the overlap."""
    low_R: Ints
    """Position of the overlap's first byte."""
    high_R: Ints
    axis_R: Narrow
    """Dimension along which it can be cut."""
    step_R: Ints
    """Bytes per index along that dimension."""
    edge_R: Ints
    """Position from which cuts are counted: `low_R`, or the start of the first overlap that must stay with this one."""
    unit_R: Ints
    """Cuts are allowed at multiples of this many bytes from there, and at the next `edge_R`."""
    widening_R: Narrow
    """Bytes between engines, as a multiple of those from a trainer."""
    reading_R: Narrow
    """Bytes in a trainer's memory, as a multiple of those on a link."""
    row_KS: Narrow
    """Overlaps that several slots need: row N in each slot's `DestinationShards`, or -1."""
    low_L: Ints
    high_L: Ints
    replicas_L: Ints
    sharers_L: tuple[tuple[int, ...], ...]
    """Slots that need the byte range."""

    def rows_of(self, overlap_N: Ints, slot: int) -> Narrow:
        """Return the row of each overlap in a slot's `DestinationShards`."""
        if not len(self.row_KS):
            return self.row_R[overlap_N]
        group_N = self.group_R[overlap_N]
        return np.where(group_N < 0, self.row_R[overlap_N], self.row_KS[group_N, slot])

    def snap(self, positions: Ints) -> Ints:
        """Return the nearest allowed cut for each position, in the same order."""
        if not len(self.low_R):
            return positions
        row = np.clip(np.searchsorted(self.high_R, positions, "right"), 0, len(self.low_R) - 1)
        steps = (2 * (positions - self.edge_R[row]) + self.unit_R[row]) // (2 * self.unit_R[row])
        snapped: Ints = self.edge_R[row] + steps * self.unit_R[row]
        return snapped

    def bytes_inside(self, low_N: Ints, high_N: Ints, times_R: Narrow) -> Ints:
        """Return the bytes between two positions, where `times_R` multiplies each overlap's bytes on a link."""
        if not len(self.low_R):
            return high_N - low_N
        before_R = np.cumsum((self.high_R - self.low_R) * times_R)
        ends = []
        for at_N in (low_N, high_N):
            row = np.clip(np.searchsorted(self.high_R, at_N), 0, len(self.low_R) - 1)
            ends.append(before_R[row] - (self.high_R[row] - at_N) * times_R[row])
        num_bytes: Ints = ends[1] - ends[0]
        return num_bytes


def patterns(
    destinations: Mapping[str, Layout],
    class_of: Mapping[str, int],
    shards: Sequence[DestinationShards],
    replica_sets: ReplicaSets,
    set_B: Ints,
    *,
    allow_alias: bool,
    grain: int,
) -> list[SharingPattern]:
    """Return the patterns of all nodes.

    Args:
        destinations: by engine.
        class_of: by engine.
        shards: by class.
        replica_sets: extended here by nearby sets.
        set_B: set of holders of each source shard.
        allow_alias: do not cut overlaps that may be read in place.
        grain: bytes; overlaps smaller than twice this are not cut.

    """
    engines: dict[str, list[tuple[int, str, str]]] = {}
    for engine, layout in destinations.items():
        # The GPU of an engine matters only if trainers use the same GPUs.
        is_far = not replica_sets.has_trainers(layout.host)
        device = "gpu" if is_far and layout.device != "cpu" else layout.device
        engines.setdefault(layout.host, []).append((class_of[engine], device, engine))
    alike: dict[tuple[str, tuple[tuple[int, str], ...]], list[tuple[str, ...]]] = {}
    for host, slots in engines.items():
        slots.sort(key=lambda slot: slot[:2])
        near = host if replica_sets.has_trainers(host) else ""
        alike.setdefault((near, tuple(slot[:2] for slot in slots)), []).append(tuple(slot[2] for slot in slots))
    # Numbers of replica sets follow the order of the nodes. What only depends on classes is found once for all nodes.
    replicas_of_place = {place: [replica_sets.look_up(place[0], device) for _, device in place[1]] for place in alike}
    is_near_S = np.array([replicas.is_near for replicas in replica_sets.all], bool)
    spared = np.array([bool(registry.find_in_place(transport.name)) for transport in registry.list_numbered()])
    can_alias_S = np.array([allow_alias and spared[s.transport_R].any() for s in replica_sets.all], bool)
    places: dict[tuple[int, ...], list[tuple[str, tuple[tuple[int, str], ...]]]] = {}
    for place in alike:
        places.setdefault(tuple(number for number, _ in place[1]), []).append(place)
    pattern_of_place: dict[tuple[str, tuple[tuple[int, str], ...]], SharingPattern] = {}
    for numbers, there_too in places.items():
        needs = _needs([shards[number] for number in numbers])
        box_R = np.concatenate([shards[number].box_N for number in numbers])
        set_R = set_B[box_R]
        for place in there_too:
            replicas_R = np.concatenate(
                [
                    replicas_S[set_N]
                    for replicas_S, set_N in zip(replicas_of_place[place], np.split(set_R, needs.ends), strict=True)
                ]
            )
            hosts = tuple(alike[place])
            pattern_of_place[place] = _pattern(numbers, hosts, needs, replicas_R, is_near_S, can_alias_S, grain=grain)
    return [pattern_of_place[place] for place in alike]


class _Needs(msgspec.Struct, frozen=True, eq=False):
    """The overlaps that the classes of a node need, slot after slot (R rows), wherever the node is."""

    ends: list[int]
    """First row of every slot but the first."""
    slot_R: Ints
    row_R: Ints
    group_R: Ints
    """Number of the overlap among the distinct ones, K."""
    row_KS: Ints
    """Row in each slot's `DestinationShards`, or -1."""
    sharers: list[tuple[int, ...]]
    """Distinct sets of slots."""
    sharers_R: Ints
    """Number of the set that needs the overlap."""
    is_first_R: NDArray[np.bool_]
    """Whether this slot is the first that needs it."""
    is_shared_R: NDArray[np.bool_]
    sizes: tuple[Ints, ...]
    """Bytes, dimension to cut, bytes per index along it, storage, widening and reading."""


def _needs(mine: Sequence[DestinationShards]) -> _Needs:
    counts = [len(w.want_N) for w in mine]
    slot_R = np.repeat(np.arange(len(mine)), counts)
    row_KS, group_R = _same_overlaps(mine)
    sharers, sharers_K = _sharers(row_KS)
    needs_KS = row_KS >= 0
    return _Needs(
        ends=np.cumsum(counts)[:-1].tolist(),
        slot_R=slot_R,
        row_R=np.concatenate([np.arange(count) for count in counts]),
        group_R=group_R,
        row_KS=row_KS,
        sharers=sharers,
        sharers_R=sharers_K[group_R],
        is_first_R=slot_R == needs_KS.argmax(axis=1)[group_R],
        is_shared_R=(needs_KS.sum(axis=1) > 1)[group_R],
        sizes=tuple(np.concatenate(columns) for columns in zip(*map(_sizes, mine), strict=True)),
    )


def _pattern(
    numbers: tuple[int, ...],
    hosts: tuple[tuple[str, ...], ...],
    needs: _Needs,
    replicas_R: Ints,
    is_near_S: NDArray[np.bool_],
    can_alias_S: NDArray[np.bool_],
    *,
    grain: int,
) -> SharingPattern:
    """Return the pattern of nodes.

    Args:
        numbers: the class of each slot.
        hosts: the engines of each node.
        needs: of those classes.
        replicas_R: number of the replica set of each overlap.
        is_near_S: by replica set.
        can_alias_S: whether overlaps from a replica set may be read in place, so that they are not cut.
        grain: that of `patterns`.

    """
    num_slots = len(numbers)
    is_near_R = is_near_S[replicas_R]
    # Each engine copies what is within reach for itself; the rest is sent once, to all that share it.
    alone_R = is_near_R | _is_near_to_some(len(needs.row_KS), needs.group_R, is_near_R)
    kept_R = np.flatnonzero(alone_R | needs.is_first_R)
    sharers_R = np.where(alone_R, needs.slot_R, needs.sharers_R + num_slots)[kept_R]
    order = _order(sharers_R * len(is_near_S) + replicas_R[kept_R])
    selected_R = kept_R[order]
    sharers_R, replicas_R, slot_R, row_R, group_R = (
        sharers_R[order],
        *(column[selected_R] for column in (replicas_R, needs.slot_R, needs.row_R, needs.group_R)),
    )
    is_first_R = np.ones(len(selected_R), bool)
    is_first_R[1:] = (sharers_R[1:] != sharers_R[:-1]) | (replicas_R[1:] != replicas_R[:-1])
    first_L = np.flatnonzero(is_first_R)
    num_bytes_R, axis_R, step_R, storage_R, widening_R, reading_R = (column[selected_R] for column in needs.sizes)
    high_R = np.cumsum(num_bytes_R)
    low_R = high_R - num_bytes_R
    edge_R, unit_R = low_R, np.where(num_bytes_R < 2 * grain, num_bytes_R, step_R)
    if can_alias_S.any():
        now = low_R, high_R, edge_R, unit_R
        edge_R, unit_R = _keep_together(can_alias_S[replicas_R], is_first_R, storage_R, now)
    is_shared_R = ~alone_R[selected_R] & needs.is_shared_R[selected_R]
    is_shared_K = np.zeros(len(needs.row_KS), bool)
    is_shared_K[group_R[is_shared_R]] = True
    number_K = np.cumsum(is_shared_K) - 1
    every = [(slot,) for slot in range(num_slots)] + needs.sharers
    return SharingPattern(
        slots=numbers,
        hosts=hosts,
        slot_R=slot_R.astype(np.int32),
        row_R=row_R.astype(np.int32),
        group_R=np.where(is_shared_R, number_K[group_R], -1).astype(np.int32),
        low_R=low_R,
        high_R=high_R,
        axis_R=axis_R.astype(np.int32),
        step_R=step_R,
        edge_R=edge_R,
        unit_R=unit_R,
        widening_R=widening_R.astype(np.int32),
        reading_R=reading_R.astype(np.int32),
        row_KS=needs.row_KS[is_shared_K].astype(np.int32),
        low_L=low_R[first_L],
        high_L=high_R[np.concatenate([first_L[1:], [len(selected_R)]]).astype(np.int64) - 1]
        if len(selected_R)
        else low_R,
        replicas_L=replicas_R[first_L],
        sharers_L=tuple(every[number] for number in sharers_R[first_L].tolist()),
    )


def _same_overlaps(mine: Sequence[DestinationShards]) -> tuple[Ints, Ints]:
    """Return the distinct overlaps by slot, and the number of each slot's overlaps among them, slot after slot."""
    counts = [len(w.want_N) for w in mine]
    if len(mine) == 1:
        rows = np.arange(counts[0])
        return rows[:, None], rows
    columns = (np.concatenate([getattr(w, field) for w in mine]) for field in ("box_N", "start_ND", "shape_ND"))
    first_K, group_R = group_rows(*columns)
    row_KS = np.full((len(first_K), len(mine)), -1)
    for slot, group_N in enumerate(np.split(group_R, np.cumsum(counts)[:-1])):
        row_KS[group_N, slot] = np.arange(len(group_N))
    return row_KS, group_R


def _sharers(row_KS: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the distinct sets of slots that need the same overlap, and the set of each overlap."""
    needs_KS = (row_KS >= 0).astype(np.int64)
    first, sharers_K = group_rows(needs_KS)
    return [tuple(np.flatnonzero(needs_KS[row]).tolist()) for row in first.tolist()], sharers_K


def _order(key_R: Ints) -> Ints:
    """Return the stable order of small numbers of which few are distinct: NumPy sorts 16 bits in linear time."""
    is_used = np.zeros(int(key_R.max(initial=0)) + 1, bool)
    is_used[key_R] = True
    rank_R = (np.cumsum(is_used) - 1)[key_R]
    num_ranks = np.count_nonzero(is_used)
    return np.argsort(rank_R.astype(np.uint16) if num_ranks <= 1 << 16 else rank_R, kind="stable")


def _is_near_to_some(num_overlaps: int, group_R: Ints, is_near_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which overlaps are within reach of some engine of the node."""
    is_near_K = np.zeros(num_overlaps, bool)
    is_near_K[group_R[is_near_R]] = True
    return is_near_K[group_R]


def _sizes(w: DestinationShards) -> tuple[Ints, ...]:
    """Return each overlap's bytes, dimension to cut, bytes per index along it, storage, widening and reading."""
    is_long_ND = w.shape_ND >= FEWEST_CUTS
    axis_N = np.where(is_long_ND.any(axis=1), is_long_ND.argmax(axis=1), w.shape_ND.argmax(axis=1))
    step_N = w.num_bytes_N // w.shape_ND[np.arange(len(axis_N)), axis_N]
    return w.num_bytes_N, axis_N, step_N, w.storage_P[w.want_N], w.widening_N, w.reading_N


def _keep_together(
    can_alias_R: NDArray[np.bool_], is_first_R: NDArray[np.bool_], storage_R: Ints, now: tuple[Ints, Ints, Ints, Ints]
) -> tuple[Ints, Ints]:
    """Return `edge_R` and `unit_R`, with overlaps of one storage in one unit if they may be read in place."""
    low_R, high_R, edge_R, unit_R = now
    begins_R = is_first_R | ~can_alias_R
    begins_R[1:] |= storage_R[1:] != storage_R[:-1]
    first = np.flatnonzero(begins_R)
    if not len(first):
        return edge_R, unit_R
    run_R = np.cumsum(begins_R) - 1
    last = np.concatenate([first[1:], [len(low_R)]]) - 1
    return (
        np.where(can_alias_R, low_R[first][run_R], edge_R),
        np.where(can_alias_R, (high_R[last] - low_R[first])[run_R], unit_R),
    )
