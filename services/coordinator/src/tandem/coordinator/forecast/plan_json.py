"""The plan as data: ranks and memory of each model, and the refit, for machines."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.config import Config
from tandem.coordinator.forecast.beside import BesideModel, describe_beside_models
from tandem.coordinator.forecast.memory import Bytes, memory_of, part_of
from tandem.coordinator.forecast.plan_summary import list_notes
from tandem.coordinator.forecast.sides import (
    ForecastSide,
    SequenceCache,
    describe_cache,
    generation,
    model_shape,
    sides,
    words,
)
from tandem.coordinator.forecast.transfers import is_on_gpus, predict
from tandem.refit.adapters.deployment import ParallelDeployment


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
    held: Bytes
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
    refit: PlannedRefit | None
    notes: tuple[str, ...]
    """Keys without effect, and what is unsupported."""


def describe_plan(config: Config) -> RunPlan:
    """Return the plan of a run. Raise `ConfigError`, `ModelError`, or `RefitError` if sizes do not fit the model."""
    notes, shape = tuple(list_notes(config)), model_shape(config)
    if isinstance(shape, str):
        return RunPlan(unknown=shape, trainer=0, phases=(), models=(), engines=None, refit=None, notes=notes)
    trainers, engines = sides(config, shape)
    beside = describe_beside_models(config, shape)
    forecast = predict(config, trainers, engines) if config.generates else None
    memory = memory_of(
        config,
        trainers,
        with_activations=is_on_gpus(config),
        of_refit=None if forecast is None else forecast.memory,
        beside=beside,
    )
    learning = memory.resident["gradients"] + memory.resident["optimizer"]
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
        trainer=memory.rank,
        phases=tuple(PlannedPhase(phase.name, phase.parts, phase.num_bytes) for phase in memory.phases),
        models=(_policy(config, trainers, learning), *map(_plan_model, beside)),
        engines=_policy(config, engines, 0.0) if config.generates else None,
        cache=describe_cache(config) if config.generates else None,
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
        weights=float(_measure_largest_rank(side)),
        learning=learning,
    )


def _plan_model(model: BesideModel) -> PlannedModel:
    part, deployment = part_of(model), model.side.deployment
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


def _measure_largest_rank(side: ForecastSide) -> int:
    """Return the bytes of the largest rank."""
    deployment = side.deployment
    places = {deployment.place(rank): rank for rank in reversed(range(deployment.num_ranks))}
    layouts = (deployment.look_up_parameters(side.model, rank) for rank in places.values())
    return max(sum(storage.num_bytes for storage in layout.storages) for layout in layouts)
