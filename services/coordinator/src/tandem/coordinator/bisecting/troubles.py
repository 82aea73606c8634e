"""The trouble of a run: what its record shows, and how a trial tells whether it is there.

A trouble is a finding of `tandem.observe.diagnosis`. Where a metric shows it, the trial is judged by that metric alone,
not by its settings: a learning rate that is set back would not be found again, whatever it did. Other findings are
judged by the same check over the record of the trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from tandem.observe.diagnosis import CHECKS
from tandem.observe.diagnosis.evidence import DiagnosisFinding, RunEvidence
from tandem.observe.diagnosis.optimisation import (
    ENTROPY_GROWN,
    ENTROPY_LEFT,
    FAR_FROM_REFERENCE,
    GROWTH_OF_GRADIENT,
    HIGH_CLIP_SHARE,
    HIGH_KL,
    HIGH_PENALTY,
    MUCH_CLIPPED,
    REWARD_LEFT,
    RISE_OF_LOSS,
)
from tandem.observe.diagnosis.rewards import MOST_GROUPS
from tandem.observe.health import HIGH_PROBABILITY_ERROR, LOW_ENTROPY, NEAR_ZERO, STILL_LOW
from tandem.observe.run_folder.journal import StepRecord

Outcome = Literal["trouble", "well", "undecided"]
"""Whether a trial shows the trouble; undecided if it did not come far enough to tell."""
MOST_TROUBLES = 3
"""Troubles of a run that are looked into, the most likely first."""
_FEW = 3
"""Steps that a metric must be out of its range for, where one step says little."""
_COARSE = 16
"""Steps from which on the step that shows a finding is not looked for one by one."""
_NO_MOVEMENT = 1e-6
"""Nats per token within a step below which a policy stays as it is; a usual rate moves it by 1e-4 and more."""
_OUTLYING = 30.0
"""Multiple of a metric's median that one sample alone may make."""
_NOT_BY_TRAINING = frozenset(
    (
        *("lost processes", "slow engine", "slow trainer rank", "waiting", "standstill", "killed"),
        *("groups thrown away", "damaged weights", "damaged checkpoint"),
    )
)
"""Findings about processes and machines, which another run of the same may not have."""
OF_TRAINERS = frozenset(
    (
        *("approx_kl", "clip_fraction", "kl", "grad_norm", "loss", "entropy", "token_mult_prob_error"),
        *("advantage_outliers", "reward_std"),
    )
)
"""Metrics that training makes anew from recorded samples."""


class MetricRange(NamedTuple):
    """A range that a metric leaves in a trouble."""

    metric: str
    above: float | None = None
    below: float | None = None
    of: Literal["", "first", "median"] = ""
    """Value of the run itself that the limit multiplies."""
    fewest: int = 1
    """Steps outside it."""
    least: float = 0.0
    """Least of that value for which the limit says anything."""


