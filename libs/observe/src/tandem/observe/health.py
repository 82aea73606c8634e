"""Warnings, from a run's metrics, that it learns nothing, and their conditions; pure, without clock.

`tandem.observe.diagnosis` checks the same conditions, and more, in a run that is over.

A condition that holds for several steps in a row is reported once, with evidence and the configuration keys to look at.
It is reported again only if it has cleared in between. If one condition explains another, only the first is reported.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tandem.common.numeric import ROUNDING
from tandem.config import Config

NUM_STEPS = 5
"""Consecutive steps for which a condition must hold."""

Metrics = Mapping[str, float]
LOW_ENTROPY = 0.01
"""Entropy in nats per token below which nearly all samples of a prompt are the same."""
HIGH_PROBABILITY_ERROR = 1.1
"""Limit of `token_mult_prob_error`, the mean factor between a token's probabilities at trainer and engine. Different
kernels make it 1.01 to 1.02 in bfloat16; if it is much higher, samples come from another policy."""
HIGH_PROBABILITY_ERROR_OF_AGE = 1.5
"""The same limit for samples that may be of older weights, which alone make it 1.0 to 1.2 at usual learning rates."""
NEAR_ZERO = 0.05
"""Initial held-out accuracy below which nearly every group is all wrong and teaches nothing."""
STILL_LOW = 0.15
"""Final held-out accuracy from which a start near zero did no harm."""
AS_LOW = 0.1
"""Held-out accuracy of a live run up to which a start near zero has done harm so far."""
LEAST_GAIN = 0.02
"""Least rise of held-out accuracy that counts as movement."""
LEAST_FALL = 0.1
"""Least fall of held-out accuracy, from its beginning, that counts as a collapse."""
FELL = ": it fell"
"""End of the description of a collapse."""
SOLVED = 0.95
"""Held-out accuracy from which nothing is left to gain."""
MANY_STEPS = 20
"""Number of steps that should have shown progress."""


def no_progress(accuracy: Sequence[tuple[int, float]]) -> str | None:
    """Describe what is wrong with the course of held-out accuracy; None if nothing is, or too little is known."""
    if (low_course := low_start(accuracy, STILL_LOW)) is not None or not _tells(accuracy):
        return low_course
    start, end, best = accuracy[0][1], accuracy[-1][1], max(value for _, value in accuracy)
    if start - end >= LEAST_FALL:
        return f"{_course(accuracy)}, {best:.1%} at best{FELL}"
    if best - start < LEAST_GAIN and start < SOLVED:
        return f"{_course(accuracy)}, {best:.1%} at best: it hardly moved"
    return None


def low_start(accuracy: Sequence[tuple[int, float]], still_low: float = AS_LOW) -> str | None:
    """Describe held-out accuracy that began near zero and is below `still_low`; None if it is not, or unknown."""
    if not _tells(accuracy) or accuracy[0][1] >= NEAR_ZERO or accuracy[-1][1] >= still_low:
        return None
    cause = "the model could hardly do the task to begin with, so that nearly no sample was rewarded"
    return f"{_course(accuracy)}: {cause}; more SFT first"


class LowStart:
    """A warning, given once even if resumed, that a live run started with too weak a model."""

    def __init__(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self._accuracy: list[tuple[int, float]] = []
        self._is_said = False
        for step, metrics in history:
            self.warning(step, metrics)

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Note the metrics of a finished step; return the warning if it is due."""
        if "val_accuracy" not in metrics:
            return None
        self._accuracy.append((step, metrics["val_accuracy"]))
        if self._is_said or (low_course := low_start(self._accuracy)) is None:
            return None
        self._is_said = True
        return f"warning: {low_course}"


def _tells(accuracy: Sequence[tuple[int, float]]) -> bool:
    return len(accuracy) >= 2 and accuracy[-1][0] - accuracy[0][0] >= MANY_STEPS


def _course(accuracy: Sequence[tuple[int, float]]) -> str:
    (first, start), (last, end) = accuracy[0], accuracy[-1]
    return f"held-out accuracy was {start:.1%} in step {first}, and {end:.1%} in step {last}"


class HealthCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A sign that a run learns nothing: a metric that equals something, or is below or above it."""

    metric: str
    """Metric that shows it; steps without it, or without another metric that the condition names, are ignored."""
    equals: float | str | None = None
    """A number, or the name of another metric; equal but for rounding."""
    below: float | None = None
    above: float | None = None
    unless_zero: str = ""
    """Metric without which, in a step where it is 0, the condition says nothing."""
    evidence: str
    """Text of the evidence, with names of metrics in braces."""
    look_at: str
    """Configuration keys to look at."""
    explains: tuple[str, ...] = ()
    """Metrics with conditions that are consequences of this one."""

    @property
    def needed(self) -> frozenset[str]:
        """The metrics without which a step is ignored."""
        named = {name for _, name, _, _ in string.Formatter().parse(self.evidence) if name}
        return frozenset({self.metric, *named, *([self.equals] if isinstance(self.equals, str) else [])})

    def holds(self, metrics: Metrics) -> bool:
        """Tell whether it holds in a step with these metrics."""
        value = metrics[self.metric]
        if self.unless_zero and metrics.get(self.unless_zero) == 0:
            return False
        if self.below is not None:
            return value < self.below
        if self.above is not None:
            return not value <= self.above
        assert self.equals is not None, "a condition equals something, or is below or above it"
        equal = metrics[self.equals] if isinstance(self.equals, str) else self.equals
        return math.isclose(value, equal, rel_tol=ROUNDING)


class RunHealth:
    """The conditions of one run, and the number of steps that each has held."""

    def __init__(self, conditions: Iterable[HealthCondition]) -> None:
        """Watch these conditions (`tandem.observe.health`)."""
        self._conditions = tuple(conditions)
        self._needed = tuple(condition.needed for condition in self._conditions)
        self._num_steps = [0] * len(self._conditions)
        self._is_said = [False] * len(self._conditions)

    def warnings(self, metrics: Metrics) -> list[str]:
        """Note the metrics of a finished step; return the new warnings."""
        lines: list[str] = []
        explained: set[str] = set()
        for index, condition in enumerate(self._conditions):
            if not self._needed[index] <= metrics.keys():
                continue
            if not condition.holds(metrics):
                self._num_steps[index], self._is_said[index] = 0, False
                continue
            self._num_steps[index] += 1
            if self._num_steps[index] < NUM_STEPS:
                continue
            if condition.metric not in explained and not self._is_said[index]:
                self._is_said[index] = True
                evidence = condition.evidence.format_map(metrics)
                lines.append(f"warning: for {self._num_steps[index]} steps {evidence}; look at {condition.look_at}")
            explained.update(condition.explains)
        return lines


def learning_rate_keys(config: Config) -> str:
    """Return the keys that set the learning rate."""
    if config.policy.megatron_cfg.enabled:
        return "policy.megatron_cfg.optimizer.lr and policy.megatron_cfg.scheduler"
    return "policy.optimizer.kwargs.lr and policy.scheduler"


def conditions(config: Config) -> Iterator[HealthCondition]:
    """Yield the conditions of this run, causes before consequences, each with a metric of its own."""
    yield HealthCondition(
        metric="learning_rate",
        equals=0.0,
        evidence="the learning rate has been 0, and no weight has changed",
        look_at=learning_rate_keys(config),
    )
    if config.declaration.rolls_out:
        yield from _of_samples(config)
        no_gradient = f"{config.algorithm}.overlong_filtering and loss_fn"
    else:
        no_gradient = f"data, whose loss masks say what is learned, and {config.algorithm}"
    yield HealthCondition(
        metric="grad_norm",
        equals=0.0,
        evidence="the gradient has been 0, at last with {num_valid_tokens:g} tokens in the loss",
        look_at=no_gradient,
    )


def _of_samples(config: Config) -> Iterator[HealthCondition]:
    """Yield the conditions of samples and their rewards."""
    grpo, generation = config.rollout_section, config.policy.generation
    estimator = grpo.group_estimator
    # Shaping by length separates samples of equal rewards.
    if not grpo.reward_shaping.enabled:
        yield HealthCondition(
            metric="reward_max",
            equals="reward_min",
            evidence="all rewards of a step have been equal, at last {reward_max:g}: no sample is better than another",
            look_at=f"{config.environment_keys}, and data.prompt_template, which asks for the answer",
            explains=("groups_without_spread", "grad_norm"),
        )
        if estimator is not None and (
            estimator.name == "grpo" or (estimator.name == "reinforce_plus_plus" and estimator.minus_baseline)
        ):
            yield HealthCondition(
                metric="groups_without_spread",
                equals=1.0,
                evidence="all samples of a prompt have had the same reward, in the mean {reward:g} at last: every "
                "advantage is 0",
                look_at=f"{config.algorithm}.num_generations_per_prompt, policy.generation.temperature, and how hard "
                "data is",
                explains=("grad_norm",),
            )
    yield HealthCondition(
        metric="truncated_fraction",
        equals=1.0,
        evidence=f"every response has been cut off at its limit of {generation.max_new_tokens} tokens",
        look_at="policy.generation.max_new_tokens, stop_token_ids and stop_strings, and "
        "policy.max_total_sequence_length",
        explains=("grad_norm",) if grpo.overlong_filtering else (),
    )
    yield HealthCondition(
        metric="entropy",
        # Without valid tokens in a step, it is 0 and says nothing about the policy.
        below=LOW_ENTROPY,
        unless_zero="num_valid_tokens",
        evidence="the policy's entropy has been below "
        f"{LOW_ENTROPY:g} nats a token, at last {{entropy:.2g}}: samples of a prompt hardly differ",
        look_at="loss_fn.ratio_clip_max, loss_fn.reference_policy_kl_penalty and policy.generation.temperature",
    )
    precisions = "policy.precision"
    if generation.kind.precision_key:
        precisions += f", {generation.kind.precision_key}"
    age = config.max_trajectory_age_steps
    high = HIGH_PROBABILITY_ERROR_OF_AGE if age else HIGH_PROBABILITY_ERROR
    of_age = f"{config.asynchronous_key}.max_trajectory_age_steps ({age}), the learning rate, "
    yield HealthCondition(
        metric="token_mult_prob_error",
        above=high,
        evidence="engine and trainer have disagreed on the probability of tokens, by a factor of "
        "{token_mult_prob_error:.3g} at last (token_mult_prob_error)",
        look_at=f"{of_age if age else ''}{precisions}, and loss_fn.use_importance_sampling_correction if samples are "
        "of older weights",
    )
