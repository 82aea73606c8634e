"""Memory of the trainer rank that needs most, in each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.config import Config
from tandem.config.models import lora, mtp_layers
from tandem.config.schema.columns import Model
from tandem.coordinator.forecast import media
from tandem.coordinator.forecast.activations import PassMemory, passes
from tandem.coordinator.forecast.sides import ForecastSide, model_shape, training
from tandem.observe.exporters.nvml import use_nvml
from tandem.refit.adapters.catalogue import ModelShape

Bytes = dict[str, float]
"""Bytes by what they are for."""


class BesideModel(msgspec.Struct, frozen=True):
    """A model beside the policy, as the trainers hold it."""

    name: str
    """Its name, with its number if there are several teachers."""
    config: Config
    """Configuration `as_policy`."""
    side: ForecastSide
    is_trained: bool
    has_processes: bool
    """Whether it has processes of its own, rather than the policy's."""
    unknown: str = ""
    """Why its shape is unknown, so that the policy's stands for it; empty if it is known."""


def describe_beside_models(config: Config, shape: ModelShape) -> tuple[BesideModel, ...]:
    """Return the models beside the policy, which has this shape. Raise `ModelError` if a model's files are unusable."""
    return tuple(_describe_model(config, model, number, shape) for model, number in models_beside(config))


def models_beside(config: Config) -> list[tuple[Model, int]]:
    """Return the models beside the policy, each with its number among several teachers.

    Leave out a reference in the policy's processes: its section and its ranks are the policy's.
    """
    return [
        (model, number)
        for model in config.holds
        if model != "policy" and (model != "reference" or model in config.processes_of)
        for number in range(config.num_of(model))
    ]


def as_policy(config: Config, model: Model, number: int) -> Config:
    """Return the configuration as if a model were the policy, and the ranks that hold it all trainers."""
    model_config = config.replace_policy(config.settings_of(model, number))
    if model not in config.processes_of:
        return model_config
    return msgspec.structs.replace(
        model_config, cluster=msgspec.structs.replace(model_config.cluster, trainers=config.processes_of[model])
    )


def name_of(config: Config, model: Model, number: int) -> str:
    """Return the name of a model for people, with its number if there are several."""
    return f"{model} {number + 1}" if config.num_of(model) > 1 else model


def _describe_model(config: Config, model: Model, number: int, of_policy: ModelShape) -> BesideModel:
    model_config = as_policy(config, model, number)
    shape_or_reason = of_policy if model == "reference" else model_shape(model_config)
    shape, unknown = (of_policy, shape_or_reason) if isinstance(shape_or_reason, str) else (shape_or_reason, "")
    is_trained, head = model in config.declaration.trains, config.declaration.head_of(model)
    if head != "vocabulary" and shape.geometry is not None and not shape.has_scalar_head:
        shape = shape.add_scalar_head(has_bias=head == "value")
    # On DTensor, trained weights are in float32 whatever the precision of the passes.
    in_float32 = is_trained and not model_config.policy.megatron_cfg.enabled
    return BesideModel(
        name=name_of(config, model, number),
        config=model_config,
        side=ForecastSide(
            "trainer",
            training(model_config),
            shape.cast("float32" if in_float32 else model_config.policy.precision),
        ),
        is_trained=is_trained,
        has_processes=model in config.processes_of,
        unknown=unknown,
    )


class StepPhase(msgspec.Struct, frozen=True):
    """One phase of a step."""

    name: str
    parts: Bytes

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())


class RankMemory(msgspec.Struct, frozen=True):
    """A rank's memory."""

    rank: int
    resident: Bytes
    """Weights, gradients and optimizer state, when the optimizer begins."""
    phases: tuple[StepPhase, ...]
    """The phases of a step; only the optimizers' if activations are not known."""

    @property
    def peak(self) -> StepPhase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def knows_activations(self) -> bool:
        """Whether the phases have passes."""
        return any("activations" in phase.parts for phase in self.phases)


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a model beside the policy on one rank, in bytes."""

    title: str
    """Its name among what a rank holds."""
    weights: float
    optimizer: float = 0.0
    """Optimizer state and, on Megatron-Core, the buffer of gradients."""
    gradients: float = 0.0
    """Gradients that are only there in its own steps."""
    master_gradients: float = 0.0
    """Their copies in float32, in its optimizer step."""

    @property
    def resident(self) -> float:
        """All that is there while other models work."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> float:
        """All that it takes in its own optimizer step."""
        return self.resident + self.gradients + self.master_gradients


