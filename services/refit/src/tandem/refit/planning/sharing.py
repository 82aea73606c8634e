"""Which engines of a node need the same bytes, and which trainers could send them.

Nodes that run engines of the same classes have the same pattern, which is worked out once. Within a pattern, regions
that the same engines need and the same trainers hold form a *line*: its bytes, one region after the other in the order
in which they are written, can be cut anywhere and dealt out. Positions are bytes along all lines of a pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints
from tandem.refit.layout import Layout
from tandem.refit.planning.holdings import Holdings
from tandem.refit.planning.routes import Choices, number_routes
from tandem.refit.planning.sweep import group_rows
from tandem.refit.planning.wants import Wants
from tandem.refit.transports import registry

FEWEST_CUTS = 16
"""A region is cut along its first dimension of so many elements, so that parts of it are long ranges."""


Narrow = NDArray[np.int32]
"""A column of which there are many millions of rows and no large numbers."""


class Supply(msgspec.Struct, frozen=True, eq=False):
    """Trainers that a region can come from equally well, and the transport that each brings it by."""

    member_R: Ints
    """Ascending."""
    transport_R: Ints
    """Number of the transport; see `tandem.refit.transports.registry`."""
    is_near: bool
    """Whether receivers copy for themselves."""

    def is_same(self, other: Supply) -> bool:
        """Say whether the other one is of the same trainers and transports."""
        return np.array_equal(self.member_R, other.member_R) and np.array_equal(self.transport_R, other.transport_R)


class Supplies:
    """All supplies, by number. Those for engines on hosts without trainers come first, one for each set of replicas."""

    def __init__(self, holdings: Holdings) -> None:
        self._sets = holdings.sets
        self._hosts = np.array([layout.host for layout in holdings.layouts])
        self._devices = np.array([layout.device for layout in holdings.layouts])
        self._sets_on: dict[str, list[int]] = {layout.host: [] for layout in holdings.layouts}
        for number, (member_R, _) in enumerate(self._sets):
            for host in set(self._hosts[member_R].tolist()):
                self._sets_on[host].append(number)
        self._choices = Choices()
        self._is_sent = np.array([transport.is_sent for transport in registry.numbered()])
        far_M = self._routes(None, "cpu")
        self.all = [self._preferred(number, far_M) for number in range(len(self._sets))]
        self._found: dict[tuple[str | None, str], Ints] = {(None, "cpu"): np.arange(len(self._sets))}

    def has_trainers(self, host: str) -> bool:
        """Say whether a trainer runs on a host."""
        return host in self._sets_on

    def on(self, host: str, device: str) -> Ints:
        """Return the supply of each set of replicas for an engine there: of its members, those that are preferred."""
        return self._find(host if self.has_trainers(host) else None, device)

    def _find(self, host: str | None, device: str) -> Ints:
        """Return the supplies for an engine; no host stands for all that have no trainers."""
        if (host, device) not in self._found:
            far_device = "cpu" if host is None or device == "cpu" else "gpu"
            supply_S = self._find(None, far_device).copy()
            route_M = self._routes(host, device)
            for number in range(len(self._sets)) if host is None else self._sets_on[host]:
                supply = self._preferred(number, route_M)
                if not self.all[supply_S[number]].is_same(supply):
                    supply_S[number] = len(self.all)
                    self.all.append(supply)
            self._found[host, device] = supply_S
        return self._found[host, device]

    def _routes(self, host: str | None, device: str) -> Ints:
        """Return the route from each trainer to an engine."""
        is_here_M = self._hosts == host if host is not None else np.zeros(len(self._hosts), np.bool_)
        return number_routes(is_here_M, is_here_M & (self._devices == device), self._devices != "cpu", device != "cpu")

    def _preferred(self, number: int, route_M: Ints) -> Supply:
        """Return the members of a set of replicas that are preferred."""
        member_R, kind_R = self._sets[number]
        transport_R, preference_R = self._choices.look_up(kind_R, route_M[member_R])
        best_R = preference_R == preference_R.max()
        chosen_R = transport_R[best_R]
        return Supply(member_R[best_R], chosen_R, not self._is_sent[chosen_R].all())


class Pattern(msgspec.Struct, frozen=True, eq=False):
    """The engines of a node by class, and the regions (R rows, in lines) that they need.

    A region stands under the first engine that needs it; the others need the same part of the same held box.
    """

    slots: tuple[int, ...]
    """The class of each engine."""
    hosts: tuple[tuple[str, ...], ...]
    """For each node: its engines, one a slot."""
    slot_R: Narrow
    part_R: Narrow
    """Row N of the `Wants` of that slot."""
    group_R: Narrow
    """Row of `part_KS`, or -1 if only that slot needs it."""
    low_R: Ints
    """Position of its first byte."""
    high_R: Ints
    axis_R: Narrow
    """Dimension that it can be cut along."""
    step_R: Ints
    """Bytes of one index along that dimension."""
    edge_R: Ints
    """Position from which cuts are counted: `low_R`, or where the first region that must stay with this one begins."""
    unit_R: Ints
    """Cuts may stand at multiples of so many bytes from there, and at the next `edge_R`."""
    widening_R: Narrow
    """How many times as many bytes it has between engines as from a trainer."""
    reading_R: Narrow
    """How many times as many bytes it has in a trainer's memory as on a link."""
    part_KS: Narrow
    """Regions that several slots need: row N of each slot's `Wants`, or -1."""
    low_L: Ints
    high_L: Ints
    supply_L: Ints
    sharers_L: tuple[tuple[int, ...], ...]
    """The slots that need the line."""

    def parts(self, region_N: Ints, slot: int) -> Narrow:
        """Return the rows of a slot's `Wants` that regions are for it."""
        if not len(self.part_KS):
            return self.part_R[region_N]
        group_N = self.group_R[region_N]
        return np.where(group_N < 0, self.part_R[region_N], self.part_KS[group_N, slot])

    def snap(self, positions: Ints) -> Ints:
        """Return for each position the nearest one where a cut may stand; in the same order."""
        if not len(self.low_R):
            return positions
        row = np.clip(np.searchsorted(self.high_R, positions, "right"), 0, len(self.low_R) - 1)
        steps = (2 * (positions - self.edge_R[row]) + self.unit_R[row]) // (2 * self.unit_R[row])
        snapped: Ints = self.edge_R[row] + steps * self.unit_R[row]
        return snapped

    def bytes_inside(self, low_N: Ints, high_N: Ints, times_R: Narrow) -> Ints:
        """Return the bytes from one position to another where a region has so many times as many as on a link."""
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
    wants: Sequence[Wants],
    supplies: Supplies,
    set_B: Ints,
    *,
    allow_alias: bool,
    grain: int,
) -> list[Pattern]:
    """Find the patterns of all nodes.

    Args:
        destinations: by engine.
        class_of: by engine.
        wants: by class.
        supplies: grows by those that are near.
        set_B: set of replicas of each held box.
        allow_alias: do not cut what may become an alias.
        grain: bytes; regions of fewer than twice as many are not cut.

    """
    engines: dict[str, list[tuple[int, str, str]]] = {}
    for engine, layout in destinations.items():
        # Which GPU it is on matters only where trainers are on the same ones.
        is_far = not supplies.has_trainers(layout.host)
        device = "gpu" if is_far and layout.device != "cpu" else layout.device
        engines.setdefault(layout.host, []).append((class_of[engine], device, engine))
    alike: dict[tuple[str, tuple[tuple[int, str], ...]], list[tuple[str, ...]]] = {}
    for host, there in engines.items():
        there.sort(key=lambda slot: slot[:2])
        near = host if supplies.has_trainers(host) else ""
        alike.setdefault((near, tuple(slot[:2] for slot in there)), []).append(tuple(slot[2] for slot in there))
    return [
        _pattern(host, slots, tuple(hosts), wants, supplies, set_B, allow_alias=allow_alias, grain=grain)
        for (host, slots), hosts in alike.items()
    ]


