"""Checks for an environment that fails on samples, or takes too long."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from tandem.observe.diagnosis.evidence import RunEvidence, name_steps, shorten
from tandem.observe.diagnosis.finding import Certainty, DiagnosisFinding

FAILURE_SHARES: tuple[tuple[float, Certainty], ...] = ((0.5, "certain"), (0.1, "likely"), (0.02, "possible"))
"""Share of samples that the environment failed on, with the certainty that this is the cause."""
SLOW_SHARE = 0.5
"""Share of a step, without validation, for which samples wait for the environment."""
_LEAST_SAMPLES, _LEAST_STEPS, _TOGETHER_S = 4, 3, 0.05
"""Least samples of one length that an engine started together, least steps with such, longest time between starts."""
_ENVIRONMENT = re.compile(r"environment '")
_QUOTED = re.compile(r"(environment '[^']*')|'[^']*'|\"[^\"]*\"")


def find_failing_environment(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find samples that the environment could not score."""
    config, ending = evidence.config, evidence.ending
    if not config.declaration.rolls_out:
        return None
    texts = Counter(_cause(row.failure) for row in evidence.samples if row.failure)
    lines = [f"{count} recorded samples: {text}" for text, count in texts.most_common(2)]
    is_agent = config.agent is not None
    who, part = ("agent", "command") if is_agent else ("environment", "class")
    keys = f"{config.environment_keys}: its {part}, timeout_s and on_error"
    if ending is not None and ending.outcome == "failed" and _ENVIRONMENT.search(ending.reason):
        return DiagnosisFinding(
            name=f"failing {who}",
            what=f"The {who} failed on {'an episode' if is_agent else 'a response'}, which ended the run.",
            evidence=(shorten(ending.reason, 600), *lines),
            look_at=f"{keys} (zero and drop let the run go on)",
            certainty="certain",
            explains=("run failed",),
        )
    points = evidence.points("environment_failures")
    failed = sum(value for _, value in points)
    late = sum(value for _, value in evidence.points("environment_timeouts"))
    size = config.rollout_section.num_prompts_per_step * config.rollout_section.num_generations_per_prompt
    share = min(1.0, failed / max(1, size * len(evidence.steps)))
    certainty = next((certainty for least, certainty in FAILURE_SHARES if share >= least), None)
    if certainty is None:
        return None
    return DiagnosisFinding(
        name=f"failing {who}",
        what=f"The {who} {'failed on' if is_agent else 'could not score'} {share:.0%} of the samples"
        + (", mostly because it took too long." if late > failed / 2 else "."),
        evidence=(
            f"{failed:.0f} failures in {name_steps(points[0][0], points[-1][0])}, {late:.0f} of them timeouts "
            f"({FAILURE_SHARES[-1][0]:.0%} of all samples is the threshold)",
            *lines,
        ),
        look_at=f"{keys}, and logs/rollout-0.log",
        certainty=certainty,
        since=points[0][0],
        explains=("equal rewards", "groups without spread", "no gradient", "no progress"),
    )


def find_slow_environment(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find an environment that scores one response after another, which takes most of a step.

    An engine generates samples of equal length that it started together in equal times; any difference is spent in the
    environment. That holds only if no sample waits for a free slot in the engine, which is not recorded.
    """
    config = evidence.config
    if not config.declaration.rolls_out or config.agent is not None or config.max_trajectory_age_steps:
        return None
    records = {record.step: record for record in evidence.steps}
    waits = []
    for step in sorted({row.step for row in evidence.samples} & records.keys()):
        at_once = Counter(row.rollout for row in evidence.samples if row.step == step)
        if max(at_once.values()) > config.policy.generation.width:
            continue
        begun: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in evidence.samples:
            if row.step == step:
                begun[row.rollout, row.response_length].append((row.started_at, row.finished_at))
        alike = [each for each in begun.values() if max(each)[0] - min(each)[0] <= _TOGETHER_S]
        ends = [[end for _, end in each] for each in alike if len(each) >= _LEAST_SAMPLES]
        seconds = records[step].seconds
        total = seconds.get("total", 0.0) - seconds.get("validation", 0.0)
        if ends and total > 0:
            waits.append((step, max(max(each) - min(each) for each in ends), total))
    slow = [step for step, wait, total in waits if wait >= SLOW_SHARE * total]
    if len(slow) < max(_LEAST_STEPS, len(waits) / 2):
        return None
    wait, total = (statistics.median(each[column] for each in waits if each[0] in slow) for column in (1, 2))
    return DiagnosisFinding(
        name="slow environment",
        what="Most of a step is spent in the environment: generated samples wait to be scored.",
        evidence=(
            f"{len(slow)} of {len(waits)} steps, step {slow[0]} the first: samples of one length that started "
            f"together ended up to {wait:.3g} s apart; a step takes "
            f"{total:.3g} s without validation ({SLOW_SHARE:.0%} is the threshold)",
        ),
        look_at=f"{evidence.config.environment_keys}: its class and num_workers",
        certainty="possible" if config.policy.generation.kind.is_on_gpus else "likely",
        since=slow[0],
        explains=("slow engine", "became slow"),
    )


def drop_restated(evidence: RunEvidence, findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Leave out findings that only repeat that an agent fails: it gives no reward, and nothing else is wrong."""
    agent = next((each for each in findings if each.name == "failing agent" and each.certainty == "certain"), None)
    return [each for each in findings if agent is None or each.name not in agent.explains or each.since < agent.since]


def _cause(failure: str) -> str:
    """Return a failure without the parts that differ between samples."""
    return shorten(_QUOTED.sub(lambda match: match[1] or "…", failure), 300)