def memory_of(
    config: Config,
    trainers: ForecastSide,
    *,
    with_activations: bool = True,
    of_refit: Mapping[str, int] | None = None,
    beside: Sequence[BesideModel] = (),
) -> RankMemory:
    """Return the memory of the rank that needs most, the first of several.

    `of_refit` is what a refit takes of each trainer beside what it holds, by name. Of the models `beside` the policy,
    those in its processes count.
    """
    colocated = [each for each in beside if not each.has_processes]
    ranks = _distinct([trainers, *(each.side for each in colocated)])
    memories = [_of_rank(config, trainers, colocated, rank, with_activations=with_activations) for rank in ranks]
    largest = max(memories, key=lambda memory: memory.peak.num_bytes)
    if of_refit is None or not with_activations:
        return largest
    extra = of_refit.get(f"trainer-{largest.rank}", 0)
    return msgspec.structs.replace(largest, phases=(*largest.phases, _refit(config, trainers, largest, extra)))


def part_of(model: BesideModel) -> ModelMemory:
    """Return what a model beside the policy takes of the rank that holds most of it, the first of several."""
    return max((_part(model, rank) for rank in _distinct([model.side])), key=lambda part: part.resident)


def _distinct(sides: Sequence[ForecastSide]) -> list[int]:
    """Return the first rank of each set of ranks that hold the same of every side."""
    num = sides[0].deployment.num_ranks
    places = {tuple(side.deployment.place(rank) for side in sides): rank for rank in reversed(range(num))}
    return sorted(places.values())


def _refit(config: Config, trainers: ForecastSide, memory: RankMemory, extra: float) -> StepPhase:
    """Return the phase in which weights move: a trainer that shares its GPU has the rest in host memory then."""
    _, master_gradients = _measure_resident(config, trainers, memory.rank)
    parts = dict(memory.resident)
    if config.policy.generation.colocated.enabled:
        parts |= {name: 0.0 for name in parts if "weights" not in name and name != "adapters"}
    else:
        parts["optimizer"] -= master_gradients
        parts["gradients"] *= config.policy.megatron_cfg.enabled
    return StepPhase("refit", parts | {"buffers": extra})


def _of_rank(
    config: Config, trainers: ForecastSide, beside: Sequence[BesideModel], rank: int, *, with_activations: bool
) -> RankMemory:
    resident, master_gradients = _measure_resident(config, trainers, rank)
    parts = [_part(model, rank) for model in beside]
    resident |= {part.title: part.resident for part in parts}
    is_megatron = config.policy.megatron_cfg.enabled
    gradients = resident["gradients"]
    idle = {
        **resident,
        "optimizer": resident["optimizer"] - master_gradients,
        # FSDP2 frees gradients after each step. Megatron-Core's have one buffer for good.
        "gradients": gradients if is_megatron else 0.0,
    }
    phases = []
    for pass_memory in passes(config, trainers, rank) if with_activations else ():
        phases.append(_phase_of(pass_memory, {**idle, "gradients": gradients} if pass_memory.activations > 0 else idle))
    optimizer = config.policy.optimizer
    # Without the fused implementation, torch's Adam takes square roots of all second moments at once.
    is_in_parts = not is_megatron and optimizer is not None and optimizer.kwargs.get("fused") is False
    buffers = {"buffers": resident["optimizer"] / 2} if is_in_parts else {}
    phases.append(StepPhase("optimizer step", {**resident, **buffers}))
    for model, part in zip(beside, parts, strict=True):
        for pass_memory in passes(model.config, model.side, rank) if with_activations else ():
            is_training = pass_memory.activations > 0
            if model.is_trained or not is_training:
                phase_parts = {**idle, part.title: part.resident + part.gradients * is_training}
                kind = "passes" if is_training else "scores"
                phases.append(_phase_of(pass_memory, phase_parts, f"{kind} of the {model.name}"))
        if model.is_trained:
            phase_parts = {**idle, part.title: part.peak}
            phases.append(StepPhase(f"optimizer step of the {model.name}", phase_parts))
    return RankMemory(rank, resident, tuple(phases))


def _phase_of(pass_memory: PassMemory, resident: Bytes, name: str = "") -> StepPhase:
    temporary = {"activations": pass_memory.activations, media.TITLE: pass_memory.media, "buffers": pass_memory.buffers}
    return StepPhase(name or pass_memory.name, resident | temporary)


