"""Rules for streaming training: the gradient of a group must be known before the others are there."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.placement import list_model_groups
from tandem.config.problem import InvalidValue, Rule, restrict_to_rollouts
from tandem.config.schema import Config


def check_groups_determine_their_gradient(config: Config) -> None:
    """Check that the gradient of a group is known up to one factor before the other groups are there."""
    if not config.streams_training:
        return
    for key, value, reason in _list_obstacles(config):
        raise InvalidValue("grpo.streaming_training", f"true, but {key} is {value}: {reason}")


def _list_obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that streaming training cannot work with: key, value and reason."""
    if config.is_colocated:
        yield "policy.generation.colocated.enabled", "true", "engines generate while trainers train"
    if config.policy.megatron_cfg.enabled:
        yield "policy.megatron_cfg.enabled", "true", "only the DTensor backend adds up gradients over several commands"
    if config.num_passes > 1:
        yield "grpo.num_iterations", str(config.num_passes), "the whole batch has to be there for a second pass"
    if config.num_optimizer_steps > 1:
        size = config.policy.train_global_batch_size
        yield (
            "policy.train_global_batch_size",
            str(size),
            f"a step of {config.units_per_step} samples must be one batch",
        )
    if len(list_model_groups(config)) > 1:
        models = " and ".join(model_group.name for model_group in list_model_groups(config)[1:])
        yield "the reference", "in processes of its own", f"{models} would get the batch in parts"
    if config.policy.mtp.num_layers:
        yield "policy.mtp.num_layers", str(config.policy.mtp.num_layers), "its loss has a divisor of its own"
    adapters = config.policy.adapters
    if adapters is not None and adapters.dropout > 0:
        yield "the adapters' dropout", f"{adapters.dropout:g}", "what is dropped depends on a micro-batch's place"
    yield from _list_obstacles_of_advantages(config)
    yield from _list_obstacles_of_loss(config)


def _list_obstacles_of_advantages(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the settings by which a group's advantages depend on other groups, or come late."""
    grpo = config.grpo
    if grpo.use_dynamic_sampling:
        yield "grpo.use_dynamic_sampling", "true", "which groups count is known at the end"
    if grpo.adv_estimator.name != "grpo":
        yield "grpo.adv_estimator.name", grpo.adv_estimator.name, "its advantages need the whole batch"
    if grpo.adv_estimator.scale_rewards == "batch":
        yield "grpo.adv_estimator.scale_rewards", "batch", "its advantages need the whole batch"
    if grpo.penalises_turns:
        yield "a penalty of turns", "set", "trainers make the advantages of the whole batch"
    if grpo.seq_logprob_error_threshold is not None:
        value = f"{grpo.seq_logprob_error_threshold:g}"
        yield "grpo.seq_logprob_error_threshold", value, "a pass over the whole batch leaves sequences out"


def _list_obstacles_of_loss(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the settings by which the loss has another divisor than its tokens or its sequences."""
    loss = config.loss_fn
    if loss.class_path is not None:
        yield "loss_fn.class", loss.class_path, "what it divides by is not known"
    if loss.loss_type == "bnpo":
        yield "loss_fn.loss_type", "bnpo", "it depends on what is together in a micro-batch"
    if loss.positive_example_nll_weight > 0:
        value = f"{loss.positive_example_nll_weight:g}"
        yield "loss_fn.positive_example_nll_weight", value, "it divides by the tokens of samples with a reward"
    if loss.entropy_coef > 0 and loss.is_mean_of_sequences:
        yield "loss_fn.entropy_coef", f"{loss.entropy_coef:g}", "it divides by tokens, and the rest by sequences"


RULES: tuple[Rule, ...] = restrict_to_rollouts(check_groups_determine_their_gradient)
