"""The search for the cause of a run's trouble: controls first, then one change a trial.

A cause is named only if the trouble is there in the unchanged trial, and is not in the one with the change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tandem.common import signals
from tandem.common.errors import TandemError
from tandem.coordinator.bisecting.hypotheses import CauseHypothesis, list_hypotheses
from tandem.coordinator.bisecting.recorded_groups import (
    SampleFacts,
    SamplePartition,
    edits_of,
    group_facts,
    list_old,
    list_partitions,
    read_facts,
    rewards_by_answers,
)
from tandem.coordinator.bisecting.subsets import divide, reduce
from tandem.coordinator.bisecting.trials import TrialRecord, TrialSpec, TrialTable, carry_out
from tandem.coordinator.bisecting.troubles import RunTrouble, last_step_of
from tandem.coordinator.preparing.replay import list_starts
from tandem.observe.diagnosis.evidence import RunEvidence

_LOOK_BACK = 4
"""Steps before the trouble that a trial has, at least, if the run has as many."""
_MOST_FROM_THE_MODEL = 60
"""Steps from the run's model within which a rerun begins with it, rather than with a checkpoint."""
_SMALL = 0.25
"""Share of the samples that is a small part of them."""
_MOST_PARTS = 4
"""Parts into which samples are divided before it is given up that a few of them are the cause."""
_MOST_NAMED = 3
T = TypeVar("T")
Say = Callable[[str], None]


class TrialLimits(msgspec.Struct, frozen=True, kw_only=True):
    """TrialLimits of a bisection."""

    most_trials: int
    most_s: float
    """Seconds for all trials of this call."""
    trial_s: float
    """Seconds for each trial."""


class NamedCause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a trouble."""

    trouble: str = ""
    """Name of the trouble."""
    cause: str
    """Key, or keys, or samples."""
    text: str
    trials: tuple[int, ...]
    """Numbers of the trials that show it: without the change, and with it."""


class BisectionEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a search ended."""

    cause: NamedCause | None
    reason: str = ""
    """Why nothing was named."""
    is_fragile: bool = False
    """Whether any change removes the trouble, so that a trial without it says nothing."""
    is_cut_short: bool = False
    """Whether trials or time were used up."""


class BudgetExhausted(Exception):
    """The trials or the time are used up."""


class RunBisection:
    """The search through the trials of one run."""

    def __init__(self, evidence: RunEvidence, root: Path, limits: TrialLimits, say: Say) -> None:
        """Search for causes of trouble in a run; trials are in the folder `root`. Raises `RunFolderError`."""
        self._evidence = evidence
        self._root = root
        self._limits = limits
        self._say = say
        self._signals_heard: list[int] = []
        self._ends_at = time.monotonic() + limits.most_s
        self.table = TrialTable(root, evidence.run.run_id)
        self._keys: set[str] = set()
        """Names of the trials that this search has needed, done before or now."""

    def search(self, troubles: Sequence[RunTrouble]) -> BisectionEnd:
        """Look for the cause of one trouble after another.

        Raises:
            BisectionInterrupted: a termination signal came, in a trial or before one.

        """
        with signals.hear_signals(self._signals_heard.append):
            return self._search(troubles)

    def _search(self, troubles: Sequence[RunTrouble]) -> BisectionEnd:
        reasons, fragile_names = [], set[str]()
        for trouble in troubles:
            if trouble.follows_from and trouble.follows_from not in fragile_names:
                continue
            self._say(f"trouble: {trouble.text}")
            try:
                end = _TroubleSearch(self, self._evidence, trouble).search()
            except BudgetExhausted as error:
                return BisectionEnd(cause=None, reason=str(error), is_cut_short=True)
            name = trouble.finding or trouble.metric
            if end.cause is not None:
                return msgspec.structs.replace(end, cause=msgspec.structs.replace(end.cause, trouble=name))
            reasons.append(f"{name}: {end.reason}")
            if end.is_fragile:
                fragile_names.add(name)
        return BisectionEnd(cause=None, reason="; ".join(reasons))

    def try_out(self, spec: TrialSpec, trouble: RunTrouble) -> TrialRecord:
        """Carry out a trial, unless it is done. Raises `BudgetExhausted` and `BisectionInterrupted`."""
        record = self.table.find(spec.key)
        if record is not None and spec.key in self._keys:
            return record
        self._keys.add(spec.key)
        is_new = record is None
        if record is None:
            left_s = self._ends_at - time.monotonic()
            if len(self._keys) > self._limits.most_trials:
                raise BudgetExhausted(f"{self._limits.most_trials} trials are used up (--max-trials)")
            if left_s <= 0:
                raise BudgetExhausted(f"{self._limits.most_s / 60:g} minutes are used up (--budget)")
            number = len(self.table.records) + 1
            longest = min(self._limits.trial_s, left_s)
            record = carry_out(self._evidence.folder, self._root, number, spec, trouble, longest, self._signals_heard)
            self.table.append(record)
        before = "" if is_new else ", done before"
        reason = f" ({record.reason})" if record.reason else ""
        outcome = {"trouble": "the trouble is there", "well": "no trouble", "undecided": "undecided"}[record.outcome]
        self._say(f"trial {record.number}{before}: {record.kind} {record.change}: {outcome}{reason}")
        return record


