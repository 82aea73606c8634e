"""The agenda: which rules are due, as tables change.

A rule declares the tables that it reads, and is asked again only when one of them has changed: while they are the same,
so is its answer. It declares them in two parts. Those in `Rule.opens_with` say whether there is anything for it to do
at all; while there is not, a change of the others does not make it due. So a step in which no process joins, leaves, is
lost or saves calls none of the rules about these.

    a table changes ─▶ rules that read it are due ─▶ the first of them is asked ─▶ fires: it is due again
                                     ▲                             │           └─▶ does not: it waits for a change
                                     └─────────────────────────────┘

A table calls what `Agenda.changes` returns whenever something changes that a rule reads. Two mistakes are possible: a
rule reads a table that it does not declare, or a table changes and does not say so. `tests/agendas.py` has agendas that
ask every rule each time, and finds both.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tandem.coordinator.scheduler.events import Action


class Table(enum.Enum):
    """What rules read."""

    MEMBERS = "processes that have joined"
    REQUESTS = "orders that are not answered"
    GROUPS = "rollout groups, and which engine each is at"
    READY = "steps whose groups are all ready"
    WAITING = "groups that wait for an engine, and the room that engines have"
    STORED = "tokens that rollouts keep"
    ENGINES = "engines, and what they hold"
    JOINING = "engines on their way into the table of engines"
    LEAVING = "engines that were told to leave"
    SUSPECTS = "engines whose samples no longer count"
    WEIGHTS = "the version that trainers hold, and how far it is"
    STEPS = "the step in progress, and how far the run is"
    SAVING = "the checkpoint that is being written"
    RECORDING = "parts of the record that are not written"


class Mode(enum.Enum):
    """Which rules are in force."""

    SETTING_UP = "setting up"
    GOING_ON = "going on"
    FAILING = "waiting for the last checkpoint of a run that has failed"
    OVER = "over"


Changed = Callable[[], None]
"""What a table calls when it has changed."""


def no_agenda() -> None:
    """Take note of a change of a table that no rule reads: it is used by itself."""


class Tracked:
    """A table with few attributes, which are rarely set: it has changed when one of them is."""

    _changed: Changed

    def __init__(self, changed: Changed) -> None:
        object.__setattr__(self, "_changed", changed)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self._changed()


class HasMode(Protocol):
    """What the agenda has to know of the tables."""

    @property
    def mode(self) -> Mode:
        """Which rules are in force."""
        ...


Tables = TypeVar("Tables", bound=HasMode)


class Rule(msgspec.Struct, Generic[Tables], frozen=True, kw_only=True):
    """One rule, and the tables that it reads."""

    fire: Callable[[Tables], list[Action] | None]
    """Returns None where the rule does not fire, else its actions, which may be none if it has changed the tables."""
    opens_with: tuple[Table, ...]
    """The tables that `is_open` reads."""
    is_open: Callable[[Tables], bool]
    """Whether there is anything for the rule to do. While there is not, it is not asked."""
    reads: tuple[Table, ...] = ()
    """The other tables that `fire` reads before it returns None."""

    @property
    def name(self) -> str:
        """The name of the rule, for people."""
        return str(getattr(self.fire, "__name__", "")).replace("_", " ")


class Entry(Generic[Tables]):
    """A rule on the agenda."""

    def __init__(self, rule: Rule[Tables], bit: int) -> None:
        self.rule = rule
        self.bit = bit
        """The bit that stands for the rule in a set of rules. Those of earlier rules are lower."""
        self.is_open = False
        """Whether it was open when it was last asked."""


class Agenda(Generic[Tables]):
    """The rules in their order, and which of them are due. Sets of rules are integers, a bit a rule."""

    def __init__(self, rules: Mapping[Mode, tuple[Rule[Tables], ...]]) -> None:
        """`rules`: those of each mode, in their order; modes may share rules."""
        each = dict.fromkeys(rule for of_mode in rules.values() for rule in of_mode)
        self._entries = {1 << place: Entry(rule, 1 << place) for place, rule in enumerate(each)}
        self._of_mode = {
            mode: sum(entry.bit for entry in self._entries.values() if entry.rule in rules.get(mode, ()))
            for mode in Mode
        }
        self._mode: Mode | None = None
        self._in_force = 0
        self._due = 0
        self._watching = 0
        """Bits above those of rules: other listeners (`watch`)."""
        self._places = {table: place for place, table in enumerate(Table)}
        self._readers = [
            sum(entry.bit for entry in self._entries.values() if table in entry.rule.opens_with) for table in Table
        ]
        """For each table the rules that its change makes due. A rule that is not open reads only `opens_with`."""

    def changes(self, table: Table) -> Changed:
        """Return what a table is to call when it has changed."""
        place, readers = self._places[table], self._readers

        def changed() -> None:
            self._due |= readers[place]

        return changed

    def watch(self, *tables: Table) -> Callable[[], bool]:
        """Return what tells whether one of these tables has changed, or the mode, since it was last called."""
        bit = 1 << (len(self._entries) + self._watching.bit_count())
        self._watching |= bit
        self._due |= bit
        for table in tables:
            self._readers[self._places[table]] |= bit

        def has_changed() -> bool:
            is_due = self._due & bit
            self._due ^= is_due
            return is_due != 0

        return has_changed

    def run(self, tables: Tables) -> list[Action]:
        """Run the rules until none fires: always the first one that can. Return their actions."""
        actions: list[Action] = []
        while due := self._due & self._rules_of(tables.mode):
            actions += self._ask(self._entries[due & -due], tables) or ()
        return actions

    def _rules_of(self, mode: Mode) -> int:
        """Return the rules that are in force now. All of them are due when the mode changes."""
        if mode is not self._mode:
            self._mode, self._in_force = mode, self._of_mode[mode]
            self._due |= self._in_force | self._watching
        return self._in_force

    def _ask(self, entry: Entry[Tables], tables: Tables) -> list[Action] | None:
        """Have a rule fire if it can; return its actions, or None."""
        rule, bit = entry.rule, entry.bit
        self._due &= ~bit
        is_open = rule.is_open(tables)
        if is_open is not entry.is_open:
            entry.is_open = is_open
            for table in rule.reads:
                self._readers[self._places[table]] ^= bit
        fired = rule.fire(tables) if is_open else None
        if fired is not None:
            self._due |= bit
        return fired
