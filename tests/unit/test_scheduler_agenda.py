"""The agenda: which rules are asked, and that a rule which reads what it does not declare is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from cluster_harness import GRPO, Cluster

from tandem.coordinator.scheduler import scheduler as rules
from tandem.coordinator.scheduler.agenda import AgendaEntry, RuleAgenda, RuleMode, RuleTables, no_agenda
from tandem.coordinator.scheduler.events import Action, CommitStep
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.tables import SchedulerTables
from tests.harness.agendas import Checked

STEADY = msgspec.structs.replace(GRPO, last_step=6, validate_every=0, validate_at_start=False, save_every=0)


class Counted(RuleAgenda[SchedulerTables]):
    """Counts how often each rule is called."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: Counter[str] = Counter()

    def _ask(self, entry: AgendaEntry[SchedulerTables], tables: SchedulerTables) -> list[Action] | None:
        fired = super()._ask(entry, tables)
        if entry.is_open:
            self.calls[entry.rule.name] += 1
        return fired


@pytest.mark.parametrize("age", [0, 2])
def test_a_steady_step_calls_no_rule_about_what_does_not_happen_in_it(age: int) -> None:
    cluster = Cluster(msgspec.structs.replace(STEADY, max_trajectory_age_steps=age), agenda=Counted)
    agenda = cluster.plan.agenda
    assert isinstance(agenda, Counted)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    while cluster.tables.step < 3:
        cluster.answer_next()
    agenda.calls.clear()
    while cluster.tables.step < 5:
        cluster.answer_next()
    assert {*agenda.calls} == {"publish", "offer", "validate", "commit", "advance", "draw", "assign", "train"}


def run(cluster: Cluster) -> None:
    cluster.join_all()
    while cluster.tables.phase is not RunPhase.FINISHED:
        cluster.answer_next()


def without(name: str, table: RuleTables) -> type[Checked]:
    """Return an agenda of the rules as they would be if one of them did not declare one of its tables."""

    class Lacking(Checked):
        def __init__(self, declared: Any) -> None:
            super().__init__(
                {
                    mode: tuple(
                        msgspec.structs.replace(
                            rule,
                            reads=tuple(other for other in rule.reads if other is not table),
                            opens_with=tuple(other for other in rule.opens_with if other is not table),
                        )
                        if rule.name == name
                        else rule
                        for rule in of_mode
                    )
                    for mode, of_mode in declared.items()
                }
            )

    return Lacking


@pytest.mark.parametrize(
    ("name", "table"),
    [
        (rule.name, table)
        for rule in (rules.PUBLISH, rules.OFFER, rules.DRAW, rules.ASSIGN, rules.TRAIN)
        for table in rule.opens_with
    ]
    + [
        ("train", RuleTables.READY),
        ("train", RuleTables.ENGINES),
        ("offer", RuleTables.REQUESTS),
        ("finish", RuleTables.REQUESTS),
    ],
)
def test_a_table_that_a_rule_does_not_declare_is_found(name: str, table: RuleTables) -> None:
    with pytest.raises(AssertionError, match=f"the rule '{name}' (opens with|reads) .*{table.name}"):
        run(Cluster(STEADY, agenda=without(name, table)))


def test_a_change_that_a_table_does_not_tell_of_is_found() -> None:
    cluster = Cluster(STEADY)
    cluster.tables.requests._changed = no_agenda
    with pytest.raises(AssertionError, match="the rule 'set up' fires, and no table that it reads has changed"):
        run(cluster)


def test_every_rule_is_in_force_at_some_time_and_declares_each_table_once() -> None:
    assert set(rules.RULES) == {*RuleMode} - {RuleMode.OVER}
    for rule in (rule for of_mode in rules.RULES.values() for rule in of_mode):
        declared = [*rule.opens_with, *rule.reads]
        assert len(declared) == len({*declared}), rule.name


def test_checking_the_agenda_changes_nothing() -> None:
    plain, checked = Cluster(STEADY, agenda=RuleAgenda), Cluster(STEADY, agenda=Checked)
    for cluster in (plain, checked):
        run(cluster)
    assert plain.log == checked.log
    assert sum(isinstance(action, CommitStep) for action in plain.done) == 6
