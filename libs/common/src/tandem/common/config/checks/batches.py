"""Rules of batches: whole numbers of smaller ones."""

from __future__ import annotations

from tandem.common.config.checks.rule import Rule
from tandem.common.config.problem import Invalid
from tandem.common.config.schema import Config


def a_rollout_batch_divides_into_global_batches(config: Config) -> None:
    """A rollout batch is a whole number of optimizer steps."""
    if config.algorithm != "grpo":
        return
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if prompts * generations % batch:
        raise Invalid(
            "policy.train_global_batch_size",
            f"{batch} does not divide grpo.num_prompts_per_step * grpo.num_generations_per_prompt "
            f"= {prompts} * {generations} = {prompts * generations} samples",
        )


def a_global_batch_divides_into_micro_batches(config: Config) -> None:
    """Each trainer takes an equal share of a global batch, in whole micro-batches."""
    _divides(
        config,
        "policy.train_global_batch_size",
        config.policy.train_global_batch_size,
        "policy.train_micro_batch_size",
        config.policy.train_micro_batch_size,
    )


def a_validation_batch_divides_into_micro_batches(config: Config) -> None:
    """The same for the batches that SFT validates on."""
    if config.algorithm == "sft" and (config.sft.val_period or config.sft.val_at_start):
        _divides(
            config,
            "sft.val_global_batch_size",
            config.sft.val_global_batch_size,
            "sft.val_micro_batch_size",
            config.sft.val_micro_batch_size,
        )


def _divides(config: Config, whole_key: str, whole: int, part_key: str, part: int) -> None:
    shares = config.data_parallel_size
    if whole % (part * shares):
        words = "cluster.trainers" if shares == config.cluster.trainers else "the data-parallel size"
        raise Invalid(
            whole_key, f"{whole} is not a multiple of {part_key} * {words} = {part} * {shares} = {part * shares}"
        )


RULES: tuple[Rule, ...] = (
    a_rollout_batch_divides_into_global_batches,
    a_global_batch_divides_into_micro_batches,
    a_validation_batch_divides_into_micro_batches,
)
