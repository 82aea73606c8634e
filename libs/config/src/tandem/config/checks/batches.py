"""Rules for batch sizes: each must be a multiple of the smaller ones."""

from __future__ import annotations

from tandem.config.checks.rule import Rule, restrict_to_data_sets, restrict_to_rollouts
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config, DynamicBatching, SequencePacking


def check_rollout_batch_divides_into_global_batches(config: Config) -> None:
    """Check that a rollout batch is a whole number of optimizer steps."""
    section, name = config.rollout_section, config.algorithm
    prompts, generations = section.num_prompts_per_step, section.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if prompts * generations % batch:
        raise InvalidValue(
            "policy.train_global_batch_size",
            f"{batch} does not divide {name}.num_prompts_per_step * {name}.num_generations_per_prompt "
            f"= {prompts} * {generations} = {prompts * generations} samples",
        )


def check_global_batch_divides_into_micro_batches(config: Config) -> None:
    """Check that each trainer gets an equal shard of a global batch, in whole micro-batches, unless those go by
    tokens."""
    if _list_token_limits(config):
        return
    _check_divides(
        config,
        "policy.train_global_batch_size",
        config.policy.train_global_batch_size,
        "policy.train_micro_batch_size",
        config.policy.train_micro_batch_size,
    )


def check_validation_batch_divides_into_micro_batches(config: Config) -> None:
    """Check the same for the validation batches of algorithms over data sets."""
    if _list_token_limits(config):
        return
    section = config.data_set_section
    if not (section.val_period or section.val_at_start):
        return
    _check_divides(
        config,
        f"{config.algorithm}.val_global_batch_size",
        section.val_global_batch_size,
        f"{config.algorithm}.val_micro_batch_size",
        section.val_micro_batch_size,
    )


def check_rows_are_padded_or_packed(config: Config) -> None:
    """Check that rows are either padded or packed when micro-batches go by tokens."""
    if len(_list_token_limits(config)) > 1:
        raise InvalidValue(
            "policy.dynamic_batching.enabled",
            "true, but policy.sequence_packing.enabled is true too: rows are either padded or packed",
        )


def check_longest_sequences_fit_micro_batch(config: Config) -> None:
    """Check that micro-batches are long enough: sequences of one sample are not split over several."""
    length, words = config.policy.max_total_sequence_length, "policy.max_total_sequence_length"
    if config.sequences_per_sample > 1:
        length, words = config.sequences_per_sample * length, f"a {config.declaration.unit} of {words}"
    for section, limits in _list_token_limits(config).items():
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(limits, name)
            if tokens < length:
                raise InvalidValue(f"policy.{section}.{name}", f"{tokens} is less than {words} ({length})")


def _list_token_limits(config: Config) -> dict[str, SequencePacking | DynamicBatching]:
    """Return the enabled sections that limit micro-batches by tokens."""
    limits: dict[str, SequencePacking | DynamicBatching] = {
        "sequence_packing": config.policy.sequence_packing,
        "dynamic_batching": config.policy.dynamic_batching,
    }
    return {name: section for name, section in limits.items() if section.enabled}


def _check_divides(config: Config, total_key: str, total: int, part_key: str, part: int) -> None:
    shares = config.data_parallel_size
    if total % (part * shares):
        words = "cluster.trainers" if shares == config.cluster.trainers else "the data-parallel size"
        raise InvalidValue(
            total_key, f"{total} is not a multiple of {part_key} * {words} = {part} * {shares} = {part * shares}"
        )


RULES: tuple[Rule, ...] = (
    *restrict_to_rollouts(check_rollout_batch_divides_into_global_batches),
    check_global_batch_divides_into_micro_batches,
    *restrict_to_data_sets(check_validation_batch_divides_into_micro_batches),
    check_rows_are_padded_or_packed,
    check_longest_sequences_fit_micro_batch,
)
