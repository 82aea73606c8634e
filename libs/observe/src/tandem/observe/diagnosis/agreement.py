"""Checks for engines and trainers that disagree on probabilities, and for samples of too old weights."""

from __future__ import annotations

import statistics

from tandem.observe.diagnosis.evidence import Evidence, change
from tandem.observe.diagnosis.finding import Finding
from tandem.observe.health import HIGH_PROBABILITY_ERROR, learning_rate_keys

_GAP = "token_mult_prob_error"
TOO_OLD_SHARE = 0.1
"""Share of the generated groups that were discarded because of their age, from which it is reported."""


def disagreement(evidence: Evidence) -> Finding | None:
    """Find engines and trainers that disagree on token probabilities with the same weights."""
    fresh = [r for r in evidence.steps if _GAP in r.metrics and r.metrics.get("max_trajectory_age", 0) == 0]
    high = [r for r in fresh if not r.metrics[_GAP] <= HIGH_PROBABILITY_ERROR]
    streak = evidence.streak(_GAP)
    if not high or len(high) * 2 < len(fresh) or (streak is None and len(fresh) == len(evidence.steps)):
        return None
    worst = max(high, key=lambda record: record.metrics[_GAP])
    generation, sampling = evidence.config.policy.generation, []
    if generation.top_k:
        sampling.append(f"policy.generation.top_k is {generation.top_k}")
    if generation.top_p < 1:
        sampling.append(f"policy.generation.top_p is {generation.top_p:g}")
    verify = evidence.config.refit.verify
    lines = [
        f"{_GAP} was above {HIGH_PROBABILITY_ERROR:g} in {len(high)} of the {len(fresh)} steps with samples of "
        f"the newest weights, {worst.metrics[_GAP]:.4g} in step {worst.step}; 1.01 to 1.02 is usual",
    ]
    if sampling:
        lines.append(f"{' and '.join(sampling)}: engines sample from some of the tokens, trainers score over all")
    elif high[0].step == evidence.first_step:
        lines.append("it is so from the first step on, before any training, so learning is not the cause")
    if verify != "full":
        lines.append(f"refit.verify is {verify}: it is not verified that engines hold the trained weights")
    condition = evidence.condition(_GAP)
    own = "policy.generation.top_k and policy.generation.top_p" if sampling else condition.look_at if condition else ""
    return Finding(
        name="engine and trainer disagree",
        what="With the same weights, engines and trainers give tokens different probabilities, so samples come from "
        "another policy than the trained one.",
        evidence=tuple(lines),
        look_at=own if verify == "full" else f"refit.verify, {own}",
        certainty="certain" if sampling else "likely",
        since=high[0].step,
        explains=("stale samples",),
    )


def stale_samples(evidence: Evidence) -> Finding | None:
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
    return Finding(
        name="stale samples",
        what="Samples come from older weights than those in training"
        + (", too different for their correction to help." if corrected else ", and nothing corrects for it."),
        evidence=tuple(lines),
        look_at=f"{config.algorithm}.async_grpo.max_trajectory_age_steps, {learning_rate_keys(config)}, and "
        + (
            "loss_fn.truncated_importance_sampling_ratio" if corrected else "loss_fn.use_importance_sampling_correction"
        ),
        certainty="possible" if corrected else "likely",
        since=far[0].step,
    )


def groups_thrown_away(evidence: Evidence) -> Finding | None:
    """Find groups generated in vain, because their weights were too old when they were done."""
    config = evidence.config
    if not config.declaration.rolls_out:
        return None
    thrown = sum(value for _, value in evidence.points("groups_too_old"))
    made = len(evidence.steps) * config.rollout_section.num_prompts_per_step + thrown
    if not thrown or thrown / made < TOO_OLD_SHARE:
        return None
    idle = change(evidence, "trainer_idle_s")
    return Finding(
        name="groups thrown away",
        what="Many generated groups were thrown away, because their weights were too old for their step.",
        evidence=(
            f"{thrown:.0f} of {made:.0f} groups ({thrown / made:.0%}; {TOO_OLD_SHARE:.0%} is the threshold)",
            *([str(idle)] if idle is not None else []),
        ),
        look_at=f"{config.algorithm}.async_grpo.max_trajectory_age_steps, cluster.rollouts, and "
        "policy.generation.max_new_tokens",
        certainty="likely",
        since=next(step for step, value in evidence.points("groups_too_old") if value),
    )