def _pattern(
    host: str,
    slots: tuple[tuple[int, str], ...],
    hosts: tuple[tuple[str, ...], ...],
    wants: Sequence[Wants],
    supplies: Supplies,
    set_B: Ints,
    *,
    allow_alias: bool,
    grain: int,
) -> Pattern:
    mine = [wants[number] for number, _ in slots]
    part_KS, group_R = _same_parts(mine)
    sharers, sharers_K = _sharers(part_KS)
    slot_R = np.repeat(np.arange(len(mine)), [len(w.want_N) for w in mine])
    part_R = np.concatenate([np.arange(len(w.want_N)) for w in mine])
    supply_R = np.concatenate([supplies.on(host, slots[slot][1])[set_B[w.box_N]] for slot, w in enumerate(mine)])
    is_near_R = np.array([supply.is_near for supply in supplies.all], bool)[supply_R]
    # What is within reach each engine copies for itself; the rest is sent once, to all that share it.
    alone_R = is_near_R | _is_near_to_some(len(part_KS), group_R, is_near_R)
    kept_R = np.flatnonzero(alone_R | (slot_R == (part_KS >= 0).argmax(axis=1)[group_R]))
    sharers_R = np.where(alone_R, slot_R, sharers_K[group_R] + len(mine))[kept_R]
    order = np.lexsort((supply_R[kept_R], sharers_R))
    chosen = kept_R[order]
    sharers_R, supply_R, slot_R, part_R, group_R = (
        sharers_R[order],
        *(column[chosen] for column in (supply_R, slot_R, part_R, group_R)),
    )
    is_first_R = np.ones(len(chosen), bool)
    is_first_R[1:] = (sharers_R[1:] != sharers_R[:-1]) | (supply_R[1:] != supply_R[:-1])
    first_L = np.flatnonzero(is_first_R)
    num_bytes_R, axis_R, step_R, storage_R, widening_R, reading_R = _sizes(mine, slot_R, part_R)
    high_R = np.cumsum(num_bytes_R)
    low_R = high_R - num_bytes_R
    edge_R, unit_R = low_R, np.where(num_bytes_R < 2 * grain, num_bytes_R, step_R)
    if allow_alias:
        spared = [bool(registry.in_place_of(transport.name)) for transport in registry.numbered()]
        can_alias = [bool(np.array(spared)[supply.transport_R].any()) for supply in supplies.all]
        edge_R, unit_R = _keep_together(
            np.array(can_alias, bool)[supply_R], is_first_R, storage_R, (low_R, high_R, edge_R, unit_R)
        )
    is_shared_R = ~alone_R[chosen] & ((part_KS >= 0).sum(axis=1) > 1)[group_R]
    shared_K = np.unique(group_R[is_shared_R])
    every = [(slot,) for slot in range(len(mine))] + sharers
    return Pattern(
        slots=tuple(number for number, _ in slots),
        hosts=hosts,
        slot_R=slot_R.astype(np.int32),
        part_R=part_R.astype(np.int32),
        group_R=np.where(is_shared_R, np.searchsorted(shared_K, group_R), -1).astype(np.int32),
        low_R=low_R,
        high_R=high_R,
        axis_R=axis_R.astype(np.int32),
        step_R=step_R,
        edge_R=edge_R,
        unit_R=unit_R,
        widening_R=widening_R.astype(np.int32),
        reading_R=reading_R.astype(np.int32),
        part_KS=part_KS[shared_K].astype(np.int32),
        low_L=low_R[first_L],
        high_L=high_R[np.concatenate([first_L[1:], [len(chosen)]]).astype(np.int64) - 1] if len(chosen) else low_R,
        supply_L=supply_R[first_L],
        sharers_L=tuple(every[number] for number in sharers_R[first_L].tolist()),
    )