class _TroubleSearch:
    """The search for the cause of one trouble."""

    def __init__(self, trials: RunBisection, evidence: RunEvidence, trouble: RunTrouble) -> None:
        self._trials = trials
        self._evidence = evidence
        self._trouble = trouble
        self._is_fragile = False
        self._are_halves_alike = False
        """Whether the trouble is gone without either half of the sets that were asked about last."""
        self._unmet: list[str] = []
        """Why nothing could be told."""
        self._spans = {"replay": self._find_replay(), "rerun": self._find_rerun()}
        self._controls: dict[str, TrialRecord] = {}

    def search(self) -> BisectionEnd:
        """Try one hypothesis after another."""
        hypotheses = list_hypotheses(self._evidence.config, self._trouble)
        for hypothesis in hypotheses:
            match hypothesis.kind:
                case "samples":
                    cause = self._search_samples()
                case "rewards":
                    cause = self._try_rewards()
                case "ages":
                    cause = self._search_ages()
                case "replay" | "rerun":
                    cause = self._try_settings(hypothesis, hypothesis.kind)
            if cause is not None:
                return BisectionEnd(cause=cause)
            if self._is_fragile:
                reason = "it is gone without either half of the samples: it hangs on everything before it"
                return BisectionEnd(cause=None, reason=reason, is_fragile=True)
        if not hypotheses:
            return BisectionEnd(cause=None, reason="no trial can tell its cause")
        reason = "; ".join(dict.fromkeys(self._unmet)) or "with each of the changes tried, the trouble was still there"
        return BisectionEnd(cause=None, reason=reason)

    # --- where trials begin and end ----------------------------------------------------------------------------------

    def _find_replay(self) -> tuple[int, int] | None:
        """Return where replays begin and end; None if the record has not what they need."""
        last = self._trouble.last_step
        if not self._trouble.is_of_trainers:
            return None
        try:
            starts = list_starts(self._evidence.folder, last)
        except TandemError as error:
            self._unmet.append(str(error))
            return None
        before = [step for step in starts if step < self._trouble.first_step]
        if not before:
            return None
        early = [step for step in before if step <= self._trouble.first_step - 1 - _LOOK_BACK]
        return (early[-1] if early else before[0]), last

    def _find_rerun(self) -> tuple[int, int]:
        """Return where short runs of their own begin and end."""
        last_step = last_step_of(self._evidence)
        shown = self._trouble.last_step
        last = max(shown, min(last_step, shown + max(1, shown // 4)))
        if last <= _MOST_FROM_THE_MODEL:
            return 0, last
        from tandem.observe.run_folder.checkpoints import checkpoints_of

        steps = checkpoints_of(self._evidence.folder, self._evidence.config).steps()
        return max((step for step in steps if step < self._trouble.first_step - _LOOK_BACK), default=0), last

    def _spec(self, kind: Literal["replay", "rerun"], change: str, **parts: Any) -> TrialSpec | None:
        span = self._spans[kind]
        if span is None:
            self._unmet.append("the samples of the steps before it are not recorded, or no checkpoint lies before it")
            return None
        return TrialSpec(kind=kind, change=change, from_step=span[0], to_step=span[1], **parts)

    def _try(self, spec: TrialSpec) -> TrialRecord:
        return self._trials.try_out(spec, self._trouble)

    def _control(self, kind: Literal["replay", "rerun"]) -> TrialRecord | None:
        """Return the unchanged trial, if the trouble is there."""
        if kind not in self._controls:
            spec = self._spec(kind, "with nothing changed")
            if spec is None:
                return None
            self._controls[kind] = self._try(spec)
        control = self._controls[kind]
        if control.outcome == "trouble":
            return control
        self._unmet.append(
            f"an unchanged {kind} does not show the trouble"
            if control.outcome == "well"
            else f"an unchanged {kind} cannot tell ({control.reason})"
        )
        return None

    # --- settings ----------------------------------------------------------------------------------------------------

    def _try_settings(self, hypothesis: CauseHypothesis, kind: Literal["replay", "rerun"]) -> NamedCause | None:
        control = self._control(kind)
        if control is None:
            return None
        values = ", ".join(
            f"{key}={_show(value)}" for key, value in hypothesis.settings.items() if not isinstance(value, dict)
        )
        change = f"with {values}" if values else f"without {hypothesis.cause}"
        spec = self._spec(kind, change, settings=hypothesis.settings)
        assert spec is not None, "the control has the same span"
        record = self._try(spec)
        if record.outcome != "well":
            return None
        return NamedCause(
            cause=hypothesis.cause,
            text=f"{hypothesis.cause}, which is {hypothesis.was}: {change} the trouble is gone",
            trials=(control.number, record.number),
        )

    # --- samples -----------------------------------------------------------------------------------------------------

    def _facts(self) -> list[SampleFacts]:
        span = self._spans["replay"]
        if span is None:
            return []
        return read_facts(self._evidence.folder, self._evidence.run.run_id, span[0] + 1, span[1])

    def _is_gone_without(self, facts: Sequence[SampleFacts], name: str) -> TrialRecord | None:
        """Return the trial without some samples, if the trouble is gone."""
        spec = self._spec("replay", f"without {name}", edits=edits_of(facts))
        assert spec is not None, "the control has the same span"
        record = self._try(spec)
        return record if record.outcome == "well" else None

    def _environments(self) -> dict[str, str]:
        """Return the environment that scores the problems of each file of the run."""
        data = self._evidence.config.data
        names = {each.data_path: each.env_name or data.environment for each in data.train}
        return {path: name for path, name in names.items() if path is not None and name is not None}

    def _try_rewards(self) -> NamedCause | None:
        """Give samples the rewards that their reference answers say."""
        control, facts = self._control("replay"), self._facts()
        edits = rewards_by_answers(facts)
        if control is None or not edits:
            return None
        spec = self._spec("replay", "with rewards by the reference answers", edits=edits)
        assert spec is not None, "the control has the same span"
        record = self._try(spec)
        if record.outcome != "well":
            return None
        text = (
            f"{self._evidence.config.environment_keys}, whose rewards are not those of the reference answers in "
            f"{len(edits)} of {len(facts)} samples: with these the trouble is gone"
        )
        return NamedCause(
            cause=self._evidence.config.environment_keys, text=text, trials=(control.number, record.number)
        )

    def _search_ages(self) -> NamedCause | None:
        """Leave out samples of the step of the trouble that are beyond an age."""
        control = self._control("replay")
        if control is None:
            return None
        facts = [fact for fact in self._facts() if fact.step == self._trouble.last_step]
        for partition in list_old(facts):
            cause = self._try_partition(partition, control)
            if cause is not None:
                return cause
        return None

    def _try_partition(self, partition: SamplePartition, control: TrialRecord) -> NamedCause | None:
        record = self._is_gone_without(partition.samples, partition.name)
        if record is None:
            return None
        text = f"{partition.name} ({len(partition.samples)}): without them the trouble is gone"
        return NamedCause(cause=partition.name, text=text, trials=(control.number, record.number))

    def _search_samples(self) -> NamedCause | None:
        """Leave out sets of samples, then halves of groups and of samples, down to the fewest."""
        control = self._control("replay")
        if control is None:
            return None
        facts = self._facts()
        within, of_set = facts, None
        for partitions in list_partitions(facts, self._environments()):
            part = self._narrow(partitions, lambda some: [fact for each in some for fact in each.samples], _name_sets)
            if part is not None and len(part) == 1:
                of_set, within = self._try_partition(part[0], control), part[0].samples
                break
        # Those of the step that shows it come first: nothing before it is otherwise then than in the run.
        of_step = [fact for fact in within if fact.step == self._trouble.last_step]
        few = self._find_few(of_step, most_parts=2)
        if few is None and len(of_step) < len(within) and of_set is None:
            few = self._find_few(within, _MOST_PARTS)
            self._is_fragile = few is None and self._are_halves_alike
        return of_set if few is None else self._name_samples(few, facts, control)

    def _find_few(self, facts: Sequence[SampleFacts], most_parts: int) -> list[SampleFacts] | None:
        """Return a small part of samples without which the trouble is gone; None if no small part is found."""
        groups = group_facts(facts)
        part = self._narrow(groups, lambda some: [fact for group in some for fact in group], _name_groups, most_parts)
        if part is None or (len(groups) > 1 and len(part) > max(1, _SMALL * len(groups))):
            return None
        members = [fact for group in part for fact in group]
        return reduce(members, lambda few: self._is_gone_without(few, _name_samples(few)) is not None, _MOST_PARTS)

    def _narrow(
        self,
        units: Sequence[T],
        members_of: Callable[[Sequence[T]], list[SampleFacts]],
        name: Callable[[Sequence[T]], str],
        most_parts: int = _MOST_PARTS,
    ) -> list[T] | None:
        """Return the part of sets of samples without which the trouble is gone.

        None if it is gone without either half: then it hangs on everything before it, and no sample is its cause.
        """

        def holds(part: Sequence[T]) -> bool:
            return self._is_gone_without(members_of(part), name(part)) is not None

        self._are_halves_alike = len(units) > 1 and all(holds(half) for half in divide(units, 2))
        if self._are_halves_alike:
            return None
        return reduce(units, holds, most_parts)

    def _name_samples(
        self, few: Sequence[SampleFacts], facts: Sequence[SampleFacts], control: TrialRecord
    ) -> NamedCause | None:
        """Name a few samples, if the trouble is gone without them, and is there with them alone.

        Samples are compared with those of their groups, which therefore stay.
        """
        without = self._is_gone_without(few, _name_samples(few))
        if without is None:
            return None
        them, numbers = "it" if len(few) == 1 else "them", (control.number, without.number)
        listed = "; ".join(map(str, few[:_MOST_NAMED]))
        listed += f"; and {len(few) - _MOST_NAMED} more" if len(few) > _MOST_NAMED else ""
        text = f"{listed}: without {them} the trouble is gone"
        if self._trouble.is_relative:
            return NamedCause(cause=_name_samples(few), text=text, trials=numbers)
        groups = {(fact.step, fact.group) for fact in few}
        other_facts = [fact for fact in facts if (fact.step, fact.group) not in groups]
        change = f"without all groups but {'that' if len(groups) == 1 else 'those'} of {_name_samples(few)}"
        spec = self._spec("replay", change, edits=edits_of(other_facts))
        assert spec is not None, "the control has the same span"
        alone = self._try(spec)
        if alone.outcome != "trouble":
            self._unmet.append(f"without {_name_samples(few)} the trouble is gone, but alone they do not make it")
            return None
        text += ", and without all other groups it is there"
        return NamedCause(cause=_name_samples(few), text=text, trials=(*numbers, alone.number))


def _name_samples(few: Sequence[SampleFacts]) -> str:
    first, last = few[0], few[-1]
    if len(few) == 1:
        return f"step {first.step}, group {first.group}, sample {first.sample}"
    return (
        f"{len(few)} samples from step {first.step}, group {first.group}, sample {first.sample} to step {last.step}, "
        f"group {last.group}, sample {last.sample}"
    )


def _name_sets(partitions: Sequence[SamplePartition]) -> str:
    return ", ".join(partition.name for partition in partitions)


def _name_groups(part: Sequence[tuple[SampleFacts, ...]]) -> str:
    first, last = part[0][0], part[-1][0]
    if len(part) == 1:
        return f"step {first.step}, group {first.group}"
    return f"{len(part)} groups from step {first.step}, group {first.group} to step {last.step}, group {last.group}"


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else repr(value)
