"""Processes that are lost, slow, or wait for each other."""

from __future__ import annotations

import re
import statistics
from collections import Counter

from tandem.coordinator.inspect.diagnosis.evidence import Evidence, SampleRow, shortened
from tandem.coordinator.inspect.diagnosis.finding import Finding

MANY_LOSSES = 3
"""Processes that were lost, from which on the run did little else."""
SLOW = 2.0
"""Times as long as the others, in the median, from which on an engine is slow."""
IDLE_SHARE = 0.5
"""Share of an asynchronous run in which engines or trainers have nothing to do."""
STANDSTILL_S, STANDSTILL_STEPS = 60.0, 10.0
"""Seconds, and median steps, without anything new, from which on a run that still goes on stands still."""
_LOST = re.compile(r"(?P<member>\S+) is lost: (?P<why>.*)", re.DOTALL)
_OF_PROCESSES = ("ServiceLost", "DeadlineExceeded")
_LEAST_STEPS = 3
_SHOWN = 3


def lost_processes(evidence: Evidence) -> Finding | None:
    """Find processes that died, or were silent for too long."""
    lost = [found for line in evidence.events if (found := _LOST.fullmatch(line)) is not None]
    ending = evidence.ending
    ended = ending is not None and ending.kind in _OF_PROCESSES
    if not lost and not ended:
        return None
    counts = Counter(found["member"] for found in lost)
    told = ", ".join(f"{member} {count} times" if count > 1 else member for member, count in counts.most_common())
    lines = [f"{found['member']}: {shortened(found['why'], 400)}" for found in lost[-_SHOWN:]]
    if ended and ending is not None:
        lines.append(shortened(ending.why, 600))
    return Finding(
        name="lost processes",
        what=f"Processes were lost{f' and replaced: {told}' if told else ''}."
        + (" The run ended with it." if ended else ""),
        evidence=tuple(lines),
        look_at="the logs of these processes and the memory of their machine; cluster.heartbeat_timeout_s, "
        "cluster.deadlines and cluster.max_replacements",
        certainty="certain" if ended else "likely" if len(lost) >= MANY_LOSSES else "possible",
        explains=("run failed",),
    )


def slow_engine(evidence: Evidence) -> Finding | None:
    """Find an engine that makes tokens much more slowly than the others."""
    seconds: dict[str, list[float]] = {}
    steps = sorted({row.step for row in evidence.samples})
    for step in steps[1:]:  # in the first, engines warm up
        for rollout, value in _seconds_a_token([row for row in evidence.samples if row.step == step]).items():
            seconds.setdefault(rollout, []).append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items() if len(values) >= _LEAST_STEPS}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda name: medians[name])
    others = statistics.median(value for name, value in medians.items() if name != slowest)
    if medians[slowest] < SLOW * others:
        return None
    return Finding(
        name="slow engine",
        what=f"{slowest} takes {medians[slowest] / others:.1f} times as long for a token as the other engines do, and "
        "every synchronous step waits for it.",
        evidence=(
            f"{slowest}: {medians[slowest] * 1e3:.3g} ms a token and sample, in the median of {len(seconds[slowest])} "
            f"recorded steps; others: {others * 1e3:.3g} ms ({SLOW:g} times as long is the threshold)",
        ),
        look_at=f"the machine of {slowest}: what else runs there, its clock and its temperature; "
        "cluster.threads_per_process",
        certainty="likely",
        since=steps[1],
    )


def _seconds_a_token(rows: list[SampleRow]) -> dict[str, float]:
    """Return how long each engine took for a token of a sample, in the median of a step's samples."""
    by_rollout: dict[str, list[float]] = {}
    for row in rows:
        if row.response_length:
            took = (row.finished_at - row.started_at) / row.response_length
            by_rollout.setdefault(row.rollout, []).append(took)
    return {name: statistics.median(values) for name, values in by_rollout.items()}


def waiting(evidence: Evidence) -> Finding | None:
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
    return Finding(
        name="waiting",
        what=f"The run is as slow as its {whom}: {who} have nothing to do most of the time.",
        evidence=(
            f"{who} were idle {shares[kind]:.0%} of the time ({kind}_idle_s; {IDLE_SHARE:.0%} is the threshold)",
        ),
        look_at="cluster.rollouts and cluster.trainers, and coordinator report for where the time goes",
        certainty="possible",
    )


def standstill(evidence: Evidence) -> Finding | None:
    """Find a run that goes on and does nothing."""
    usual = statistics.median([record.seconds.get("total", 0.0) for record in evidence.steps] or [0.0])
    if not evidence.is_running or evidence.quiet_s < max(STANDSTILL_S, STANDSTILL_STEPS * usual):
        return None
    last = evidence.steps[-1].step if evidence.steps else 0
    return Finding(
        name="standstill",
        what=f"The run goes on, and has done nothing since step {last}.",
        evidence=(
            f"its record is {evidence.quiet_s:.0f} s old; a step takes {usual:.3g} s in the median "
            f"({STANDSTILL_STEPS:g} of them, and {STANDSTILL_S:g} s, is the threshold)",
        ),
        look_at="the logs of its processes; cluster.deadlines says how long it waits for them",
        certainty="likely",
        since=last + 1,
    )
