"""Checks for responses that are cut off, grow without end, or shrink to nothing."""

from __future__ import annotations

import statistics

from tandem.observe.diagnosis.evidence import SHORT_RUN, RunEvidence, change, jump, shorten
from tandem.observe.diagnosis.finding import DiagnosisFinding

MOST_TRUNCATED = 0.5
"""Share of cut-off responses, in the last quarter of a run, from which the run mostly learns from those."""
GROWTH = 2.0
"""Length of grown responses as a multiple of their early length."""
SHRINKAGE = 0.25
"""Length of shrunk responses as a fraction of their early length."""
SHORTEST = 4.0
"""Least early length, in tokens, of responses that can count as shrunk."""
LOW_TEMPERATURE = 0.3
"""Temperature below which samples of a prompt are alike from the start."""
MOST_ALIKE = 0.75
"""Share of groups without spread in the first steps from which samples count as alike."""
MOST_STOPPED = 0.9
"""Share of the first step's samples that a stop string ended."""
_OF_NO_ANSWER = (
    "low entropy",
    "equal rewards",
    "one answer to everything",
    "groups without spread",
    "no gradient",
    "no progress",
)
_LENGTH, _TRUNCATED = "mean_generation_length", "truncated_fraction"


def find_truncated_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that the token limit cuts off."""
    condition, streak, course = (
        evidence.condition(_TRUNCATED),
        evidence.streak(_TRUNCATED),
        change(evidence, _TRUNCATED),
    )
    if condition is None or course is None or (streak is None and course.late < MOST_TRUNCATED):
        return None
    limit = evidence.config.policy.generation.max_new_tokens
    was_so, rise = evidence.points(_TRUNCATED)[0][1] >= MOST_TRUNCATED, jump(evidence, _TRUNCATED)
    lines = [
        *([str(streak)] if streak is not None else []),
        f"{course if was_so or rise is None else rise}; {MOST_TRUNCATED:g} is the threshold",
        f"policy.generation.max_new_tokens is {limit}",
    ]
    return DiagnosisFinding(
        name="truncated responses",
        what="Most responses are cut off before they end, so that their answers are never seen"
        + (", from the start." if was_so else "."),
        evidence=tuple(lines),
        look_at=condition.look_at,
        certainty="certain" if streak is not None else "likely",
        since=evidence.first_step if was_so else rise.step if rise is not None else course.first_late,
        explains=_OF_NO_ANSWER if was_so else (),
    )


def find_growing_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that grow without getting better, or up to their limit."""
    length, cut, reward = (change(evidence, name) for name in (_LENGTH, _TRUNCATED, "accuracy"))
    if length is None or cut is None or length.late < GROWTH * length.early:
        return None
    gets_better = reward is not None and reward.late > reward.early
    if cut.late < max(MOST_TRUNCATED, cut.early) and gets_better:
        return None
    onsets = [onset.step for name in (_LENGTH, _TRUNCATED) if (onset := jump(evidence, name)) is not None]
    return DiagnosisFinding(
        name="growing responses",
        what="Responses keep growing, and their answers get no better.",
        evidence=(
            f"{length} tokens; {GROWTH:g} times as long is the threshold",
            str(cut),
            *([str(reward)] if reward is not None else []),
        ),
        look_at=f"{evidence.config.environment_keys}, which may reward length; grpo.reward_shaping, "
        "grpo.overlong_filtering and loss_fn.token_level_loss",
        certainty="likely",
        since=min(onsets, default=evidence.first_step),
        explains=("truncated responses",),
    )


def find_shrinking_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that have shrunk to next to nothing."""
    length = change(evidence, _LENGTH)
    if length is None or length.early < SHORTEST or length.late > SHRINKAGE * length.early:
        return None
    return DiagnosisFinding(
        name="responses shrink",
        what="Responses have become much shorter: the policy says next to nothing any more.",
        evidence=(f"{length} tokens; {SHRINKAGE:.0%} of what it was is the threshold",),
        look_at=f"{evidence.config.environment_keys}, which may reward brevity, and grpo.reward_shaping",
        certainty="possible",
        since=length.first_late,
    )


def find_low_temperature(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a temperature so low that samples of a prompt are alike before training."""
    config, alike = evidence.config, evidence.points("groups_without_spread")
    if not config.declaration.rolls_out or len(alike) < SHORT_RUN:
        return None
    temperature = config.policy.generation.temperature
    share = statistics.median(value for _, value in alike[:SHORT_RUN])
    if temperature > LOW_TEMPERATURE or share < MOST_ALIKE:
        return None
    return DiagnosisFinding(
        name="low temperature",
        what="The temperature is so low that samples of a prompt are alike from the start: there is nothing to "
        "compare.",
        evidence=(
            f"policy.generation.temperature is {temperature:g}; {LOW_TEMPERATURE:g} is the threshold, 1 is usual",
            f"groups_without_spread was {share:.4g} in the first {SHORT_RUN} steps; {MOST_ALIKE:g} is the threshold",
        ),
        look_at="policy.generation.temperature",
        certainty="certain",
        since=evidence.first_step,
        explains=(
            "learning rate too large",
            "low entropy",
            "groups without spread",
            "equal rewards",
            "no gradient",
            "no progress",
        ),
    )


def find_early_stop(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find stop strings that end nearly every response before its answer."""
    if not evidence.samples or not evidence.config.declaration.rolls_out:
        return None
    strings = evidence.config.policy.generation.stop_strings or ()
    first = [row for row in evidence.samples if row.step == evidence.samples[0].step]
    stopped = [row for row in first if row.response.endswith(tuple(strings))] if strings else []
    right = max((value for _, value in evidence.points("accuracy")), default=0.0)
    if len(stopped) < MOST_STOPPED * len(first) or right > 0:
        return None
    return DiagnosisFinding(
        name="responses stop too early",
        what="A stop string ends nearly every response, and none was ever right: it comes before the answer.",
        evidence=(
            f"step {first[0].step}: {len(stopped)} of {len(first)} samples end with one of {[*strings]!r}, such as "
            f"{shorten(stopped[0].response, 80)!r} ({MOST_STOPPED:.0%} is the threshold)",
        ),
        look_at="policy.generation.stop_strings",
        certainty="likely",
        since=evidence.first_step,
        explains=_OF_NO_ANSWER,
    )