def _part(model: BesideModel, rank: int) -> ModelMemory:
    """Return what a model beside the policy takes of a rank. It has no adapters of its own."""
    dense, experts, adapters, frozen = _weights(model.config, model.side, rank)
    weights = float(dense + experts + adapters + frozen)
    if not model.is_trained:
        return ModelMemory(title=model.name, weights=weights)
    gradients, state, master_gradients = _learning(model.config, dense, experts)
    stays = model.config.policy.megatron_cfg.enabled
    return ModelMemory(
        title=model.name,
        weights=weights,
        optimizer=state - master_gradients + (gradients if stays else 0.0),
        gradients=0.0 if stays else gradients,
        master_gradients=master_gradients,
    )


def _learning(config: Config, dense: float, experts: float) -> tuple[float, float, float]:
    """Return the bytes of gradients, of optimizer state by closed forms for Adam's moments, and of a part of it.

    That part is only there when the optimizer works: copies of the gradients in float32.
    """
    policy, megatron = config.policy, config.policy.megatron_cfg
    weights = gradients = float(dense + experts)
    if not megatron.enabled:
        return gradients, 2.0 * weights, 0.0
    is_half = policy.precision == "bfloat16"
    # Half precision has copies in float32 of weights and, unless gradients are reduced in it, of gradients.
    item_size, bytes_of_state, bytes_of_gradients = (2, 16, 4) if is_half else (4, 8, 0)
    if is_half and megatron.distributed_data_parallel_config.get("grad_reduce_in_fp32"):
        gradients, bytes_of_state, bytes_of_gradients = weights * 2, 12, 0
    a_stage = config.cluster.trainers // megatron.pipeline_model_parallel_size
    shares = a_stage // megatron.tensor_model_parallel_size
    shares_E = a_stage // (megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size)
    if not megatron.optimizer.get("use_distributed_optimizer", True):
        shares = shares_E = 1
    shard = (dense / shares + experts / shares_E) / item_size
    return gradients, bytes_of_state * shard, bytes_of_gradients * shard


def _measure_resident(config: Config, trainers: ForecastSide, rank: int) -> tuple[Bytes, float]:
    """Return what a rank holds of the policy and its reference when its optimizer begins.

    And the part of the optimizer's that is only there then: copies of the gradients in float32.
    """
    dense, experts, adapters, frozen = _weights(config, trainers, rank)
    if config.policy.adapters is not None:  # frozen weights have neither gradients nor optimizer state
        frozen, dense, experts = frozen + dense + experts, adapters, 0
    weights = dense + experts
    gradients, state, master_gradients = _learning(config, dense, experts)
    resident: Bytes = {"weights": weights, "gradients": gradients, "optimizer": state}
    if frozen:
        resident["frozen weights"] = frozen
    if config.policy.adapters is not None:  # without its adapters it is its own reference
        resident = {"frozen weights": frozen, "adapters": weights, "gradients": gradients, "optimizer": state}
    elif config.needs_reference and "reference" not in config.processes_of:
        # On DTensor, trained weights are in float32 whatever the precision of the passes; other weights are in that.
        item_size = 2 if config.policy.precision == "bfloat16" else 4
        trained = item_size if config.policy.megatron_cfg.enabled else 4
        resident["reference model"] = (weights + frozen - _measure_mtp(trainers, rank)) * item_size // trained
    return resident, master_gradients


def _measure_mtp(side: ForecastSide, rank: int) -> int:
    """Return the bytes of a rank's layers of multi-token prediction, which no reference has."""
    storages = side.deployment.look_up_parameters(side.model, rank).storages
    return sum(storage.num_bytes for storage in storages if storage.name.startswith(mtp_layers.PREFIX))


def _weights(config: Config, side: ForecastSide, rank: int) -> tuple[int, int, int, int]:
    """Return the bytes of a rank's weights: those of the rest, of experts, of adapters, and frozen ones."""
    sizes = [0, 0, 0, 0]
    is_frozen = media.find_frozen(config, side.model)
    for storage in side.deployment.look_up_parameters(side.model, rank).storages:
        kind = 2 if lora.is_adapter(storage.name) else int(".experts." in storage.name)
        sizes[3 if is_frozen(storage.name) else kind] += storage.num_bytes
    return sizes[0], sizes[1], sizes[2], sizes[3]


def size_of_gpu() -> float | None:
    """Return the bytes of the smallest GPU of this machine; None without one."""
    with use_nvml() as nvml:
        sizes = [] if nvml is None else [gpu.memory_gb for gpu in nvml.links()]
    known_sizes = [size for size in sizes if size is not None]
    return 1e9 * min(known_sizes) if known_sizes else None


def columns(memory: RankMemory) -> list[str]:
    """Return what the phases hold, in order, without what none of them does."""
    names: Mapping[str, None] = dict.fromkeys(name for phase in memory.phases for name in phase.parts)
    return [name for name in names if any(phase.parts.get(name) for phase in memory.phases)]
