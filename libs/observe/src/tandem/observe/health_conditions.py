"""The conditions of a run that learns nothing, each with the metric that shows it."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config import Config
from tandem.observe.health import HealthCondition

LOW_ENTROPY = 0.01
"""Entropy in nats per token below which nearly all samples of a prompt are the same."""
HIGH_PROBABILITY_ERROR = 1.1
"""Limit of `token_mult_prob_error`, the mean factor between a token's probabilities at trainer and engine. Different
kernels make it 1.01 to 1.02 in bfloat16; if it is much higher, samples come from another policy."""
HIGH_PROBABILITY_ERROR_OF_AGE = 1.5
"""The same limit for samples that may be of older weights, which alone make it 1.0 to 1.2 at usual learning rates."""


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
