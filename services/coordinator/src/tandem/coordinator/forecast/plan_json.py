"""The plan as data, for machines, and the summary beside refits: ranks, batches, keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tandem.config import Config, notices
from tandem.config.unsupported import describe_refusal
from tandem.coordinator.forecast import memory
from tandem.coordinator.forecast.drafters import DrafterForecast, forecast_drafter
from tandem.coordinator.forecast.sides import (
    ForecastSide,
    SequenceCache,
    describe_cache,
    generation,
    measure_largest_rank,
    model_shape,
    sides,
    training,
    words,
)
from tandem.coordinator.forecast.transfers import is_on_gpus, predict
from tandem.refit.adapters.deployment import ParallelDeployment


def ranks_of_training(config: Config) -> str:
    """Return the number of trainers, and of data-parallel shards of a batch."""
    num, shares = config.cluster.trainers, config.data_parallel_size
    cut = f", {num // shares} to each of {shares} data-parallel shards" if num > shares > 1 else ""
    models = [f"{size} of the {model}" for model, size in config.processes_of.items() if model != "policy"]
    others_phrase = f", and beside them {' and '.join(models)}" if models else ""
    return f"{num} trainer rank{'s' if num > 1 else ''}{cut}{others_phrase}"


def describe_beside(config: Config, known_models: Sequence[memory.BesideModel]) -> Iterator[str]:
    """Describe the division of each model beside the policy, with bytes if what trainers hold is known."""
    of_name = {each.name: each for each in known_models}
    for model, number in memory.models_beside(config):
        model_config, name = memory.as_policy(config, model, number), memory.name_of(config, model, number)
        ranks = model_config.cluster.trainers
        location = f"{_count(ranks, 'rank')} of its own" if model in config.processes_of else "the same ranks"
        division = words(model_config, training(model_config))
        yield f"{name}, on {location}: {division}{_describe_sizes(of_name[name]) if known_models else ''}"


def _describe_sizes(model: memory.BesideModel) -> str:
    """Return a model's element types, and the bytes of the rank that holds most of it."""
    part, dtypes = memory.part_of(model), ", ".join(sorted({tensor.dtype for tensor in model.side.model.tensors}))
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


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that trainers hold, or engines."""

    name: str
    ranks: int
    """Number of ranks that hold it, one part each."""
    has_processes: bool
    """Whether it has processes of its own, rather than those of the policy in training."""
    division: str
    """Library and parallel sizes, as in the text of the plan."""
    sizes: Mapping[str, int]
    """Parallel sizes, by the names of the library's deployment."""
    num_parameters: int
    """Parameters of the whole model."""
    weights: float
    """Bytes of weights on the rank that holds most."""
    learning: float
    """Bytes of gradients and optimizer state in its optimizer step; zero if it is not trained."""
    unknown: str = ""
    """Why its shape is unknown, so that the policy's stands for it."""


class PlannedPhase(msgspec.Struct, frozen=True):
    """A phase of a step on the trainer that needs most."""

    name: str
    held: memory.Bytes
    num_bytes: float


class PlannedRefit(msgspec.Struct, frozen=True, kw_only=True):
    """A refit."""

    bytes_by_transport: Mapping[str, int]
    seconds: float
    bound_s: float
    limited_by: str


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run before it starts."""

    unknown: str
    """Why models and memory are unknown; empty if they are known."""
    trainer: int
    """Rank that needs most memory."""
    phases: tuple[PlannedPhase, ...]
    """Phases of a step on that rank."""
    models: tuple[PlannedModel, ...]
    """Models of trainers, the policy first."""
    engines: PlannedModel | None
    """The policy in engines; None if nothing is generated."""
    cache: SequenceCache | None = None
    """Memory that an engine needs for a sequence; None if nothing is generated, or it is unknown."""
    drafter: DrafterForecast | None = None
    """Drafter in engines; None if none takes memory."""
    refit: PlannedRefit | None
    notes: tuple[str, ...]
    """Keys without effect, and what is unsupported."""


def describe_plan(config: Config) -> RunPlan:
    """Return the plan of a run. Raise `ConfigError`, `ModelError`, or `RefitError` if sizes do not fit the model."""
    notes, shape = tuple(list_notes(config)), model_shape(config)
    if isinstance(shape, str):
        return RunPlan(unknown=shape, trainer=0, phases=(), models=(), engines=None, refit=None, notes=notes)
    trainers, engines = sides(config, shape)
    beside = memory.describe_beside_models(config, shape)
    forecast = predict(config, trainers, engines) if config.generates else None
    needs = memory.memory_of(
        config,
        trainers,
        with_activations=is_on_gpus(config),
        of_refit=None if forecast is None else forecast.memory,
        beside=beside,
    )
    learning = needs.resident["gradients"] + needs.resident["optimizer"]
    refit = None
    if forecast is not None:
        moved: dict[str, int] = {}
        for link in forecast.survey.links:
            moved[link.transport] = moved.get(link.transport, 0) + link.num_bytes
        cost = forecast.cost
        refit = PlannedRefit(
            bytes_by_transport=moved, seconds=cost.seconds, bound_s=cost.bound_s, limited_by=cost.limited_by
        )
    return RunPlan(
        unknown="",
        trainer=needs.rank,
        phases=tuple(PlannedPhase(phase.name, phase.parts, phase.num_bytes) for phase in needs.phases),
        models=(_policy(config, trainers, learning), *map(_plan_model, beside)),
        engines=_policy(config, engines, 0.0) if config.generates else None,
        cache=describe_cache(config) if config.generates else None,
        drafter=forecast_drafter(config, shape),
        refit=refit,
        notes=notes,
    )


def _policy(config: Config, side: ForecastSide, learning: float) -> PlannedModel:
    """Describe the policy at its trainers, or at its engines."""
    division = generation(config) if side.kind == "engine" else side.deployment
    return PlannedModel(
        name="policy",
        ranks=side.deployment.num_ranks,
        has_processes=side.kind == "engine",
        division=words(config, division),
        sizes=_sizes(division),
        num_parameters=side.model.num_parameters,
        weights=float(measure_largest_rank(side)),
        learning=learning,
    )


def _plan_model(model: memory.BesideModel) -> PlannedModel:
    part, deployment = memory.part_of(model), model.side.deployment
    return PlannedModel(
        name=model.name,
        ranks=deployment.num_ranks,
        has_processes=model.has_processes,
        division=words(model.config, deployment),
        sizes=_sizes(deployment),
        num_parameters=model.side.model.num_parameters,
        weights=part.weights,
        learning=part.peak - part.weights,
        unknown=model.unknown,
    )


def _sizes(deployment: ParallelDeployment) -> dict[str, int]:
    named = msgspec.structs.asdict(deployment)
    named.pop("vocabulary_divisor", None)
    return {name: size for name, size in named.items() if isinstance(size, int) and not isinstance(size, bool)}
