"""The input of a diagnosis, the record of a run, read once from its folder; and its output, findings."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandem.common.errors import ConfigError, RunFolderError, SamplesError
from tandem.config import Config, config_from_json
from tandem.config.notice_rules import find_max_learning_rate
from tandem.observe.health import NUM_STEPS, SOLVED, HealthCondition, conditions
from tandem.observe.run_folder.journal import ENDED, RefitRecord, RunRecord, StepRecord, read_journal
from tandem.observe.run_folder.journal_file import is_taken
from tandem.samples import sample_files

SHORT_RUN = 3
"""Steps of the shortest run for which a condition can hold, if it holds in all of them; see `RunEvidence.streak`."""
MAX_STEPS_OF_SAMPLES = 16
"""Number of steps with examined samples: the first, the last, and others evenly between them."""
_FEWEST = 3
"""Steps that define a metric's early and late value; see `MetricChange`."""
_LOG_LINES, _LOG_BYTES = 5, 1 << 16
"""Lines and bytes read from the end of each log."""
_COLUMNS = (
    "step",
    "group",
    "problem_id",
    "reference_answer",
    "response",
    "reward",
    "failure",
    "rollout",
    "response_length",
    "started_at",
    "finished_at",
)
Certainty = Literal["certain", "likely", "possible"]
"""certain: the record says so. likely: the signs point to it. possible: it may be so, and may be harmless."""
CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


class DiagnosisFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A possible cause of a collapse or stall, and its evidence in the record."""

    name: str
    """A few words, unique among the checks."""
    what: str
    """The finding in a sentence."""
    evidence: tuple[str, ...]
    """Steps, values and the thresholds that they exceed, one per line."""
    look_at: str
    """Configuration keys to look at, or another place."""
    certainty: Certainty
    since: int = 1
    """First step that shows it, or that made the weights concerned."""
    explains: tuple[str, ...] = ()
    """Names of findings that are consequences of this one, if they are not seen earlier."""
    explained_by: str = ""
    """Name of the finding that caused this one, filled in by the diagnosis."""


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """The examined columns of a recorded sample; `tandem.samples.sample_record` describes each."""

    step: int
    group: int
    problem_id: str
    reference_answer: str
    response: str
    reward: float
    failure: str
    rollout: str
    response_length: int
    started_at: float
    finished_at: float
    prompt: str = ""
    """The prompt; empty except in the first recorded step."""


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    outcome: str
    """``finished``, ``was interrupted`` or ``failed``."""
    kind: str
    """Class of the error that ended it."""
    reason: str


class ConditionStreak(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps in which a condition held."""

    condition: HealthCondition
    steps: tuple[StepRecord, ...]

    @property
    def first(self) -> int:
        """Number of the first step."""
        return self.steps[0].step

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.steps[-1].step

    def __str__(self) -> str:
        """Name the steps, and the condition's values in the last."""
        evidence = self.condition.evidence.format_map(self.steps[-1].metrics)
        return f"{name_steps(self.first, self.last)}: {evidence}"


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about a run."""

    folder: Path
    run: RunRecord
    config: Config
    steps: tuple[StepRecord, ...]
    """Trained steps."""
    held_out: tuple[StepRecord, ...]
    """Validated steps, including step 0."""
    refits: tuple[RefitRecord, ...]
    events: tuple[str, ...]
    """Events recorded during the run, as text."""
    ending: RunEnding | None
    is_running: bool
    """Whether a coordinator holds the folder now."""
    quiet_s: float
    """Seconds since the last entry in the journal."""
    samples: tuple[SampleRow, ...]
    """Samples of some steps; see `MAX_STEPS_OF_SAMPLES`."""
    unread: str
    """Reason why samples are not examined; empty if they are."""
    logs: dict[str, tuple[str, ...]]
    """Last lines of each process's log, by name."""
    num_begun: int = 1
    """Number of times that the run was started or resumed."""
    most_learning_rate: float | None = None
    """Learning rate above which the optimizer breaks a model of this size; None if unknown."""

    @property
    def first_step(self) -> int:
        """First trained step; 1 if there is none."""
        return self.steps[0].step if self.steps else 1

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return a metric's values, with their steps; entropy only of steps with valid tokens."""
        return [
            (record.step, record.metrics[metric])
            for record in self.steps
            if metric in record.metrics and not (metric == "entropy" and record.metrics.get("num_valid_tokens") == 0)
        ]

    @property
    def is_solved(self) -> bool:
        """Whether the problems of the first steps were already solved."""
        first = [value for _, value in self.points("accuracy")[:SHORT_RUN]]
        return bool(first) and statistics.median(first) >= SOLVED

    def condition(self, metric: str) -> HealthCondition | None:
        """Return the condition that `tandem.observe.health` watches in a metric of such a run."""
        return next((each for each in conditions(self.config) if each.metric == metric), None)

    def streak(self, metric: str) -> ConditionStreak | None:
        """Return the longest streak of that condition: at least `NUM_STEPS`, or all steps of a short run."""
        condition = self.condition(metric)
        if condition is None:
            return None
        steps = [record for record in self.steps if condition.needed <= record.metrics.keys()]
        grouped = itertools.groupby(steps, lambda record: condition.holds(record.metrics))
        runs = [tuple(records) for holds, records in grouped if holds]
        longest = max(runs, key=len, default=())
        enough = NUM_STEPS if len(steps) > NUM_STEPS else max(SHORT_RUN, len(steps))
        return ConditionStreak(condition=condition, steps=longest) if len(longest) >= enough else None


