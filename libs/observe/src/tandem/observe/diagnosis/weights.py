"""Checks for damaged weights, weights that training does not change, and how the run ended."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from tandem.observe.diagnosis.evidence import DiagnosisFinding, RunEvidence, name_steps, shorten
from tandem.observe.health import learning_rate_keys

NUM_REPAIRS = 3
"""Repeated refits of one engine from which its hardware or link is suspected."""
NUM_EQUAL = 3
"""Consecutive versions with the same digest from which training changes nothing."""
_NOT_HELD = re.compile(r"does not hold version (\d+)")
_OF_REFITS = re.compile(r"failed while (refitting|verifying|attesting|copying weights|committing)")
_SHOWN = 3


def find_damaged_weights(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find engines, or trainers' copies, that did not hold the trained weights."""
    repaired = [
        (record.version, engine, reason) for record in evidence.refits for engine, reason in record.quarantined.items()
    ]
    lines = [
        f"version {version}: {engine} was quarantined and refitted: {reason}" for version, engine, reason in repaired
    ]
    shown = [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
    ending = evidence.ending
    if ending is not None and (_NOT_HELD.search(ending.reason) or _OF_REFITS.search(ending.reason)):
        version = _NOT_HELD.search(ending.reason)
        return DiagnosisFinding(
            name="damaged weights",
            what="An engine did not hold the trained weights, even after a second transfer, so that the run "
            "ended before any of its samples was trained on.",
            evidence=(ending.reason, *shown),
            look_at="the memory and the link of the named process, and refit.alias; refit.verify found it",
            certainty="certain",
            since=int(version[1]) + 1 if version else evidence.first_step,
            explains=("run failed",),
        )
    if not repaired:
        return None
    engine, count = Counter(engine for _, engine, _ in repaired).most_common(1)[0]
    often = count >= NUM_REPAIRS
    return DiagnosisFinding(
        name="damaged weights",
        what=f"Engines did not hold the trained weights {len(repaired)} times; they were repaired before any of "
        f"their samples was trained on{f', {engine} {count} times' if often else ''}.",
        evidence=tuple(shown),
        look_at=f"the memory and the link of {engine}, and its log",
        certainty="likely" if often else "possible",
        since=repaired[0][0] + 1,
    )


def find_damaged_checkpoint(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a checkpoint with files that differ from what was written."""
    ending = evidence.ending
    if ending is None or ending.kind != "DamagedCheckpoint":
        return None
    return DiagnosisFinding(
        name="damaged checkpoint",
        what="The checkpoint that the run was to resume from differs from what was written.",
        evidence=(ending.reason,),
        look_at="the disk of checkpointing.checkpoint_dir; coordinator up CONFIG --resume --from STEP resumes from "
        "another checkpoint",
        certainty="certain",
        explains=("run failed",),
    )


def find_unchanged_weights(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find versions of weights that are equal to the bit despite steps between them."""
    digests = [(r.version, r.digest) for r in evidence.refits if r.verify == "full" and r.digest]
    runs = [[version for version, _ in group] for _, group in itertools.groupby(digests, lambda pair: pair[1])]
    same = max((sorted({*versions}) for versions in runs), key=len, default=[])
    steps = [record for record in evidence.steps if record.version in same[1:]]
    moved = [r for r in steps if r.metrics.get("learning_rate", 0) > 0 and r.metrics.get("grad_norm", 0) > 0]
    if len(same) < NUM_EQUAL or not moved:
        return None
    last = moved[-1].metrics
    return DiagnosisFinding(
        name="unchanged weights",
        what="Steps were taken, but the weights stayed the same to the bit: updates are smaller than the "
        "precision of the weights.",
        evidence=(
            f"versions {same[0]} to {same[-1]} have one digest ({NUM_EQUAL} are enough to tell)",
            f"step {moved[-1].step}: learning rate {last['learning_rate']:g}, gradient norm {last['grad_norm']:.4g}",
        ),
        look_at=f"{learning_rate_keys(evidence.config)}, and policy.precision",
        certainty="likely",
        since=same[0] + 1,
    )


def find_run_failed(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find the error that ended the run, whatever it is."""
    ending = evidence.ending
    if ending is None or ending.outcome != "failed":
        return None
    named = next((name for name in evidence.logs if ending.reason.startswith(f"{name} ")), "")
    log = [f"last in logs/{named}.log: {shorten(line)}" for line in evidence.logs.get(named, ())[-1:]]
    last_step = evidence.steps[-1].step if evidence.steps else 0
    return DiagnosisFinding(
        name="run failed",
        what=f"The run ended with an error after step {last_step} ({ending.kind}).",
        evidence=(shorten(ending.reason, 600), *log),
        look_at=f"logs/{named}.log" if named else "what it says",
        certainty="certain",
        since=last_step + 1,
    )


def find_killed(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a run without a recorded end: its coordinator was killed, or its machine went down."""
    last = evidence.steps[-1].step if evidence.steps else 0
    if evidence.ending is not None or evidence.is_running or last >= (planned_steps(evidence) or last):
        return None
    return DiagnosisFinding(
        name="killed",
        what=f"The run stopped after step {last} without a recorded end: its coordinator was killed, or its "
        "machine went down.",
        evidence=(
            f"{name_steps(1, last)} of {planned_steps(evidence)} are done" if last else "no step is done",
            "no process has the run folder now",
        ),
        look_at="the memory of the machine, and what may end jobs; coordinator up CONFIG --resume continues the run",
        certainty="certain",
        since=last + 1,
    )


def planned_steps(evidence: RunEvidence) -> int | None:
    """Return the last planned step of the run; None if that depends on its data."""
    config = evidence.config
    if config.replay is not None:
        return config.replay.to_step
    return config.algorithm_section.max_num_steps if config.declaration.rolls_out else None
