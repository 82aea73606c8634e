"""The plan summary beside refits: ranks, batches, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.config import Config, notices
from tandem.config.unsupported import describe_refusal
from tandem.coordinator.forecast.beside import BesideModel, as_policy, models_beside, name_of
from tandem.coordinator.forecast.memory import part_of
from tandem.coordinator.forecast.sides import training, words


def ranks_of_training(config: Config) -> str:
    """Return the number of trainers, and of data-parallel shards of a batch."""
    num, shares = config.cluster.trainers, config.data_parallel_size
    cut = f", {num // shares} to each of {shares} data-parallel shards" if num > shares > 1 else ""
    models = [f"{size} of the {model}" for model, size in config.processes_of.items() if model != "policy"]
    others_phrase = f", and beside them {' and '.join(models)}" if models else ""
    return f"{num} trainer rank{'s' if num > 1 else ''}{cut}{others_phrase}"


def describe_beside(config: Config, known_models: Sequence[BesideModel]) -> Iterator[str]:
    """Describe the division of each model beside the policy, with bytes if what trainers hold is known."""
    of_name = {each.name: each for each in known_models}
    for model, number in models_beside(config):
        model_config, name = as_policy(config, model, number), name_of(config, model, number)
        ranks = model_config.cluster.trainers
        location = f"{_count(ranks, 'rank')} of its own" if model in config.processes_of else "the same ranks"
        division = words(model_config, training(model_config))
        yield f"{name}, on {location}: {division}{_sizes(of_name[name]) if known_models else ''}"


def _sizes(model: BesideModel) -> str:
    """Return a model's element types, and the bytes of the rank that holds most of it."""
    part, dtypes = part_of(model), ", ".join(sorted({tensor.dtype for tensor in model.side.model.tensors}))
    learning = f", {part.peak / 1e9:,.2f} GB with gradients and optimizer" if model.is_trained else ""
    assumed = f", as if it had the policy's shape: {model.unknown}" if model.unknown else ""
    return f"; {dtypes}; {part.weights / 1e9:,.2f} GB of weights a rank{learning}{assumed}"


def steps(config: Config) -> Iterator[str]:
    """Describe what one step computes: optimizer steps, and each rank's micro-batches."""
    if config.evaluates:
        yield _validation(config)
        return
    policy, share = config.policy, -(-config.policy.train_global_batch_size // config.data_parallel_size)
    things, num = f"{config.declaration.unit}s", config.num_optimizer_steps
    if config.declaration.rolls_out:
        section, total = config.rollout_section, config.units_per_step
        prompts, generations = section.num_prompts_per_step, section.num_generations_per_prompt
        yield f"{prompts:,} prompts × {generations} samples = {total:,} sequences, {_count(num, 'optimizer step')}"
        if section.use_dynamic_sampling:
            drawn, max_draws = section.num_prompts_per_batch, section.dynamic_sampling_max_gen_batches
            yield f"of each {drawn:,} prompts drawn, those with differing rewards are used; at most {max_draws:,} draws"
    else:
        yield f"{policy.train_global_batch_size:,} {things}, 1 optimizer step"
    micro_batches = _micro_batches(config, share, policy.train_micro_batch_size)
    yield f"of each, a rank trains on {share:,} {things}: {micro_batches}"
    models = config.declaration.trains[:-1]
    scored = " and the ".join(model for model in config.scored_by(num) if model not in models)
    if scored:
        num_rows = share * num // config.num_passes
        batches = _micro_batches(config, num_rows, policy.logprob_batch_size, scoring=True)
        yield f"before that, log-probabilities of the {scored}: {batches}"
    if models:
        yield f"the same for the {' and the '.join(models)} model, by its own batch sizes"


def _validation(config: Config) -> str:
    """Describe what a run without steps computes."""
    section, generation = config.rollout_section, config.policy.generation
    num = section.num_val_generations_per_prompt
    temperature = generation.temperature if section.val_temperature is None else section.val_temperature
    return (
        f"no step: validation on at most {section.max_val_samples:,} problems × {_count(num, 'sample')}, temperature "
        f"{temperature:g}, with the model as it is"
    )


def _micro_batches(config: Config, num: int, size: int, *, scoring: bool = False) -> str:
    packing, dynamic = config.policy.sequence_packing, config.policy.dynamic_batching
    longest = config.policy.max_total_sequence_length
    if not packing.enabled and not dynamic.enabled:
        return f"{_count(-(-num // size), 'micro-batch')} of {size}"
    section = packing if packing.enabled else dynamic
    tokens = section.logprob_mb_tokens if scoring else section.train_mb_tokens
    max_batches = -(-num // max(1, tokens // longest))
    kind = "packed rows" if packing.enabled else "micro-batches"
    return f"at most {max_batches:,} {kind} of at most {tokens:,} tokens"


def list_notes(config: Config) -> Iterator[str]:
    """Yield what is unsupported, and which keys have no effect."""
    unsupported = describe_refusal(config)
    if unsupported:
        yield unsupported
    yield from notices(config)


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" + ("" if num == 1 else "es" if noun.endswith("ch") else "s")