def gather(folder: Path) -> RunEvidence:
    """Read the record of the run in a folder, live or not. Raises `RunFolderError` if it cannot be read."""
    with read_journal(folder) as journal:
        try:
            config = config_from_json(journal.config_json)
        except ConfigError as error:
            raise RunFolderError(f"{folder} cannot be diagnosed by another release than began it: {error}") from error
        steps, events, run = journal.steps(), journal.events(), journal.run
        refits, num_begun = journal.refits(), journal.num_begun
    times = [at for at, _, _ in events] + [record.committed_at for record in steps] + [run.created_at]
    lines = [text for _, _, text in events]
    samples, unread = _samples(folder, run.run_id)
    return RunEvidence(
        folder=folder,
        run=run,
        config=config,
        steps=tuple(record for record in steps if record.step),
        held_out=tuple(record for record in steps if any(name.startswith("val_") for name in record.metrics)),
        refits=tuple(refits),
        events=tuple(lines),
        ending=_ending(lines),
        is_running=is_taken(folder),
        quiet_s=time.time() - max(times),
        samples=samples,
        unread=unread,
        logs=_logs(folder),
        num_begun=num_begun,
        most_learning_rate=find_max_learning_rate(config),
    )


def _ending(lines: Iterable[str]) -> RunEnding | None:
    """Return how the run last ended; None if no end is recorded, as after a kill or a resume."""
    last = None
    for line in lines:
        match = ENDED.fullmatch(line)
        if match is not None:
            last = RunEnding(outcome=match["outcome"], kind=match["kind"] or "", reason=match["why"] or "")
        elif last is not None:
            last = None  # it was resumed
    return last


def _samples(folder: Path, run_id: str) -> tuple[tuple[SampleRow, ...], str]:
    """Return the recorded samples of some steps, or the reason why there are none."""
    from tandem.samples import recorded_shards

    record = folder / sample_files.FOLDER
    shards = sample_files.files(record, sample_files.SHARD)
    steps = sorted({file.step for file in shards})
    if not steps:
        return (), "no samples are recorded"
    steps_to_read = {
        steps[round(place * (len(steps) - 1) / (MAX_STEPS_OF_SAMPLES - 1))] for place in range(MAX_STEPS_OF_SAMPLES)
    }
    rows: list[SampleRow] = []
    try:
        for file in shards:
            if file.step in steps_to_read:
                columns = (*_COLUMNS, "prompt") if file.step == steps[0] else _COLUMNS  # prompts may be long
                shard_rows = recorded_shards.read_shard(file.path, run_id, columns).to_pylist()
                rows += [msgspec.convert(row, SampleRow) for row in shard_rows]
    except SamplesError as error:
        return tuple(rows), str(error)
    return tuple(rows), ""


