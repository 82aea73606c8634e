"""Diagnosis of a run: why it collapsed or stalled, from its record.

`gather` reads the record once, and each of `CHECKS` looks for one cause in it. `diagnose` sorts the findings: causes
before consequences, certain before likely. Checks are pure. They use the conditions of the warnings that
`tandem.observe.health` gives while a run is live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.observe.diagnosis import agreement, data, environment, optimisation, processes, responses, rewards, weights
from tandem.observe.diagnosis.evidence import Evidence, gather
from tandem.observe.diagnosis.finding import CERTAINTIES, Finding


class Check(NamedTuple):
    """A cause to look for, in words, and the function that finds it."""

    what: str
    find: Callable[[Evidence], Finding | None]


CHECKS = (
    Check("damaged weights", weights.damaged_weights),
    Check("damaged checkpoints", weights.damaged_checkpoint),
    Check("an environment that fails", environment.failing_environment),
    Check("a learning rate of 0", optimisation.zero_learning_rate),
    Check("a learning rate that is too small", optimisation.small_rate),
    Check("a temperature that is too low", responses.low_temperature),
    Check("a clip range that is too narrow", optimisation.narrow_clip),
    Check("a KL penalty that is too large", optimisation.large_penalty),
    Check("numbers out of all proportion", optimisation.outlying_steps),
    Check("a learning rate that is too large", optimisation.large_steps),
    Check("dropout that hides what was learned", optimisation.dropout),
    Check("a reference that is another model", agreement.wrong_reference),
    Check("engines and trainers that disagree", agreement.disagreement),
    Check("stale samples", agreement.stale_samples),
    Check("weights that do not change", weights.unchanged_weights),
    Check("a tokenizer that is not the model's", data.another_tokenizer),
    Check("prompts that tell the answer", data.leaked_answer),
    Check("stop strings that come too early", responses.early_stop),
    Check("rewards that miss right answers, or go to wrong ones", rewards.against_the_answers),
    Check("one answer to everything", rewards.one_answer),
    Check("growing responses", responses.growing_responses),
    Check("truncated responses", responses.truncated_responses),
    Check("low entropy", optimisation.low_entropy),
    Check("equal rewards", rewards.equal_rewards),
    Check("groups without spread", rewards.groups_without_spread),
    Check("shrinking responses", responses.shrinking_responses),
    Check("steps without a gradient", optimisation.zero_gradient),
    Check("rewards that rise while accuracy falls", rewards.reward_without_accuracy),
    Check("held-out accuracy that does not rise", data.no_progress),
    Check("repeated problems", data.repeated_problems),
    Check("overfitting", data.overfitting),
    Check("lost processes", processes.lost_processes),
    Check("a slow environment", environment.slow_environment),
    Check("a slow engine", processes.slow_engine),
    Check("a slow trainer rank", processes.slow_trainer),
    Check("a process that became slow", processes.became_slow),
    Check("groups thrown away for their age", agreement.groups_thrown_away),
    Check("engines or trainers that wait", processes.waiting),
    Check("a standstill", processes.standstill),
    Check("a run that was killed", weights.killed),
    Check("other errors", weights.run_failed),
)
"""Checks: causes before consequences, and before mere losses of time."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings about a run."""

    run: str
    """Folder of the run."""
    run_id: str
    course: str
    """How far the run came, and how it ended."""
    findings: tuple[Finding, ...]
    """Findings, the most likely cause first."""
    looked_for: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    """Parts of the record that could not be examined."""


def diagnose(folder: Path) -> Diagnosis:
    """Diagnose the run in a folder. Raises `RunFolderError` if its record cannot be read."""
    evidence = gather(folder)
    found = [finding for check in CHECKS if (finding := check.find(evidence)) is not None]
    return Diagnosis(
        run=str(folder),
        run_id=evidence.run.run_id,
        course=_course(evidence),
        findings=tuple(_in_order(environment.without_restated(evidence, found))),
        looked_for=tuple(check.what for check in CHECKS),
        not_looked_at=(evidence.unread,) if evidence.unread and evidence.config.generates else (),
    )


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    """Sort causes by certainty, before their consequences."""
    told = []
    for finding in found:
        causes = [c for c in found if finding.name in c.explains and c.since <= finding.since]
        told.append(msgspec.structs.replace(finding, explained_by=causes[0].name if causes else ""))
    return sorted(told, key=lambda finding: (bool(finding.explained_by), CERTAINTIES.index(finding.certainty)))


def _course(evidence: Evidence) -> str:
    """Describe how far a run came and how it ended."""
    last = evidence.steps[-1].step if evidence.steps else 0
    planned = weights.planned_steps(evidence)
    steps = f"{last} of {planned} steps" if planned else f"{last} steps"
    if evidence.ending is not None:
        how = evidence.ending.outcome
    else:
        how = "is going on" if evidence.is_running else "no end is recorded"
    parts = [f"{evidence.config.declaration.title}, {steps}, {how}"]
    for name, of in (("reward", max), ("loss", min)):
        points = evidence.points(name)
        if points and (name == "reward" or not evidence.config.declaration.rolls_out):
            step, best = of(points, key=lambda point: point[1])
            parts.append(
                f"{name} {points[0][1]:.4g} at first, {best:.4g} at best (step {step}), {points[-1][1]:.4g} at last"
            )
    return "; ".join(parts)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Format a diagnosis as text."""
    lines = [f"{diagnosis.run}: {diagnosis.course}"]
    for number, finding in enumerate(diagnosis.findings, 1):
        follows = f", follows from: {finding.explained_by}" if finding.explained_by else ""
        lines += ["", f"{number}. {finding.name} ({finding.certainty}{follows})", f"   {finding.what}"]
        lines += [f"   - {line}" for line in finding.evidence]
        lines.append(f"   look at {finding.look_at}")
    if not diagnosis.findings:
        lines += ["", "nothing found"]
    lines += ["", f"looked for: {', '.join(diagnosis.looked_for)}"]
    lines += [f"not looked at: {what}" for what in diagnosis.not_looked_at]
    return "\n".join(lines)
