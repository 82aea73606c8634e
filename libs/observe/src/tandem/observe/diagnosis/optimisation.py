"""Checks for optimizer steps that are too large, change nothing, or give NaN, and for their effects."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from tandem.common.numeric import PHRASE, RecentSteps
from tandem.config.notice_rules import FAR_ABOVE, LOWEST_RATE
from tandem.observe.diagnosis.evidence import (
    SHORT_RUN,
    ConditionStreak,
    DiagnosisFinding,
    MetricChange,
    RunEvidence,
    change,
    jump,
    shorten,
)
from tandem.observe.health import HIGH_PROBABILITY_ERROR, LOW_ENTROPY, learning_rate_keys

HIGH_LEARNING_RATE = 0.01
"""Highest learning rate of Adam and its variants. They move every weight by about the rate in each step, and a language
model's weights are about 0.02 in size, so a few such steps make another model. Usual are 1e-7 to 1e-4, and up to 3e-3
from scratch."""
GROWTH_OF_GRADIENT = 10.0
"""Growth of the gradient norm, as a multiple of its early value."""
HIGH_KL, FAR_FROM_REFERENCE = 0.5, 5.0
"""Nats per token that the policy moves within a step (0 to 0.05 are usual), and from its reference."""
HIGH_CLIP_SHARE = 0.5
"""Share of tokens with a clipped ratio; 0 to 0.2 are usual."""
ENTROPY_LEFT = 0.1
"""Share of its first entropy below which a policy's has collapsed."""
ENTROPY_GROWN = 3.0
"""Multiple of its first entropy above which a policy has forgotten what to say."""
REWARD_LEFT = 0.25
"""Share of its reward that a destroyed policy keeps."""
LOW_SHARE_OF_PEAK = 1e-4
"""Share of the pretraining rate for a model of this width below which hardly anything changes. Reinforcement learning
usually takes 1/300 to a few thousandths of it: 1e-6 to 1e-7."""
NARROW_CLIP, MUCH_CLIPPED = 0.02, 0.1
"""Bounds of a token's ratio around 1, of which 0.2 is usual, and the share of tokens clipped by such bounds."""
HIGH_PENALTY, NEAR_REFERENCE = 0.5, 1.0
"""Penalty, relative to an advantage of about 1, above which rewards have no effect; and the nats per token from the
reference below which the penalty's weight is too large, rather than the distance."""
HIGH_DROPOUT = 0.5
"""Dropout of adapters from which it may keep a run from learning, whether or not its record shows an effect."""
RISE_OF_LOSS = 0.2
"""Rise of the loss over a data set above its first value, as a fraction."""
_STEP, _MOST_NAMED = re.compile(r"\bstep (\d+): "), 3
"""The step in a line about an outlier, and the number of lines to show."""
_OF_AN_ADVANTAGE = ("learning rate too large", "low entropy", "no progress")
_LEAST_ENTROPY = 0.1
"""First entropy, in nats per token, below which a collapse is not reported."""
_LEAST_REWARD = 0.05
"""Mean reward below which a loss of reward is not reported."""
_OF_A_COLLAPSE = (
    "low entropy",
    "equal rewards",
    "groups without spread",
    "no gradient",
    "growing responses",
    "responses shrink",
    "truncated responses",
    "one answer to everything",
    "stale samples",
    "no progress",
    "run failed",
)


