"""Responses that are cut off, grow without end, or shrink to nothing."""

from __future__ import annotations

from tandem.coordinator.inspect.diagnosis.evidence import Evidence, change
from tandem.coordinator.inspect.diagnosis.finding import Finding

MOST_TRUNCATED = 0.5
"""Share of responses that are cut off, in the last quarter of a run, from which on most of what is learned is that."""
GROWTH = 2.0
"""Times as long as at first, from which on responses have grown."""
SHRINKAGE = 0.25
"""The same for responses that have shrunk."""
SHORTEST = 4.0
"""Tokens that responses must have had at first to be said to have shrunk."""
_LENGTH, _TRUNCATED = "mean_generation_length", "truncated_fraction"


def truncated_responses(evidence: Evidence) -> Finding | None:
    """Find responses that a limit of tokens cuts off."""
    condition, streak, course = (
        evidence.condition(_TRUNCATED),
        evidence.streak(_TRUNCATED),
        change(evidence, _TRUNCATED),
    )
    if condition is None or course is None or (streak is None and course.late < MOST_TRUNCATED):
        return None
    limit = evidence.config.policy.generation.max_new_tokens
    was_so = course.early >= MOST_TRUNCATED
    lines = [
        *([str(streak)] if streak is not None else []),
        f"{course}; {MOST_TRUNCATED:g} is the threshold",
        f"policy.generation.max_new_tokens is {limit}",
    ]
    return Finding(
        name="truncated responses",
        what="Most responses are cut off before they end, so that their answers are never seen"
        + (", from the beginning on." if was_so else "."),
        evidence=tuple(lines),
        look_at=condition.look_at,
        certainty="certain" if streak is not None else "likely",
        since=evidence.first_step if was_so else course.first_late,
        explains=("equal rewards", "groups without spread", "no gradient") if was_so else (),
    )


def growing_responses(evidence: Evidence) -> Finding | None:
    """Find responses that grow, and are no better for it or end at their limit."""
    length, cut, reward = (change(evidence, name) for name in (_LENGTH, _TRUNCATED, "accuracy"))
    if length is None or cut is None or length.late < GROWTH * length.early:
        return None
    gets_better = reward is not None and reward.late > reward.early
    if cut.late < max(MOST_TRUNCATED, cut.early) and gets_better:
        return None
    return Finding(
        name="growing responses",
        what="Responses grow and grow, and their answers are no better for it.",
        evidence=(
            f"{length} tokens; {GROWTH:g} times as long is the threshold",
            str(cut),
            *([str(reward)] if reward is not None else []),
        ),
        look_at=f"{evidence.config.environment_keys}, which may reward length; grpo.reward_shaping, "
        "grpo.overlong_filtering and loss_fn.token_level_loss",
        certainty="likely",
        since=evidence.first_step,
        explains=("truncated responses",),
    )


def shrinking_responses(evidence: Evidence) -> Finding | None:
    """Find responses of which next to nothing is left."""
    length = change(evidence, _LENGTH)
    if length is None or length.early < SHORTEST or length.late > SHRINKAGE * length.early:
        return None
    return Finding(
        name="responses shrink",
        what="Responses have become much shorter than they were: the policy says next to nothing any more.",
        evidence=(f"{length} tokens; {SHRINKAGE:.0%} of what it was is the threshold",),
        look_at=f"{evidence.config.environment_keys}, which may reward brevity, and grpo.reward_shaping",
        certainty="possible",
        since=length.first_late,
    )
