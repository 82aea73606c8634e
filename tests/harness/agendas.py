"""Agendas that ask every rule each time, as a check of the one that asks those that are due (`scheduler.agenda`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.coordinator.scheduler.agenda import AgendaEntry, RuleAgenda, RuleTables, TableRule
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.tables import SchedulerTables


class AskEverything(RuleAgenda[SchedulerTables]):
    """Asks all rules from the first one on, whatever has changed, until one fires; and then again."""

    def run(self, tables: SchedulerTables) -> list[Action]:
        actions: list[Action] = []
        while (fired := self._fire_first(tables)) is not None:
            actions += fired
        return actions

    def _fire_first(self, tables: SchedulerTables) -> list[Action] | None:
        in_force = self._rules_of(tables.mode)
        for bit, entry in self._entries.items():
            if bit & in_force and (fired := self._ask(entry, tables)) is not None:
                return fired
        return None


class Checked(AskEverything):
    """Asks all rules, and asserts of each that it would have been due when it fires, and reads only what it declares.

    A rule is a function of the tables that it has read when it returns None: until one of these changes it may be left
    out. What it reads when it fires does not matter, since it is asked again then.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._read = 0
        """What was read since a rule was asked, a bit for each of `_NAMES`."""
        self._watched: SchedulerTables | None = None
        self._opens_with = {bit: _bits(entry.rule.opens_with) for bit, entry in self._entries.items()}
        self._reads = {bit: self._opens_with[bit] | _bits(entry.rule.reads) for bit, entry in self._entries.items()}

    def run(self, tables: SchedulerTables) -> list[Action]:
        if self._watched is not tables:
            self._watched = tables
            self._watch_all(tables)
        return super().run(tables)

    def _ask(self, entry: AgendaEntry[SchedulerTables], tables: SchedulerTables) -> list[Action] | None:
        rule, is_due = entry.rule, bool(self._due & entry.bit)
        self._read = 0
        is_open = rule.is_open(tables)
        self._assert_declared(rule, "opens with", self._opens_with[entry.bit])
        if is_due:
            fired = super()._ask(entry, tables)
        else:
            fired = rule.fire(tables) if is_open else None
            assert fired is None, f"the rule {rule.name!r} fires, and no table that it reads has changed"
        if fired is None:
            self._assert_declared(rule, "reads", self._reads[entry.bit])
        return fired

    def _assert_declared(self, rule: TableRule[SchedulerTables], what: str, declared: int) -> None:
        if undeclared := self._read & ~declared:
            names = {name for name in _NAMES if undeclared & _bits([name])}
            raise AssertionError(f"the rule {rule.name!r} {what} {names}, and does not declare it")

    # --- hearing what is read ----------------------------------------------------------------------------------------

    def _watch_all(self, tables: SchedulerTables) -> None:
        weights = tables.weights
        watched: list[tuple[object, RuleTables | str, dict[str, RuleTables]]] = [
            (tables.processes, RuleTables.PROCESSES, {}),
            (tables.requests, RuleTables.REQUESTS, {}),
            (
                tables.groups,
                RuleTables.GROUPS,
                {"_steps": RuleTables.READY, "_stored": RuleTables.STORED, "_awaited": RuleTables.STORED},
            ),
            (tables.assignment, RuleTables.WAITING, {}),
            (
                tables.engines,
                RuleTables.ENGINES,
                {"draining": RuleTables.LEAVING, "invalidated": RuleTables.INVALIDATED},
            ),
            (tables.joining, RuleTables.JOINING, {}),
            (weights, RuleTables.WEIGHTS, {}),
            (weights.verification, RuleTables.WEIGHTS, {}),
            (weights.transfer_groups, RuleTables.WEIGHTS, {}),
            (tables.service, RuleTables.WEIGHTS, {}),
            (tables.steps, RuleTables.STEPS, {}),
            (tables.streamed, RuleTables.STEPS, {}),  # of the step in progress; only the rule that reads it changes it
            (tables.saving, RuleTables.SAVING, {}),
            (tables.recording, RuleTables.RECORDING, {}),
            (tables.restored, _RESTORED, {}),
            (tables, _NO_TABLE, {"full": RuleTables.WAITING}),
        ]
        by_itself = {id(table) for table, _, _ in watched}
        for table, name, others in watched:
            self._watch(table, name, others, by_itself)

    def _watch(self, table: Any, name: RuleTables | str, others: dict[str, RuleTables], by_itself: set[int]) -> None:
        """Have noted when an attribute of a table is read; `others` are of another table.

        Free to read are tables that are watched `by_itself`, and what never changes.
        """
        plain = type(table)
        heard: dict[str, Any] = {
            attribute: self._heard(attribute, _bits([others.get(attribute, name)]))
            for attribute, value in vars(table).items()
            if not (id(value) in by_itself or callable(value) or attribute in NEVER_CHANGES)
        }
        if isinstance(table, dict):
            bit = _bits([name])
            heard |= {method: self._called(getattr(dict, method), bit) for method in OF_A_DICT}
        object.__setattr__(table, "__class__", type(plain.__name__, (plain,), heard))

    def _heard(self, attribute: str, bit: int) -> property:
        """Return an attribute that lies where it did, and whose reading is noted."""

        def get(table: Any) -> Any:
            self._read |= bit
            try:
                return table.__dict__[attribute]
            except KeyError:
                raise AttributeError(attribute) from None

        def set_to(table: Any, value: Any) -> None:
            table.__dict__[attribute] = value

        return property(get, set_to)

    def _called(self, method: Any, bit: int) -> Any:
        """Return a method of a dictionary whose calls are noted."""

        def call(table: Any, *given: Any) -> Any:
            self._read |= bit
            return method(table, *given)

        return call


OF_A_DICT = ("__contains__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values")
"""The methods that read a table that is a dictionary."""
_RESTORED = "restored groups"
_NO_TABLE = "what belongs to no table"
_NAMES: tuple[RuleTables | str, ...] = (*RuleTables, _RESTORED, _NO_TABLE)
"""Tables, and what no rule can declare."""


def _bits(names: Iterable[RuleTables | str]) -> int:
    """Return a set of `_NAMES` as an integer."""
    return sum(1 << _NAMES.index(name) for name in {*names})


NEVER_CHANGES = {
    "spec",
    "_spec",
    "is_synchronous",
    "_is_synchronous",
    "transfers",  # the plan changes for engines that join, which then enter the table of engines
    "_transfers",
    "now",  # what a rule does may depend on the time, but not whether it fires
    "trainers",  # since the run was set up
    "_is_verified",
    "stage",  # says, with the next two, which rules are in force at all
    "error",
    "finish",
}