_GAP = MetricRange("token_mult_prob_error", above=HIGH_PROBABILITY_ERROR, fewest=_FEW)
_STILL = (MetricRange("approx_kl", below=_NO_MOVEMENT, fewest=_FEW),)
RANGES: dict[str, tuple[MetricRange, ...]] = {
    "learning rate too large": (
        MetricRange("approx_kl", above=HIGH_KL),
        MetricRange("clip_fraction", above=HIGH_CLIP_SHARE),
        MetricRange("kl", above=FAR_FROM_REFERENCE),
        MetricRange("grad_norm", above=GROWTH_OF_GRADIENT, of="first"),
        MetricRange("entropy", below=ENTROPY_LEFT, of="first", least=0.1),
        MetricRange("entropy", above=ENTROPY_GROWN, of="first", least=0.1),
        MetricRange("reward", below=REWARD_LEFT, of="first", fewest=_FEW, least=0.05),
        MetricRange("loss", above=1 + RISE_OF_LOSS, of="first", fewest=_FEW, least=1e-3),
    ),
    "numbers out of proportion": (
        MetricRange("grad_norm", above=_OUTLYING, of="median", least=1e-9),
        MetricRange("loss", above=_OUTLYING, of="median", least=1e-9),
        MetricRange("advantage_outliers", above=0.0),
    ),
    "no learning rate": _STILL,
    "learning rate too small": _STILL,
    "unchanged weights": _STILL,
    "clip range too narrow": (MetricRange("clip_fraction", above=MUCH_CLIPPED, fewest=_FEW),),
    "KL penalty too large": (MetricRange("loss", above=HIGH_PENALTY, fewest=_FEW),),
    "dropout": (_GAP,),
    "engine and trainer disagree": (_GAP,),
    "stale samples": (_GAP._replace(fewest=1),),
    "wrong reference": (MetricRange("kl", above=0.2),),
    "low temperature": (MetricRange("groups_without_spread", above=0.75, fewest=_FEW),),
    "another tokenizer": (MetricRange("accuracy", below=STILL_LOW, fewest=_FEW),),
    "equal rewards": (MetricRange("reward_std", below=1e-9, fewest=_FEW),),
    "groups without spread": (MetricRange("groups_without_spread", above=MOST_GROUPS - 1e-9, fewest=_FEW),),
    "truncated responses": (MetricRange("truncated_fraction", above=0.5, fewest=_FEW),),
    "failing environment": (MetricRange("environment_failures", above=0.0, fewest=_FEW),),
    "low entropy": (
        MetricRange("entropy", below=LOW_ENTROPY, fewest=_FEW),
        MetricRange("entropy", below=ENTROPY_LEFT, of="first", least=0.1, fewest=_FEW),
    ),
    "no gradient": (MetricRange("grad_norm", below=1e-12, fewest=_FEW),),
    "overfitting": (MetricRange("val_loss", above=1.1, of="first"),),
    "no progress": (MetricRange("accuracy", below=NEAR_ZERO, fewest=_FEW),),
}
"""Ranges of metrics by finding; that which is left first in the run is the one that trials are judged by."""
_ZERO_IF_ABSENT = ("environment_failures", "advantage_outliers")


class RunTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """A trouble of a run, and the limit by which trials are judged."""

    finding: str
    """Name among those of a diagnosis; empty if a metric was given by hand."""
    text: str
    metric: str = ""
    """Metric that shows it; empty if only the check of the diagnosis does."""
    above: float | None = None
    below: float | None = None
    fewest: int = 1
    """Steps in which the metric is out of its range."""
    first_step: int
    """First step that shows it."""
    last_step: int
    """Step by which it is certain."""
    is_certain: bool = False
    follows_from: str = ""
    """Finding that it follows from, if that is the cause; empty if there is none."""
    is_of_one_step: bool = False
    """Whether only `first_step` counts."""

    @property
    def is_of_trainers(self) -> bool:
        """Whether training on recorded samples makes the metric anew."""
        return self.metric in OF_TRAINERS

    @property
    def is_relative(self) -> bool:
        """Whether a sample has the metric only next to others, so that one alone shows nothing."""
        return self.metric == "advantage_outliers"

    def holds(self, value: float) -> bool:
        """Tell whether a value is out of the range; NaN is."""
        size = abs(value) if self.metric in ("approx_kl", "loss", "grad_norm") else value
        if self.above is not None:
            return not size <= self.above
        assert self.below is not None, "a trouble with a metric has a limit"
        return not size >= self.below

    def judge(self, steps: Sequence[StepRecord], first_step: int, last_step: int, *, is_over: bool) -> Outcome:
        """Judge the steps of a trial from `first_step` on; it is to reach `last_step`, and has if it `is_over`."""
        points = points_of(self.metric, [record for record in steps if first_step <= record.step <= last_step])
        if sum(self.holds(value) for _, value in points) >= self.fewest:
            return "trouble"
        return "well" if is_over and points else "undecided"


