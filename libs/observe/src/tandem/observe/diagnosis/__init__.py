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

from tandem.observe.diagnosis import agreement, data, optimisation, processes, rewards
from tandem.observe.diagnosis.evidence import CERTAINTIES, DiagnosisFinding, RunEvidence, gather


class CauseCheck(NamedTuple):
    """A cause to look for, in words, and the function that finds it."""

    cause: str
    find: Callable[[RunEvidence], DiagnosisFinding | None]


CHECKS = (
    CauseCheck("damaged weights", agreement.find_damaged_weights),
    CauseCheck("damaged checkpoints", agreement.find_damaged_checkpoint),
    CauseCheck("an environment that fails", rewards.find_failing_environment),
    CauseCheck("a learning rate of 0", optimisation.find_zero_learning_rate),
    CauseCheck("a learning rate that is too small", optimisation.find_small_rate),
    CauseCheck("a temperature that is too low", data.find_low_temperature),
    CauseCheck("a clip range that is too narrow", optimisation.find_narrow_clip),
    CauseCheck("a KL penalty that is too large", optimisation.find_large_penalty),
    CauseCheck("numbers out of all proportion", optimisation.find_outlying_steps),
    CauseCheck("a learning rate that is too large", optimisation.find_large_steps),
    CauseCheck("dropout that hides what was learned", optimisation.find_dropout),
    CauseCheck("a reference that is another model", agreement.find_wrong_reference),
    CauseCheck("engines and trainers that disagree", agreement.find_disagreement),
    CauseCheck("stale samples", agreement.find_stale_samples),
    CauseCheck("weights that do not change", agreement.find_unchanged_weights),
    CauseCheck("a tokenizer that is not the model's", data.find_another_tokenizer),
    CauseCheck("prompts that tell the answer", data.find_leaked_answer),
    CauseCheck("stop strings that come too early", data.find_early_stop),
    CauseCheck("rewards that miss right answers, or go to wrong ones", rewards.find_against_the_answers),
    CauseCheck("one answer to everything", rewards.find_one_answer),
    CauseCheck("growing responses", data.find_growing_responses),
    CauseCheck("truncated responses", data.find_truncated_responses),
    CauseCheck("low entropy", optimisation.find_low_entropy),
    CauseCheck("equal rewards", rewards.find_equal_rewards),
    CauseCheck("groups without spread", rewards.find_groups_without_spread),
    CauseCheck("shrinking responses", data.find_shrinking_responses),
    CauseCheck("steps without a gradient", optimisation.find_zero_gradient),
    CauseCheck("rewards that rise while accuracy falls", rewards.find_reward_without_accuracy),
    CauseCheck("held-out accuracy that does not rise", data.find_no_progress),
    CauseCheck("repeated problems", data.find_repeated_problems),
    CauseCheck("overfitting", data.find_overfitting),
    CauseCheck("lost processes", processes.find_lost_processes),
    CauseCheck("a slow environment", rewards.find_slow_environment),
    CauseCheck("a slow engine", processes.find_slow_engine),
    CauseCheck("a slow trainer rank", processes.find_slow_trainer),
    CauseCheck("a process that became slow", processes.find_became_slow),
    CauseCheck("groups thrown away for their age", agreement.find_groups_thrown_away),
    CauseCheck("engines or trainers that wait", processes.find_waiting),
    CauseCheck("a standstill", processes.find_standstill),
    CauseCheck("a run that was killed", agreement.find_killed),
    CauseCheck("other errors", agreement.find_run_failed),
)
"""Checks: causes before consequences, and before mere losses of time."""


class RunDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings about a run."""

    run: str
    """Folder of the run."""
    run_id: str
    course: str
    """How far the run came, and how it ended."""
    findings: tuple[DiagnosisFinding, ...]
    """Findings, the most likely cause first."""
    looked_for: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    """Parts of the record that could not be examined."""


def diagnose(folder: Path) -> RunDiagnosis:
    """Diagnose the run in a folder. Raises `RunFolderError` if its record cannot be read."""
    evidence = gather(folder)
    findings = [finding for check in CHECKS if (finding := check.find(evidence)) is not None]
    return RunDiagnosis(
        run=str(folder),
        run_id=evidence.run.run_id,
        course=_course(evidence),
        findings=tuple(_sort_findings(rewards.drop_restated(evidence, findings))),
        looked_for=tuple(check.cause for check in CHECKS),
        not_looked_at=(evidence.unread,) if evidence.unread and evidence.config.generates else (),
    )


def _sort_findings(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Sort causes by certainty, before their consequences."""
    explained_findings = []
    for finding in findings:
        causes = [c for c in findings if finding.name in c.explains and c.since <= finding.since]
        explained_findings.append(msgspec.structs.replace(finding, explained_by=causes[0].name if causes else ""))
    return sorted(
        explained_findings, key=lambda finding: (bool(finding.explained_by), CERTAINTIES.index(finding.certainty))
    )


def _course(evidence: RunEvidence) -> str:
    """Describe how far a run came and how it ended."""
    last = evidence.steps[-1].step if evidence.steps else 0
    planned = agreement.planned_steps(evidence)
    steps = f"{last} of {planned} steps" if planned else f"{last} steps"
    if evidence.ending is not None:
        outcome = evidence.ending.outcome
    else:
        outcome = "is going on" if evidence.is_running else "no end is recorded"
    parts = [f"{evidence.config.declaration.title}, {steps}, {outcome}"]
    for name, of in (("reward", max), ("loss", min)):
        points = evidence.points(name)
        if points and (name == "reward" or not evidence.config.declaration.rolls_out):
            step, best = of(points, key=lambda point: point[1])
            parts.append(
                f"{name} {points[0][1]:.4g} at first, {best:.4g} at best (step {step}), {points[-1][1]:.4g} at last"
            )
    return "; ".join(parts)


def format_diagnosis(diagnosis: RunDiagnosis) -> str:
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
    lines += [f"not looked at: {part}" for part in diagnosis.not_looked_at]
    return "\n".join(lines)
