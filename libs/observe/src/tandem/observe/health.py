"""Warnings, from the metrics of a run's steps, that it learns nothing; pure, without clock or sockets.

`tandem.observe.diagnosis` checks the same conditions, and more, in a run that is over.

A condition that holds for several steps in a row is reported once, with evidence and the configuration keys to look at.
It is reported again only if it has cleared in between. If one condition explains another, only the first is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from tandem.config import Config

NUM_STEPS = 5
"""Consecutive steps for which a condition must hold."""
LOW_ENTROPY = 0.01
"""Entropy in nats per token below which nearly all samples of a prompt are the same."""
HIGH_PROBABILITY_ERROR = 1.1
"""Limit of `token_mult_prob_error`, the mean factor between a token's probabilities at trainer and engine. Different
kernels make it 1.01 to 1.02 in bfloat16; if it is much higher, samples come from another policy."""
HIGH_PROBABILITY_ERROR_OF_AGE = 1.5
"""The same limit for samples that may be of older weights, which alone make it 1.0 to 1.2 at usual learning rates."""

Metrics = Mapping[str, float]


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A sign that a run learns nothing."""

    metric: str
    """Metric that shows it; steps without the metric are ignored."""
    holds: Callable[[Metrics], bool]
    evidence: str
    """Text of the evidence, with names of metrics in braces."""
    look_at: str
    """Configuration keys to look at."""
    explains: tuple[str, ...] = ()
    """Metrics with conditions that are consequences of this one."""


class Health:
    """The conditions of one run, and the number of steps that each has held."""

    def __init__(self, config: Config) -> None:
        self._conditions = tuple(conditions(config))
        self._num_steps = [0] * len(self._conditions)
        self._is_said = [False] * len(self._conditions)

    def warnings(self, metrics: Metrics) -> list[str]:
        """Note the metrics of a finished step; return the new warnings."""
        lines: list[str] = []
        explained: set[str] = set()
        for index, condition in enumerate(self._conditions):
            if condition.metric not in metrics:
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


def conditions(config: Config) -> Iterator[Condition]:
    """Yield the conditions of this run, causes before consequences, each with a metric of its own."""
    yield Condition(
        metric="learning_rate",
        holds=lambda metrics: metrics["learning_rate"] == 0,
        evidence="the learning rate has been 0, and no weight has changed",
        look_at=learning_rate_keys(config),
    )
    if config.declaration.rolls_out:
        yield from _of_samples(config)
        no_gradient = f"{config.algorithm}.overlong_filtering and loss_fn"
    else:
        no_gradient = f"data, whose loss masks say what is learned, and {config.algorithm}"
    yield Condition(
        metric="grad_norm",
        holds=lambda metrics: metrics["grad_norm"] == 0,
        evidence="the gradient has been 0, at last with {num_valid_tokens:g} tokens in the loss",
        look_at=no_gradient,
    )


def _of_samples(config: Config) -> Iterator[Condition]:
    """Yield the conditions of samples and their rewards."""
    grpo, generation = config.rollout_section, config.policy.generation
    estimator = grpo.group_estimator
    # Shaping by length separates samples of equal rewards.
    if not grpo.reward_shaping.enabled:
        yield Condition(
            metric="reward_max",
            holds=lambda metrics: metrics["reward_min"] == metrics["reward_max"],
            evidence="all rewards of a step have been equal, at last {reward_max:g}: no sample is better than another",
            look_at=f"{config.environment_keys}, and data.prompt_template, which asks for the answer",
            explains=("groups_without_spread", "grad_norm"),
        )
        if estimator is not None and (
            estimator.name == "grpo" or (estimator.name == "reinforce_plus_plus" and estimator.minus_baseline)
        ):
            yield Condition(
                metric="groups_without_spread",
                holds=lambda metrics: metrics["groups_without_spread"] == 1,
                evidence="all samples of a prompt have had the same reward, in the mean {reward:g} at last: every "
                "advantage is 0",
                look_at=f"{config.algorithm}.num_generations_per_prompt, policy.generation.temperature, and how hard "
                "data is",
                explains=("grad_norm",),
            )
    yield Condition(
        metric="truncated_fraction",
        holds=lambda metrics: metrics["truncated_fraction"] == 1,
        evidence=f"every response has been cut off at its limit of {generation.max_new_tokens} tokens",
        look_at="policy.generation.max_new_tokens, stop_token_ids and stop_strings, and "
        "policy.max_total_sequence_length",
        explains=("grad_norm",) if grpo.overlong_filtering else (),
    )
    yield Condition(
        metric="entropy",
        # Without valid tokens in a step, it is 0 and says nothing about the policy.
        holds=lambda metrics: metrics["entropy"] < LOW_ENTROPY and metrics.get("num_valid_tokens") != 0,
        evidence="the policy's entropy has been below "
        f"{LOW_ENTROPY:g} nats a token, at last {{entropy:.2g}}: samples of a prompt hardly differ",
        look_at="loss_fn.ratio_clip_max, loss_fn.reference_policy_kl_penalty and policy.generation.temperature",
    )
    precisions = "policy.precision"
    if generation.backend == "vllm":
        precisions += ", policy.generation.vllm_cfg.precision"
    age = config.max_trajectory_age_steps
    high = HIGH_PROBABILITY_ERROR_OF_AGE if age else HIGH_PROBABILITY_ERROR
    of_age = f"{config.asynchronous_key}.max_trajectory_age_steps ({age}), the learning rate, "
    yield Condition(
        metric="token_mult_prob_error",
        holds=lambda metrics: not metrics["token_mult_prob_error"] <= high,
        evidence="engine and trainer have disagreed on the probability of tokens, by a factor of "
        "{token_mult_prob_error:.3g} at last (token_mult_prob_error)",
        look_at=f"{of_age if age else ''}{precisions}, and loss_fn.use_importance_sampling_correction if samples are "
        "of older weights",
    )