def find_zero_learning_rate(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a learning rate of 0."""
    return _of_health(
        evidence.streak("learning_rate"),
        "no learning rate",
        "The learning rate is 0: no weight changes.",
        ("unchanged weights", "no progress"),
    )


def find_small_rate(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a learning rate with which Adam changes next to nothing."""
    rate = max((value for _, value in evidence.points("learning_rate")), default=0.0)
    peak = evidence.most_learning_rate / FAR_ABOVE if evidence.most_learning_rate else 0.0
    least = max(LOWEST_RATE, LOW_SHARE_OF_PEAK * peak)
    if len(evidence.steps) < SHORT_RUN or not _is_adam(evidence) or not 0 < rate < least:
        return None
    lines = [f"the learning rate was {rate:g} at most; {least:.2g} is the threshold"]
    moved = max((abs(value) for _, value in evidence.points("approx_kl")), default=None)
    if moved is not None:
        lines.append(f"the policy moved by {moved:.2g} nats a token at most in a step (approx_kl)")
    return DiagnosisFinding(
        name="learning rate too small",
        what="The learning rate is so small that weights hardly change.",
        evidence=tuple(lines),
        look_at=learning_rate_keys(evidence.config),
        certainty="certain" if rate < LOWEST_RATE else "likely",
        since=evidence.first_step,
        explains=("unchanged weights", "no progress"),
    )


def find_outlying_steps(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find advantages, losses and gradients out of all proportion to their neighbours, which one bad sample makes."""
    named = [line for line in evidence.events if PHRASE in line]
    steps = [step for line in named if (step := _STEP.search(line))]
    lines = [shorten(line, 300) for line in named[:_MOST_NAMED]]
    since = min((int(step[1]) for step in steps), default=0)
    if not named:  # an earlier release named none
        excesses = dict(_excesses(evidence))
        lines = [f"step {step}: {excess}" for step, excess in excesses.items()][:_MOST_NAMED]
        since = min(excesses, default=0)
    if not lines:
        return None
    if len(named) > _MOST_NAMED:
        lines.append(f"and {len(named) - _MOST_NAMED} more")
    section = evidence.config.algorithm
    key = f"{section}.set_aside_outliers, " if evidence.config.declaration.rolls_out else ""
    return DiagnosisFinding(
        name="numbers out of proportion",
        what="A few samples had an advantage, a loss or a gradient out of all proportion to the others, and alone "
        "decided those steps.",
        evidence=tuple(lines),
        look_at=f"{key}rewards that hardly differ within a group, and coordinator samples for the ones named",
        certainty="likely",
        since=since or evidence.first_step,
        explains=_OF_AN_ADVANTAGE if any("an advantage of" in line for line in named) else ("no progress",),
    )


def _excesses(evidence: RunEvidence) -> Iterator[tuple[int, str]]:
    """Yield the steps with a loss or gradient out of all proportion to those before, unless the next is like them."""
    recent = RecentSteps()
    sizes = [(record.metrics.get("loss", 0.0), record.metrics.get("grad_norm", 0.0)) for record in evidence.steps]
    for record, (loss, norm), following in zip(evidence.steps, sizes, [*sizes, (0.0, 0.0)][1:], strict=True):
        excess = recent.excess(loss, norm)
        if excess and not recent.excess(*following):
            yield record.step, excess.replace("optimizer steps", "steps")
        recent.add(loss, norm)


def find_narrow_clip(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find ratio bounds so narrow that tokens stop teaching as soon as the policy moves at all."""
    loss, clipped = evidence.config.loss_fn, [value for _, value in evidence.points("clip_fraction")]
    low, high = loss.ratio_clip_min, loss.ratio_clip_max
    # A sequence's ratio is near 1: GSPO's bounds are 3e-4 and 4e-4.
    if loss.sequence_level_importance_ratios or max(low, high) > NARROW_CLIP or len(clipped) < SHORT_RUN:
        return None
    share = statistics.median(clipped)
    if share < MUCH_CLIPPED:
        return None
    return DiagnosisFinding(
        name="clip range too narrow",
        what="The ratio of tokens is clipped as soon as the policy moves, so that most of a batch teaches nothing.",
        evidence=(
            f"ratios are clipped to {1 - low:g} to {1 + high:g}; {NARROW_CLIP:g} on either side is narrow, 0.2 usual",
            f"clip_fraction was {share:.4g} in the median of all steps; {MUCH_CLIPPED:g} is the threshold",
        ),
        look_at="loss_fn.ratio_clip_min and loss_fn.ratio_clip_max",
        certainty="likely",
        since=evidence.first_step,
        explains=("no progress", "learning rate too large"),
    )


def find_large_penalty(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a penalty for leaving the reference that outweighs the rewards, however near the policy stays."""
    weight, kl = evidence.config.loss_fn.reference_policy_kl_penalty, [value for _, value in evidence.points("kl")]
    if not weight or len(kl) < SHORT_RUN:
        return None
    usual = statistics.median(kl)
    if usual > NEAR_REFERENCE or weight * usual < HIGH_PENALTY:
        return None
    return DiagnosisFinding(
        name="KL penalty too large",
        what="The penalty for leaving the reference outweighs the rewards: the policy is kept where it began.",
        evidence=(
            f"loss_fn.reference_policy_kl_penalty is {weight:g}, and kl {usual:.4g} nats a token in the median: "
            f"{weight * usual:.4g} in the loss, where advantages are about 1 ({HIGH_PENALTY:g} is the threshold)",
        ),
        look_at="loss_fn.reference_policy_kl_penalty; 0 to 0.05 are usual",
        certainty="likely",
        since=evidence.first_step,
        explains=("no progress", "learning rate too large"),
    )


def find_dropout(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find adapters whose dropout makes trainers score another policy than the one that generates.

    Only training steps drop anything. The effect grows with the adapters, which begin at zero.
    """
    adapters, gaps = evidence.config.policy.adapters, [value for _, value in evidence.points("token_mult_prob_error")]
    if adapters is None or not adapters.dropout or len(evidence.steps) < SHORT_RUN:
        return None
    keys = "megatron_cfg.peft" if evidence.config.policy.megatron_cfg.enabled else "dtensor_cfg.lora_cfg"
    lines = [f"policy.{keys}.dropout is {adapters.dropout:g}; 0 to 0.1 are usual"]
    late = statistics.median(gaps[-max(1, len(gaps) // 4) :] or [0.0])
    differs = bool(gaps) and gaps[0] <= HIGH_PROBABILITY_ERROR < late
    if differs:
        lines.append(
            f"token_mult_prob_error was {gaps[0]:.4g} at first, where adapters are zero, and {late:.4g} at last, in "
            f"the median ({HIGH_PROBABILITY_ERROR:g} is the threshold)"
        )
    elif adapters.dropout < HIGH_DROPOUT:
        return None
    return DiagnosisFinding(
        name="dropout",
        what="Dropout leaves so little of the adapters in training that what is trained is not what generates."
        if differs
        else "Dropout takes much of the adapters away in training.",
        evidence=tuple(lines),
        look_at=f"policy.{keys}.dropout",
        certainty="likely" if differs else "possible",
        since=evidence.first_step,
        explains=(*_OF_A_COLLAPSE, "engine and trainer disagree", "learning rate too large"),
    )


def find_zero_gradient(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find steps without a gradient."""
    return _of_health(evidence.streak("grad_norm"), "no gradient", "The gradient is 0: no weight changes.", ())


def _of_health(
    streak: ConditionStreak | None, name: str, description: str, explains: tuple[str, ...]
) -> DiagnosisFinding | None:
    if streak is None:
        return None
    look_at = streak.condition.look_at
    return DiagnosisFinding(
        name=name,
        what=description,
        evidence=(str(streak),),
        look_at=look_at,
        certainty="certain",
        since=streak.first,
        explains=explains,
    )


def find_large_steps(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find optimizer steps that are too large, by their effects: two signs suffice, or NaN."""
    signs = [sign.text for sign in sorted(_signs(evidence))]
    rate = max((value for _, value in evidence.points("learning_rate")), default=0.0)
    high = min(HIGH_LEARNING_RATE, evidence.most_learning_rate or HIGH_LEARNING_RATE)
    is_high = _is_adam(evidence) and rate >= high
    ending = evidence.ending
    broke = (
        ending is not None
        and ending.outcome == "failed"
        and "optimizer step" in ending.reason
        and "loss" in ending.reason
    )
    if not broke and len(signs) + is_high < 2 and not (signs and not evidence.config.declaration.rolls_out):
        return None
    lines = [f"the learning rate was up to {rate:g}"]
    if is_high:
        lines[0] += f"; with Adam, {high:.2g} makes another model of it within a few steps"
    if broke and ending is not None:
        lines.append(shorten(ending.reason))
    return DiagnosisFinding(
        name="learning rate too large",
        what="Optimizer steps are too large: they destroy what the model knew.",
        evidence=(*lines, *signs),
        look_at=f"{learning_rate_keys(evidence.config)}, policy.max_grad_norm, and the batch size",
        certainty="certain" if is_high else "likely",
        since=evidence.first_step + 1 if evidence.steps else 1,
        explains=_OF_A_COLLAPSE,
    )


def _is_adam(evidence: RunEvidence) -> bool:
    policy = evidence.config.policy
    if policy.megatron_cfg.enabled:
        return "adam" in str(policy.megatron_cfg.optimizer.get("optimizer", "adam")).lower()
    return policy.optimizer is not None and "adam" in policy.optimizer.name.lower()


class _Sign(NamedTuple):
    """An effect of large steps on a policy, in order of occurrence: causes before effects within a step."""

    step: int
    rank: int
    """Gradient, KL and ratio come before entropy, and entropy before reward."""
    text: str


def _signs(evidence: RunEvidence) -> Iterator[_Sign]:
    """Yield the effects of large steps on a policy, with their steps."""
    gradient = change(evidence, "grad_norm")
    highest = max(evidence.points("grad_norm"), key=lambda point: point[1], default=(0, 0.0))
    if gradient is not None and max(gradient.late, highest[1] / 10) >= GROWTH_OF_GRADIENT * gradient.early > 0:
        text = f"{gradient}, {highest[1]:.4g} in step {highest[0]}; {GROWTH_OF_GRADIENT:g} times as much is a sign"
        yield _Sign(highest[0], 0, text)
    for name, called, high in (
        ("approx_kl", "within a step", HIGH_KL),
        ("kl", "from the reference", FAR_FROM_REFERENCE),
    ):
        step, value = next((point for point in evidence.points(name) if point[1] >= high), (0, 0.0))
        if value >= high:
            text = f"the policy moved by {value:.4g} nats a token {called} in step {step} ({name}; {high:g} is a sign)"
            yield _Sign(step, 0, text)
    step, clipped = next((each for each in evidence.points("clip_fraction") if each[1] >= HIGH_CLIP_SHARE), (0, 0.0))
    if clipped:
        yield _Sign(step, 0, f"clip_fraction was {clipped:.4g} in step {step}; {HIGH_CLIP_SHARE:g} is a sign")
    if evidence.config.declaration.rolls_out:
        yield from _of_rollouts(evidence)
    else:
        yield from _rising_loss(evidence)


def _of_rollouts(evidence: RunEvidence) -> Iterator[_Sign]:
    """Yield the signs in a policy that generates. Over a data set, falling entropy is just learning."""
    entropy, fell = change(evidence, "entropy", from_first=True), jump(evidence, "entropy")
    if entropy is not None and fell is not None and _has_collapsed(entropy):
        text = f"{entropy} nats a token, by a jump in step {fell.step}; {ENTROPY_LEFT:.0%} of what it was is a sign"
        yield _Sign(fell.step, 1, text)
    elif fell is not None and fell.after >= ENTROPY_GROWN * max(fell.before, _LEAST_ENTROPY):
        yield _Sign(fell.step, 1, f"{fell} nats a token; {ENTROPY_GROWN:g} times what it was is a sign")
    reward = jump(evidence, "reward")
    if reward is not None and reward.before >= _LEAST_REWARD and reward.after <= REWARD_LEFT * reward.before:
        yield _Sign(reward.step, 2, f"{reward}; {REWARD_LEFT:.0%} of what it was is a sign")


def _rising_loss(evidence: RunEvidence) -> Iterator[_Sign]:
    points = evidence.points("loss")
    if len(points) >= 4 and points[0][1] > 0:
        late = statistics.median(value for _, value in points[-max(1, len(points) // 4) :])
        if late >= (1 + RISE_OF_LOSS) * points[0][1]:
            text = f"loss was {points[0][1]:.4g} at first and {late:.4g} at last; {RISE_OF_LOSS:.0%} more is a sign"
            yield _Sign(points[-1][0], 1, text)


def find_low_entropy(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a policy that always says the same."""
    condition, streak, entropy = (
        evidence.condition("entropy"),
        evidence.streak("entropy"),
        change(evidence, "entropy", from_first=True),
    )
    collapsed = entropy is not None and _has_collapsed(entropy)
    if condition is None or (streak is None and not collapsed):
        return None
    lines = [str(streak)] if streak is not None else []
    if collapsed:
        lines.append(f"{entropy} nats a token; {ENTROPY_LEFT:.0%} of what it was, or {LOW_ENTROPY:g}, is the threshold")
    return DiagnosisFinding(
        name="low entropy",
        what="The policy's responses hardly vary any more: samples of a prompt are alike, and nothing new is tried.",
        evidence=tuple(lines),
        look_at=condition.look_at,
        certainty="certain" if streak is not None else "likely",
        since=streak.first if streak is not None else entropy.first_late if entropy is not None else 1,
        # Answers to solved problems do not vary, which is harmless and causes nothing.
        explains=() if evidence.is_solved else ("groups without spread", "equal rewards", "no gradient", "no progress"),
    )


def _has_collapsed(entropy: MetricChange) -> bool:
    return entropy.early >= _LEAST_ENTROPY and entropy.late <= ENTROPY_LEFT * entropy.early
