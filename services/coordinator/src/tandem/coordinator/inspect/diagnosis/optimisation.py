"""Optimizer steps that are too large, do nothing, or end in no number; and what becomes of the policy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tandem.coordinator.inspect.diagnosis.evidence import Change, Evidence, Streak, change, shortened
from tandem.coordinator.inspect.diagnosis.finding import Finding
from tandem.coordinator.run.health import LOW_ENTROPY, learning_rate_keys

HIGH_LEARNING_RATE = 0.01
"""Of Adam and its kin, which move every weight by about that much a step: weights of a language model are about 0.02
in size, so that a few such steps make another model of it. Usual are 1e-7 to 1e-4, and up to 3e-3 from scratch."""
GROWTH_OF_GRADIENT = 10.0
"""Times the gradient norm that it was at first."""
HIGH_KL, FAR_FROM_REFERENCE = 0.5, 5.0
"""Nats a token that the policy moves within a step, of which 0 to 0.05 are usual, and from its reference."""
HIGH_CLIP_SHARE = 0.5
"""Share of tokens whose ratio is clipped; usual are 0 to 0.2."""
ENTROPY_LEFT = 0.1
"""Share of its first entropy below which the policy's has collapsed."""
RISE_OF_LOSS = 0.2
"""By which share the loss over a data set rises above what it was at first."""
_LEAST_ENTROPY = 0.1
"""Nats a token that there must have been at first for entropy to collapse."""
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
    "run failed",
)


def zero_learning_rate(evidence: Evidence) -> Finding | None:
    """Find a learning rate of 0."""
    return _of_health(
        evidence.streak("learning_rate"),
        "no learning rate",
        "The learning rate is 0: no weight changes.",
        ("unchanged weights",),
    )


def zero_gradient(evidence: Evidence) -> Finding | None:
    """Find steps without a gradient."""
    return _of_health(evidence.streak("grad_norm"), "no gradient", "The gradient is 0: no weight changes.", ())


def _of_health(streak: Streak | None, name: str, what: str, explains: tuple[str, ...]) -> Finding | None:
    if streak is None:
        return None
    look_at = streak.condition.look_at
    return Finding(
        name=name,
        what=what,
        evidence=(str(streak),),
        look_at=look_at,
        certainty="certain",
        since=streak.first,
        explains=explains,
    )


def large_steps(evidence: Evidence) -> Finding | None:
    """Find optimizer steps that are too large, by what they do: two signs are enough, or numbers that are none."""
    signs = [*_signs(evidence)]
    rate = max((value for _, value in evidence.points("learning_rate")), default=0.0)
    is_high = _is_adam(evidence) and rate >= HIGH_LEARNING_RATE
    ending = evidence.ending
    broke = (
        ending is not None and ending.outcome == "failed" and "optimizer step" in ending.why and "loss" in ending.why
    )
    if not broke and len(signs) + is_high < 2 and not (signs and not evidence.config.declaration.rolls_out):
        return None
    lines = [f"the learning rate was up to {rate:g}"]
    if is_high:
        lines[0] += f"; with Adam, {HIGH_LEARNING_RATE:g} makes another model of it within a few steps"
    if broke and ending is not None:
        lines.append(shortened(ending.why))
    return Finding(
        name="learning rate too large",
        what="Optimizer steps are too large: they destroy what the model knew.",
        evidence=(*lines, *signs),
        look_at=f"{learning_rate_keys(evidence.config)}, policy.max_grad_norm, and the batch size",
        certainty="certain" if is_high else "likely",
        since=evidence.first_step + 1 if evidence.steps else 1,
        explains=_OF_A_COLLAPSE,
    )


def _is_adam(evidence: Evidence) -> bool:
    policy = evidence.config.policy
    if policy.megatron_cfg.enabled:
        return "adam" in str(policy.megatron_cfg.optimizer.get("optimizer", "adam")).lower()
    return policy.optimizer is not None and "adam" in policy.optimizer.name.lower()


def _signs(evidence: Evidence) -> Iterator[str]:
    """Yield what large steps do to a policy."""
    gradient = change(evidence, "grad_norm")
    highest = max(evidence.points("grad_norm"), key=lambda point: point[1], default=(0, 0.0))
    if gradient is not None and max(gradient.late, highest[1] / 10) >= GROWTH_OF_GRADIENT * gradient.early > 0:
        yield f"{gradient}, {highest[1]:.4g} in step {highest[0]}; {GROWTH_OF_GRADIENT:g} times as much is a sign"
    for name, called, high in (
        ("approx_kl", "within a step", HIGH_KL),
        ("kl", "from the reference", FAR_FROM_REFERENCE),
    ):
        step, value = max(evidence.points(name), key=lambda point: point[1], default=(0, 0.0))
        if value >= high:
            yield f"the policy moved by {value:.4g} nats a token {called} by step {step} ({name}; {high:g} is a sign)"
    clipped = change(evidence, "clip_fraction")
    if clipped is not None and max(clipped.early, clipped.late) >= HIGH_CLIP_SHARE:
        yield f"{clipped}; {HIGH_CLIP_SHARE:g} is a sign"
    entropy = change(evidence, "entropy", from_first=True)
    if entropy is not None and _has_collapsed(entropy):
        yield f"{entropy} nats a token; {ENTROPY_LEFT:.0%} of what it was is a sign"
    if not evidence.config.declaration.rolls_out:
        yield from _rising_loss(evidence)


def _rising_loss(evidence: Evidence) -> Iterator[str]:
    points = evidence.points("loss")
    if len(points) >= 4 and points[0][1] > 0:
        late = statistics.median(value for _, value in points[-max(1, len(points) // 4) :])
        if late >= (1 + RISE_OF_LOSS) * points[0][1]:
            yield f"loss was {points[0][1]:.4g} at first and {late:.4g} at last; {RISE_OF_LOSS:.0%} more is a sign"


def low_entropy(evidence: Evidence) -> Finding | None:
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
    return Finding(
        name="low entropy",
        what="The policy hardly varies what it says any more: samples of a prompt are alike, and nothing new is tried.",
        evidence=tuple(lines),
        look_at=condition.look_at,
        certainty="certain" if streak is not None else "likely",
        since=streak.first if streak is not None else entropy.first_late if entropy is not None else 1,
        explains=("groups without spread", "equal rewards", "no gradient"),
    )


def _has_collapsed(entropy: Change) -> bool:
    return entropy.early >= _LEAST_ENTROPY and entropy.late <= ENTROPY_LEFT * entropy.early
