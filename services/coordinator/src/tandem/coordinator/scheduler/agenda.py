"""The agenda: which rules are due, as tables change; and a rule, which reads some and fires.

A rule declares the tables that it reads, and is asked again only when one of them has changed. It declares them in two
parts. Those in `TableRule.opens_with` say whether it has anything to do at all. While it has not, a change of the
others does not make it due. So a step in which no process joins, leaves, is lost or saves calls none of the rules about
these.

    table changes ─▶ its rules are due ─▶ the first of them is asked ─▶ fires: it is due again.
                          ▲                             │           └─▶ does not: it waits for a change.
                          └─────────────────────────────┘

Whenever something that a rule reads changes, the table calls the function from `RuleAgenda.changes`. Two mistakes are
possible: a rule reads a table that it does not declare, or a table changes and does not say so. The agendas in
`tests/harness/agendas.py` ask every rule each time, and so find both.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tandem.coordinator.scheduler.events import Action

Changed = Callable[[], None]
"""The function that a table calls when it has changed."""


class RuleTables(enum.Enum):
    """The tables that rules read."""

    PROCESSES = "processes that have joined"
    REQUESTS = "commands without an answer"
    GROUPS = "rollout groups, and which engine each is at"
    READY = "steps whose groups are all ready"
    WAITING = "groups that wait for an engine, and the room that engines have"
    STORED = "tokens that rollouts keep"
    ENGINES = "engines, and what they hold"
    JOINING = "engines on their way into the table of engines"
    LEAVING = "draining engines"
    INVALIDATED = "engines whose samples no longer count"
    WEIGHTS = "the version that trainers hold, and how far it is"
    STEPS = "the step in progress, and how far the run is"
    SAVING = "the checkpoint that is being written"
    RECORDING = "parts of the rollout log that are not written"


class RuleMode(enum.Enum):
    """The rules in force."""

    SETTING_UP = "setting up"
    GOING_ON = "going on"
    FAILING = "waiting for the last checkpoint of a run that has failed"
    OVER = "over"


class HasMode(Protocol):
    """The part of the tables that the agenda reads."""

    @property
    def mode(self) -> RuleMode:
        """The rules in force."""
        ...


Tables = TypeVar("Tables", bound=HasMode)


class TableRule(msgspec.Struct, Generic[Tables], frozen=True, kw_only=True):
    """One rule, and the tables that it reads."""

    name: str
    fire: Callable[[Tables], list[Action] | None]
    """Returns None if the rule does not fire, else its actions. These may be none if it has changed the tables."""
    opens_with: tuple[RuleTables, ...]
    """The tables that `is_open` reads."""
    is_open: Callable[[Tables], bool]
    """Whether the rule has anything to do. It is not asked while it has not."""
    reads: tuple[RuleTables, ...] = ()
    """The other tables that `fire` reads before it returns None."""


def no_agenda() -> None:
    """Ignore a change of a table that no rule reads, because the table is used by itself."""


class Tracked:
    """A table with few attributes, which are rarely set. Setting one of them counts as a change."""

    _changed: Changed

    def __init__(self, changed: Changed) -> None:
        object.__setattr__(self, "_changed", changed)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self._changed()


class AgendaEntry(Generic[Tables]):
    """A rule on the agenda."""

    def __init__(self, rule: TableRule[Tables], bit: int) -> None:
        self.rule = rule
        self.bit = bit
        """The rule's bit in a set of rules. Earlier rules have lower bits."""
        self.is_open = False
        """Whether the rule was open when it was last asked."""


class RuleAgenda(Generic[Tables]):
    """The rules in their order, and the due ones among them. A set of rules is an integer, with a bit for each rule."""

    def __init__(self, rules: Mapping[RuleMode, tuple[TableRule[Tables], ...]]) -> None:
        """Take the rules of each mode, in their order. Modes may share rules."""
        unique_rules = dict.fromkeys(rule for of_mode in rules.values() for rule in of_mode)
        self._entries = {1 << place: AgendaEntry(rule, 1 << place) for place, rule in enumerate(unique_rules)}
        self._of_mode = {
            mode: sum(entry.bit for entry in self._entries.values() if entry.rule in rules.get(mode, ()))
            for mode in RuleMode
        }
        self._mode: RuleMode | None = None
        self._in_force = 0
        self._due = 0
        self._watching = 0
        """Bits above those of rules: other listeners (`watch`)."""
        self._places = {table: place for place, table in enumerate(RuleTables)}
        self._readers = [
            sum(entry.bit for entry in self._entries.values() if table in entry.rule.opens_with) for table in RuleTables
        ]
        """The rules that a change of each table makes due. A rule that is not open reads only `opens_with`."""

    def changes(self, table: RuleTables) -> Changed:
        """Return the function that a table calls when it has changed."""
        place, readers = self._places[table], self._readers

        def changed() -> None:
            self._due |= readers[place]

        return changed

    def watch(self, *tables: RuleTables) -> Callable[[], bool]:
        """Return a function that tells whether the mode or one of these tables has changed since its last call."""
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

    def _rules_of(self, mode: RuleMode) -> int:
        """Return the rules in force. All of them are due when the mode changes."""
        if mode is not self._mode:
            self._mode, self._in_force = mode, self._of_mode[mode]
            self._due |= self._in_force | self._watching
        return self._in_force

    def _ask(self, entry: AgendaEntry[Tables], tables: Tables) -> list[Action] | None:
        """Let a rule fire if it can. Return its actions, or None."""
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
