"""Checks for processes that are lost, slow, or wait for each other."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from tandem.observe.diagnosis.evidence import (
    DiagnosisFinding,
    MetricJump,
    RunEvidence,
    SampleRow,
    change_point,
    shorten,
)

MANY_LOSSES = 3
"""Number of lost processes from which the run did little else."""
SLOW = 2.0
"""Median time of a slow engine, as a multiple of the others'."""
MOST_STEPS = 0.75
"""Share of steps in which one rank must be the slowest; in a healthy run, ranks alternate."""
LOST_SHARE = 0.1
"""Share of a run's time that a slow rank must cost."""
STAYS_SLOW = 0.8
"""Share of steps, since it became slow, in which a process must be slow, and before, must not be."""
IDLE_SHARE = 0.5
"""Share of an asynchronous run in which engines or trainers are idle."""
STANDSTILL_S, STANDSTILL_STEPS = 60.0, 10.0
"""Seconds, and median steps, without anything new, after which a live run counts as stalled."""
_LOST = re.compile(r"(?P<name>\S+) is lost: (?P<why>.*)", re.DOTALL)
_OF_PROCESSES = ("ServiceLost", "DeadlineExceeded")
_LEAST_STEPS = 3
_LEAST_OF_A_SIDE = 4
"""Least steps before a process became slow, and after."""
_SHOWN = 3
Points: TypeAlias = list[tuple[int, float]]
"""Values with their steps."""


def find_lost_processes(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find processes that died, or were silent for too long."""
    lost = [match for line in evidence.events if (match := _LOST.fullmatch(line)) is not None]
    ending = evidence.ending
    ended = ending is not None and ending.kind in _OF_PROCESSES
    if not lost and not ended:
        return None
    counts = Counter(match["name"] for match in lost)
    names = ", ".join(f"{name} {count} times" if count > 1 else name for name, count in counts.most_common())
    lines = [f"{match['name']}: {shorten(match['why'], 400)}" for match in lost[-_SHOWN:]]
    if ended and ending is not None:
        lines.append(shorten(ending.reason, 600))
    return DiagnosisFinding(
        name="lost processes",
        what=f"Processes were lost{f' and replaced: {names}' if names else ''}."
        + (" The run ended with it." if ended else ""),
        evidence=tuple(lines),
        look_at="the logs of these processes and the memory of their machine; cluster.heartbeat_timeout_s, "
        "cluster.deadlines and cluster.max_replacements",
        certainty="certain" if ended else "likely" if len(lost) >= MANY_LOSSES else "possible",
        explains=("run failed",),
    )


def find_slow_engine(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find an engine that generates much more slowly than the others."""
    seconds: dict[str, list[float]] = {}
    steps = sorted({row.step for row in evidence.samples})
    for step in steps[1:]:  # engines warm up in the first step
        for rollout, value in _seconds_a_token([row for row in evidence.samples if row.step == step]).items():
            seconds.setdefault(rollout, []).append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items() if len(values) >= _LEAST_STEPS}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda name: medians[name])
    others_s = statistics.median(value for name, value in medians.items() if name != slowest)
    if medians[slowest] < SLOW * others_s:
        return None
    return DiagnosisFinding(
        name="slow engine",
        what=f"{slowest} takes {_times(medians[slowest], others_s)} as long for a token as the other engines do, and "
        "every synchronous step waits for it.",
        evidence=(
            f"{slowest}: {medians[slowest] * 1e3:.3g} ms a token and sample, in the median of {len(seconds[slowest])} "
            f"recorded steps; others: {others_s * 1e3:.3g} ms ({SLOW:g} times as long is the threshold)",
        ),
        look_at=f"the machine of {slowest}: what else runs there, its clock and its temperature; "
        "cluster.threads_per_process",
        certainty="likely",
        since=steps[1],
    )


def _times(slow: float, reference: float) -> str:
    return f"{slow / reference:.1f} times" if reference else "many times"


def _seconds_a_token(rows: list[SampleRow]) -> dict[str, float]:
    """Return each engine's seconds per token, in the median of a step's samples."""
    by_rollout: dict[str, list[float]] = {}
    for row in rows:
        if row.response_length:
            took = (row.finished_at - row.started_at) / row.response_length
            by_rollout.setdefault(row.rollout, []).append(took)
    return {name: statistics.median(values) for name, values in by_rollout.items()}