def _logs(folder: Path) -> dict[str, tuple[str, ...]]:
    tails = {}
    for path in sorted((folder / "logs").glob("*.log")):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                text = file.read().decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith(f"{path.stem} leaves: ")]
            tails[path.stem] = tuple(lines[-_LOG_LINES:])
    return tails


# --- helpers of the checks ------------------------------------------------------------------------------------------


class MetricChange(msgspec.Struct, frozen=True, kw_only=True):
    """A metric early and late in a run: medians of a quarter of the steps each.

    A quarter has at least `_FEWEST` steps, unless that is more than half of all.
    """

    name: str
    early: float
    late: float
    last_early: int
    """Last early step."""
    first_late: int
    """First late step."""

    def __str__(self) -> str:
        """Describe the change."""
        return (
            f"{self.name} was {self.early:.4g} at first (to step {self.last_early}), and {self.late:.4g} at last "
            f"(from step {self.first_late} on)"
        )


def change(evidence: RunEvidence, metric: str, *, from_first: bool = False) -> MetricChange | None:
    """Return a metric's change over the trained steps, optionally from the first one; None if too few steps have it."""
    points = evidence.points(metric)
    if len(points) <= SHORT_RUN:
        return None
    count = max(1, len(points) // 4, min(_FEWEST, len(points) // 2))
    early, late = points[:count], points[-count:]
    if from_first:
        early = points[:1]
    return MetricChange(
        name=metric, early=_median(early), late=_median(late), last_early=early[-1][0], first_late=late[0][0]
    )


class MetricJump(msgspec.Struct, frozen=True, kw_only=True):
    """A lasting change of a metric at one step, by the means of both sides."""

    name: str
    step: int
    before: float
    after: float

    def __str__(self) -> str:
        """Describe the jump."""
        return f"{self.name} went from {self.before:.4g} to {self.after:.4g} in step {self.step}"


def jump(evidence: RunEvidence, metric: str) -> MetricJump | None:
    """Return the step at which a metric changed for good; None if too few steps have it."""
    return change_point(metric, evidence.points(metric))


def change_point(name: str, points: Sequence[tuple[int, float]], fewest: int = 1) -> MetricJump | None:
    """Return the change point of a series: the split with the smallest squared error, into parts of at least
    `fewest`."""
    values = [value for _, value in points]
    if len(values) < max(2 * fewest, SHORT_RUN + 1) or not all(map(math.isfinite, values)):
        return None
    sums = [0.0, *itertools.accumulate(values)]
    places = range(fewest, len(values) - fewest + 1)

    def measure_gain(place: int) -> float:
        """Return the squared error that splitting here saves, up to a constant."""
        return sums[place] ** 2 / place + (sums[-1] - sums[place]) ** 2 / (len(values) - place)

    place = max(places, key=measure_gain)
    after = (sums[-1] - sums[place]) / (len(values) - place)
    return MetricJump(name=name, step=points[place][0], before=sums[place] / place, after=after)


def _median(points: Sequence[tuple[int, float]]) -> float:
    return statistics.median(value for _, value in points)


def select_held_out(evidence: RunEvidence, metric: str) -> list[tuple[int, float]]:
    """Return a held-out metric's values, with their steps."""
    return [(record.step, record.metrics[metric]) for record in evidence.held_out if metric in record.metrics]


def name_steps(first: int, last: int) -> str:
    """Name a range of steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def shorten(text: str, longest: int = 200) -> str:
    """Return the beginning of foreign text, on one line."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= longest else f"{line[:longest]} …"
