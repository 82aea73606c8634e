"""Checks for engines and trainers that disagree, damaged or unchanged weights, and how the run ended."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Sequence

from tandem.observe.diagnosis.evidence import Certainty, DiagnosisFinding, RunEvidence, change, name_steps, shorten
from tandem.observe.health import HIGH_PROBABILITY_ERROR, learning_rate_keys
from tandem.observe.run_folder.journal import StepRecord

_GAP = "token_mult_prob_error"
FAR_AT_ONCE, BEYOND_MOVEMENT = 0.2, 10.0
"""Nats per token from the reference that a policy does not move in one step, and least ratio of such a distance to
what the policy was seen to move."""
SAME_ENTROPY, LEAST_ENTROPY = 0.3, 0.1
"""Relative change of entropy between two steps of a policy that stayed what it was; of entropies of at least this."""
TOO_OLD_SHARE = 0.1
"""Share of the generated groups that were discarded because of their age, from which it is reported."""
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


def find_disagreement(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find engines and trainers that disagree on token probabilities with the same weights."""
    fresh = [r for r in evidence.steps if _GAP in r.metrics and r.metrics.get("max_trajectory_age", 0) == 0]
    high = [r for r in fresh if not r.metrics[_GAP] <= HIGH_PROBABILITY_ERROR]
    streak = evidence.streak(_GAP)
    if not high or len(high) * 2 < len(fresh) or (streak is None and len(fresh) == len(evidence.steps)):
        return None
    worst = max(high, key=lambda record: record.metrics[_GAP])
    verify = evidence.config.refit.verify
    lines = [
        f"{_GAP} was above {HIGH_PROBABILITY_ERROR:g} in {len(high)} of the {len(fresh)} steps with samples of "
        f"the newest weights, {worst.metrics[_GAP]:.4g} in step {worst.step}; 1.01 to 1.02 is usual",
    ]
    if high[0].step == evidence.first_step:
        lines.append("it is so from the first step on, before any training, so learning is not the cause")
    if verify != "full":
        lines.append(f"refit.verify is {verify}: it is not verified that engines hold the trained weights")
    condition = evidence.condition(_GAP)
    condition_keys = condition.look_at if condition else ""
    return DiagnosisFinding(
        name="engine and trainer disagree",
        what="With the same weights, engines and trainers give tokens different probabilities, so samples come from "
        "another policy than the trained one.",
        evidence=tuple(lines),
        look_at=condition_keys if verify == "full" else f"refit.verify, {condition_keys}",
        certainty="likely",
        since=high[0].step,
        explains=("stale samples",),
    )