def find_slow_trainer(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a trainer rank that takes much longer for its own work than the others, which wait for it."""
    steps = [record for record in evidence.steps[1:] if "slowest_trainer" in record.metrics]  # the first step is cold
    if len(steps) < _LEAST_STEPS:
        return None
    (rank, _), *_ = Counter(int(record.metrics["slowest_trainer"]) for record in steps).most_common(1)
    slow = [record for record in steps if record.metrics["slowest_trainer"] == rank]
    rank_s, others_s, waited = (
        statistics.median(record.metrics[name] for record in slow)
        for name in ("trainer_compute_max_s", "trainer_compute_median_s", "trainer_waited_max_s")
    )
    total = sum(record.seconds.get("total", 0.0) for record in steps)
    lost = sum(r.metrics["trainer_compute_max_s"] - r.metrics["trainer_compute_median_s"] for r in slow)
    if len(slow) < MOST_STEPS * len(steps) or rank_s < SLOW * others_s or lost < LOST_SHARE * total:
        return None
    name, settings = f"trainer-{rank}", evidence.config.policy.megatron_cfg
    stages = settings.pipeline_model_parallel_size if settings.enabled else 1
    return DiagnosisFinding(
        name="slow trainer rank",
        what=f"{name} takes {_times(rank_s, others_s)} as long for its own work as the other ranks do, and all of them "
        "wait for it in every step.",
        evidence=(
            f"{name}: {rank_s:.3g} s a step, in the median of the {len(slow)} of {len(steps)} steps in which it was "
            f"the slowest; others: {others_s:.3g} s ({SLOW:g} times as long is the threshold)",
            f"others waited up to {waited:.3g} s a step in collective operations; if it were as fast, "
            f"{lost / total:.0%} of all the time would be saved",
        ),
        look_at=f"the machine of {name}: what else runs there, its clock and its temperature; "
        "cluster.threads_per_process"
        + (
            ", and policy.megatron_cfg.pipeline_model_parallel_size: stages may have unequal numbers of layers"
            if stages > 1
            else ""
        ),
        certainty="likely",
        since=slow[0].step,
    )


def find_became_slow(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find an engine, or trainers, whose own work became slow during a run and stayed slow.

    A machine that becomes busy slows all of its processes at once, so that a process must be slow beside the others of
    the same steps, and without the time in which it waited for a free processor.
    """
    courses = _courses(evidence)
    knows_queue = any("trainer_queued_per_s" in record.metrics for record in evidence.steps)
    slowed, beside = {}, {}
    for name, points in courses.items():
        of_trainer = name.startswith("trainer-")
        slowing = _find_slowdown(name, _subtract_queue(evidence, points) if of_trainer else points)
        if slowing is None:
            continue
        others_ratio = _slowing_of_others(evidence, courses, name, slowing.step)
        if slowing.after < SLOW * slowing.before * (others_ratio or 1.0):
            continue
        slowed[name] = slowing
        beside[name] = (
            "" if others_ratio is None else f"; other processes took {others_ratio:.2g} times as long from then on"
        )
    if not slowed:
        return None
    name, at = min(slowed.items(), key=lambda item: item[1].step)
    is_alone = not beside[name] and not (knows_queue and name.startswith("trainer-"))
    return DiagnosisFinding(
        name="became slow",
        what=f"{name} became slow in step {at.step}, and stayed so.",
        evidence=(
            *(
                f"{each}: {slowing.before * 1e3:.3g} ms a token before step {slowing.step}, {slowing.after * 1e3:.3g} "
                f"ms from it on ({SLOW:g} times as long is the threshold){beside[each]}"
                for each, slowing in slowed.items()
            ),
            *(["nothing in the record tells it from a machine that became busy"] if is_alone else []),
        ),
        look_at=f"the machine of {name} at that time: what else began to run there, its clock, temperature and memory; "
        f"the log of {name}",
        certainty="possible" if is_alone else "likely",
        since=at.step,
    )


def _subtract_queue(evidence: RunEvidence, points: Points) -> Points:
    """Return a trainer's seconds without those in which it waited for a free processor."""
    queued = {record.step: record.metrics.get("trainer_queued_per_s", 0.0) for record in evidence.steps}
    return [(step, value * (1 - queued[step])) for step, value in points]


def _slowing_of_others(evidence: RunEvidence, courses: Mapping[str, Points], name: str, step: int) -> float | None:
    """Return how many times as long the other processes took from a step on, in the median; None without others."""
    other_courses = [points for each, points in courses.items() if each != name]
    if name.startswith("trainer-"):
        other_courses.append(
            [
                (record.step, record.metrics["trainer_compute_median_s"] / record.metrics["num_valid_tokens"])
                for record in evidence.steps[1:]
                if "trainer_compute_median_s" in record.metrics and record.metrics.get("num_valid_tokens")
            ]
        )
    ratios = []
    for points in other_courses:
        before = [value for at, value in points if at < step]
        after = [value for at, value in points if at >= step]
        if before and after and statistics.median(before) > 0:
            ratios.append(statistics.median(after) / statistics.median(before))
    return max(1.0, statistics.median_low(ratios)) if ratios else None


def _courses(evidence: RunEvidence) -> dict[str, Points]:
    """Return seconds per token by step, without the cold first one, for each engine and the slowest trainer rank."""
    courses: dict[str, Points] = {}
    for step in sorted({row.step for row in evidence.samples})[1:]:
        rows = [row for row in evidence.samples if row.step == step]
        for rollout, value in _seconds_a_token(rows).items():
            courses.setdefault(rollout, []).append((step, value))
    ranks = [record for record in evidence.steps[1:] if record.metrics.get("num_valid_tokens")]
    slowest = [int(record.metrics["slowest_trainer"]) for record in ranks if "slowest_trainer" in record.metrics]
    if slowest:
        # A rank that became slow is the slowest in most of the last steps.
        (rank, _), *_ = Counter(slowest[-max(_LEAST_OF_A_SIDE, len(slowest) // 4) :]).most_common(1)
        courses[f"trainer-{rank}"] = [
            (record.step, record.metrics["trainer_compute_max_s"] / record.metrics["num_valid_tokens"])
            for record in ranks
            if "trainer_compute_max_s" in record.metrics
        ]
    else:
        courses["trainer-0"] = [
            (record.step, record.seconds["policy_training"] / record.metrics["num_valid_tokens"])
            for record in ranks
            if record.seconds.get("policy_training")
        ]
    return courses


def _find_slowdown(name: str, points: Points) -> MetricJump | None:
    """Return the step from which nearly every step takes `SLOW` times as long; None if there is none."""
    level_shift = change_point(name, points, _LEAST_OF_A_SIDE)
    if level_shift is None:
        return None
    before = [value for step, value in points if step < level_shift.step]
    after = [value for step, value in points if step >= level_shift.step]
    stays = sum(value >= SLOW * statistics.median(before) for value in after) >= STAYS_SLOW * len(after)
    calm = sum(value >= SLOW * statistics.median(before) for value in before) <= (1 - STAYS_SLOW) * len(before)
    if not (stays and calm and statistics.median(before) > 0):
        return None
    return MetricJump(
        name=name, step=level_shift.step, before=statistics.median(before), after=statistics.median(after)
    )


def find_waiting(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find engines or trainers of an asynchronous run that wait for the others most of the time."""
    if not evidence.config.max_trajectory_age_steps:
        return None
    total = sum(record.seconds.get("total", 0.0) for record in evidence.steps[1:])
    shares = {
        kind: sum(record.metrics.get(f"{kind}_idle_s", 0.0) for record in evidence.steps[1:]) / total
        for kind in ("engine", "trainer")
        if total
    }
    kind = max(shares, key=lambda kind: shares[kind], default="")
    if not kind or shares[kind] < IDLE_SHARE:
        return None
    who, whom = ("engines", "trainers") if kind == "engine" else ("trainers", "engines")
    return DiagnosisFinding(
        name="waiting",
        what=f"The run is only as fast as its {whom}: {who} have nothing to do most of the time.",
        evidence=(
            f"{who} were idle {shares[kind]:.0%} of the time ({kind}_idle_s; {IDLE_SHARE:.0%} is the threshold)",
        ),
        look_at="cluster.rollouts and cluster.trainers, and coordinator report for where the time goes",
        certainty="possible",
    )


def find_standstill(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a live run that does nothing."""
    usual = statistics.median([record.seconds.get("total", 0.0) for record in evidence.steps] or [0.0])
    if not evidence.is_running or evidence.quiet_s < max(STANDSTILL_S, STANDSTILL_STEPS * usual):
        return None
    last = evidence.steps[-1].step if evidence.steps else 0
    return DiagnosisFinding(
        name="standstill",
        what=f"The run is live, but has done nothing since step {last}.",
        evidence=(
            f"its record is {evidence.quiet_s:.0f} s old; a step takes {usual:.3g} s in the median "
            f"({STANDSTILL_STEPS:g} of them, and {STANDSTILL_S:g} s, is the threshold)",
        ),
        look_at="the logs of its processes; cluster.deadlines says how long it waits for them",
        certainty="likely",
        since=last + 1,
    )