def points_of(metric: str, steps: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """Return a metric's values with their steps, zero in steps that have it only if it is not."""
    absent = 0.0 if metric in _ZERO_IF_ABSENT else None
    pairs = [(record.step, record.metrics.get(metric, absent)) for record in steps]
    return [(step, value) for step, value in pairs if value is not None]


def find_troubles(evidence: RunEvidence, findings: Sequence[DiagnosisFinding]) -> list[RunTrouble]:
    """Return findings of a diagnosis as troubles, the most likely first, and those that follow from others last."""
    bisectable = [each for each in findings if each.name not in _NOT_BY_TRAINING]
    causes = [each for each in bisectable if not each.explained_by][:MOST_TROUBLES]
    names = {each.name for each in causes}
    return [_describe(evidence, each) for each in (*causes, *(e for e in bisectable if e.explained_by in names))]


def find_by_hand(
    evidence: RunEvidence, metric: str, above: float | None, below: float | None, step: int | None
) -> RunTrouble | None:
    """Return the trouble of a metric beyond a limit, at its first step or the given one; None if there is none."""
    limit = MetricRange(metric, above=above, below=below)
    trouble = _first_beyond(evidence, limit, "", "")
    if trouble is None or step is None:
        return trouble
    return msgspec.structs.replace(trouble, first_step=step, last_step=step, is_of_one_step=True)


def _describe(evidence: RunEvidence, finding: DiagnosisFinding) -> RunTrouble:
    """Return a finding as a trouble with the earliest of its metrics, or with none."""
    ranges = RANGES.get(finding.name, ())
    if evidence.config.declaration.rolls_out:  # its first loss is near zero, and no measure
        ranges = tuple(limit for limit in ranges if (limit.metric, limit.of) != ("loss", "first"))
    measured = [
        trouble for limit in ranges if (trouble := _first_beyond(evidence, limit, finding.name, finding.certainty))
    ]
    if measured:
        earliest = min(measured, key=lambda trouble: trouble.last_step)
        return msgspec.structs.replace(earliest, follows_from=finding.explained_by)
    step = _first_shown(evidence, finding.name)
    return RunTrouble(
        finding=finding.name,
        text=f"{finding.name}: {finding.evidence[0]}",
        first_step=min(finding.since, step),
        last_step=step,
        is_certain=finding.certainty == "certain",
        follows_from=finding.explained_by,
    )


def _first_beyond(evidence: RunEvidence, limit: MetricRange, finding: str, certainty: str) -> RunTrouble | None:
    """Return the trouble that a metric shows by leaving a range; None if it does not."""
    records = evidence.held_out if limit.metric.startswith("val_") else evidence.steps
    points = points_of(limit.metric, records)
    if not points:
        return None
    factor = 1.0
    if limit.of:
        values = [abs(value) for _, value in points]
        factor = values[0] if limit.of == "first" else statistics.median(values)
        if factor < limit.least:
            return None
    above, below = (None if bound is None else bound * factor for bound in (limit.above, limit.below))
    trouble = RunTrouble(
        finding=finding,
        text="",
        metric=limit.metric,
        above=above,
        below=below,
        fewest=limit.fewest,
        first_step=1,
        last_step=1,
        is_certain=certainty == "certain",
    )
    beyond = [(step, value) for step, value in points if trouble.holds(value)][: limit.fewest]
    if len(beyond) < limit.fewest:
        return None
    side, bound = ("above", above) if above is not None else ("below", below)
    steps = "step" if limit.fewest == 1 else f"{limit.fewest} steps from step"
    size = "" if limit.fewest > 1 else f", where it is {beyond[0][1]:.4g}"
    text = f"{limit.metric} is {side} {bound:.4g} in {steps} {beyond[0][0]}{' on' * (limit.fewest > 1)}{size}"
    return msgspec.structs.replace(
        trouble,
        text=f"{finding}: {text}" if finding else text,
        first_step=beyond[0][0],
        last_step=beyond[-1][0],
    )


def _first_shown(evidence: RunEvidence, name: str) -> int:
    """Return the step of a run up to which its record shows a finding."""
    steps = [record.step for record in evidence.steps]
    place = 0
    while place < len(steps) - 1:
        if shows(cut_after(evidence, steps[place]), name):
            return steps[place]
        place += 1 + place // _COARSE  # or a long run would take long
    return last_step_of(evidence)


def last_step_of(evidence: RunEvidence) -> int:
    """Return the last step of a run; that which it failed in, if it failed."""
    last = evidence.steps[-1].step if evidence.steps else 0
    return max(1, last + (evidence.ending is not None and evidence.ending.outcome == "failed"))


def cut_after(evidence: RunEvidence, step: int) -> RunEvidence:
    """Return what was recorded up to a step, as if the run were still going on."""
    return msgspec.structs.replace(
        evidence,
        ending=None,
        steps=tuple(record for record in evidence.steps if record.step <= step),
        held_out=tuple(record for record in evidence.held_out if record.step <= step),
        samples=tuple(row for row in evidence.samples if row.step <= step),
    )


def shows(evidence: RunEvidence, name: str) -> bool:
    """Tell whether a record shows a finding."""
    return any((finding := check.find(evidence)) is not None and finding.name == name for check in CHECKS)