def find_stale_samples(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find samples of older weights that are trained on as if they were of the newest."""
    age, config = evidence.config.max_trajectory_age_steps, evidence.config
    old = [r for r in evidence.steps if r.metrics.get("avg_trajectory_age", 0) > 0 and _GAP in r.metrics]
    far = [r for r in old if not r.metrics[_GAP] <= HIGH_PROBABILITY_ERROR]
    if not age or len(far) * 2 < len(old) or not far:
        return None
    worst = max(far, key=lambda record: record.metrics[_GAP])
    corrected = config.loss_fn.use_importance_sampling_correction
    ages = statistics.fmean(record.metrics["avg_trajectory_age"] for record in far)
    lines = [
        f"samples were {ages:.2g} steps old on average; {age} are allowed",
        f"the weights moved so much meanwhile that {_GAP} was above {HIGH_PROBABILITY_ERROR:g} in {len(far)} of "
        f"{len(old)} steps with such samples, {worst.metrics[_GAP]:.4g} in step {worst.step}",
        f"loss_fn.use_importance_sampling_correction is {str(corrected).lower()}",
    ]
    return DiagnosisFinding(
        name="stale samples",
        what="Samples come from older weights than those in training"
        + (", too different for their correction to help." if corrected else ", and nothing corrects for it."),
        evidence=tuple(lines),
        look_at=f"{config.asynchronous_key}.max_trajectory_age_steps, {learning_rate_keys(config)}, and "
        + (
            "loss_fn.truncated_importance_sampling_ratio" if corrected else "loss_fn.use_importance_sampling_correction"
        ),
        certainty="possible" if corrected else "likely",
        since=far[0].step,
    )


def find_wrong_reference(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a reference model that is not the model that the run began with.

    A policy that was not trained yet is its reference, and one step does not carry it far away. So a distance that is
    there in the first step, or that appears as the run is resumed while the policy says what it said, is between two
    other models.
    """
    steps = [record for record in evidence.steps if {"kl", "entropy"} <= record.metrics.keys()]
    if not steps or not evidence.config.loss_fn.reference_policy_kl_penalty:
        return None
    first, batch = steps[0], evidence.config.policy.train_global_batch_size
    reloads = evidence.num_begun > 1 or any("trainer-" in line and "is lost: " in line for line in evidence.events)
    moved, clipped = abs(first.metrics.get("approx_kl", 0.0)), first.metrics.get("clip_fraction", 0.0)
    certainty: Certainty
    if first.step == 1 and first.metrics["kl"] >= max(FAR_AT_ONCE, BEYOND_MOVEMENT * max(moved, clipped)):
        section = evidence.config.rollout_section if evidence.config.declaration.rolls_out else None
        size = section.num_prompts_per_step * section.num_generations_per_prompt if section else 0
        at, certainty = first, "certain" if batch >= size > 0 and not moved else "likely"
        lines = [
            f"kl is {first.metrics['kl']:.4g} nats a token in step 1 ({FAR_AT_ONCE:g} is the threshold), where the "
            f"policy has hardly moved (approx_kl is {moved:.4g}, clip_fraction {clipped:.4g})",
        ]
    elif reloads and (record_pair := _find_departure(steps)) is not None:
        (before, at), certainty = record_pair, "likely"
        lines = [
            f"kl went from {before.metrics['kl']:.4g} nats a token in step {before.step} to {at.metrics['kl']:.4g} in "
            f"step {at.step}, and has stayed there; entropy went from {before.metrics['entropy']:.4g} to "
            f"{at.metrics['entropy']:.4g} and approx_kl was {at.metrics.get('approx_kl', 0.0):.4g}: the policy has not "
            "moved, so the reference has",
            "trainers load the reference as they start, so also when the run is resumed or one is replaced",
        ]
    else:
        return None
    return DiagnosisFinding(
        name="wrong reference",
        what="The reference of the KL penalty is not the model that the run began with, so that the penalty pulls the "
        "policy towards another one.",
        evidence=tuple(lines),
        look_at=f"policy.model_name, {shorten(evidence.config.policy.model_name)}: what was written there since the "
        "run began",
        certainty=certainty,
        since=at.step,
        explains=("KL penalty too large", "learning rate too large", "low entropy", "no progress"),
    )


def _find_departure(steps: Sequence[StepRecord]) -> tuple[StepRecord, StepRecord] | None:
    """Return the steps between which the reference went away for good from a policy that stayed; None if none did."""
    for number, (before, at) in enumerate(itertools.pairwise(steps), 1):
        near, far = before.metrics["kl"], at.metrics["kl"]
        rise = max(FAR_AT_ONCE, BEYOND_MOVEMENT * max(near, at.metrics.get("approx_kl", 0.0)))
        entropies = [record.metrics["entropy"] for record in (before, at)]
        stayed = abs(entropies[1] - entropies[0]) <= SAME_ENTROPY * max(*entropies, LEAST_ENTROPY)
        later = statistics.median(record.metrics["kl"] for record in steps[number:])
        if stayed and far >= near + rise and later >= near + rise / 2:
            return before, at
    return None


def find_groups_thrown_away(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find groups generated in vain, because their weights were too old when they were done."""
    config = evidence.config
    if not config.declaration.rolls_out:
        return None
    thrown = sum(value for _, value in evidence.points("groups_too_old"))
    num_groups = len(evidence.steps) * config.rollout_section.num_prompts_per_step + thrown
    if not thrown or thrown / num_groups < TOO_OLD_SHARE:
        return None
    idle = change(evidence, "trainer_idle_s")
    return DiagnosisFinding(
        name="groups thrown away",
        what="Many generated groups were thrown away, because their weights were too old for their step.",
        evidence=(
            f"{thrown:.0f} of {num_groups:.0f} groups ({thrown / num_groups:.0%}; {TOO_OLD_SHARE:.0%} is the "
            "threshold)",
            *([str(idle)] if idle is not None else []),
        ),
        look_at=f"{config.asynchronous_key}.max_trajectory_age_steps, cluster.rollouts, and "
        "policy.generation.max_new_tokens",
        certainty="likely",
        since=next(step for step, value in evidence.points("groups_too_old") if value),
    )