def _same_parts(mine: Sequence[Wants]) -> tuple[Ints, Ints]:
    """Return the distinct parts by slot, and for each slot's parts, one slot after the other, which of those it is."""
    counts = [len(w.want_N) for w in mine]
    if len(mine) == 1:
        rows = np.arange(counts[0])
        return rows[:, None], rows
    columns = (np.concatenate([getattr(w, field) for w in mine]) for field in ("box_N", "start_ND", "shape_ND"))
    first_K, group_R = group_rows(*columns)
    part_KS = np.full((len(first_K), len(mine)), -1)
    for slot, group_N in enumerate(np.split(group_R, np.cumsum(counts)[:-1])):
        part_KS[group_N, slot] = np.arange(len(group_N))
    return part_KS, group_R


def _sharers(part_KS: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the distinct sets of slots that need the same part, and the set of each part."""
    needs_KS = (part_KS >= 0).astype(np.int64)
    first, sharers_K = group_rows(needs_KS)
    return [tuple(np.flatnonzero(needs_KS[row]).tolist()) for row in first.tolist()], sharers_K


def _is_near_to_some(num_parts: int, group_R: Ints, is_near_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Say which regions are of a part that some engine of the node finds within reach."""
    is_near_K = np.zeros(num_parts, bool)
    is_near_K[group_R[is_near_R]] = True
    return is_near_K[group_R]


def _sizes(mine: Sequence[Wants], slot_R: Ints, part_R: Ints) -> tuple[Ints, ...]:
    """Return for each region its bytes, the dimension to cut it along, the bytes of one index there, and more."""
    columns = tuple(np.zeros(len(slot_R), np.int64) for _ in range(6))
    num_bytes_R, axis_R, step_R, storage_R, widening_R, reading_R = columns
    for slot, w in enumerate(mine):
        rows = np.flatnonzero(slot_R == slot)
        parts = part_R[rows]
        shape_RD = w.shape_ND[parts]
        is_long_RD = shape_RD >= FEWEST_CUTS
        axis = np.where(is_long_RD.any(axis=1), is_long_RD.argmax(axis=1), shape_RD.argmax(axis=1))
        num_bytes_R[rows] = w.num_bytes_N[parts]
        axis_R[rows] = axis
        step_R[rows] = w.num_bytes_N[parts] // shape_RD[np.arange(len(rows)), axis]
        storage_R[rows] = w.storage_P[w.want_N[parts]]
        widening_R[rows], reading_R[rows] = w.widening_N[parts], w.reading_N[parts]
    return columns


def _keep_together(
    can_alias_R: NDArray[np.bool_], is_first_R: NDArray[np.bool_], storage_R: Ints, now: tuple[Ints, Ints, Ints, Ints]
) -> tuple[Ints, Ints]:
    """Return `edge_R` and `unit_R` with regions of one storage in one unit where they may become an alias."""
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
