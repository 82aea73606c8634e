"""Memory of the trainer rank that needs most, in each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.config import Config
from tandem.config.models import lora
from tandem.config.models.vision_families import VISION, VisionFamily, frozen_prefixes
from tandem.observe.exporters.nvml import opened_nvml
from tandem.refit.forecast.activations import PassMemory, passes
from tandem.refit.forecast.beside import BesideModel
from tandem.refit.forecast.sides import ForecastSide

Bytes = dict[str, float]
"""Bytes by what they are for."""


class StepPhase(msgspec.Struct, frozen=True):
    """One phase of a step."""

    name: str
    held: Bytes

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(self.held.values())


class RankMemory(msgspec.Struct, frozen=True):
    """A rank's memory."""

    rank: int
    kept: Bytes
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
        return any("activations" in phase.held for phase in self.phases)


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
    def most(self) -> float:
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
    here = [each for each in beside if not each.has_processes]
    ranks = _distinct([trainers, *(each.side for each in here)])
    found = [_of_rank(config, trainers, here, rank, with_activations=with_activations) for rank in ranks]
    largest = max(found, key=lambda memory: memory.peak.num_bytes)
    if of_refit is None or not with_activations:
        return largest
    extra = of_refit.get(f"trainer-{largest.rank}", 0)
    return msgspec.structs.replace(largest, phases=(*largest.phases, _refit(config, trainers, largest, extra)))


def part_of(each: BesideModel) -> ModelMemory:
    """Return what a model beside the policy takes of the rank that holds most of it, the first of several."""
    return max((_part(each, rank) for rank in _distinct([each.side])), key=lambda part: part.resident)


def _distinct(sides: Sequence[ForecastSide]) -> list[int]:
    """Return the first rank of each set of ranks that hold the same of every side."""
    num = sides[0].deployment.num_ranks
    places = {tuple(side.deployment.place(rank) for side in sides): rank for rank in reversed(range(num))}
    return sorted(places.values())


def _refit(config: Config, trainers: ForecastSide, memory: RankMemory, extra: float) -> StepPhase:
    """Return the phase in which weights move: a trainer that shares its GPU has the rest in host memory then."""
    _, master_gradients = _kept(config, trainers, memory.rank)
    held = dict(memory.kept)
    if config.policy.generation.colocated.enabled:
        held |= {name: 0.0 for name in held if "weights" not in name and name != "adapters"}
    else:
        held["optimizer"] -= master_gradients
        held["gradients"] *= config.policy.megatron_cfg.enabled
    return StepPhase("refit", held | {"buffers": extra})


def _of_rank(
    config: Config, trainers: ForecastSide, beside: Sequence[BesideModel], rank: int, *, with_activations: bool
) -> RankMemory:
    kept, master_gradients = _kept(config, trainers, rank)
    parts = [_part(each, rank) for each in beside]
    kept |= {part.title: part.resident for part in parts}
    is_megatron = config.policy.megatron_cfg.enabled
    gradients = kept["gradients"]
    idle = {
        **kept,
        "optimizer": kept["optimizer"] - master_gradients,
        # FSDP2 frees gradients after each step. Megatron-Core's have one buffer for good.
        "gradients": gradients if is_megatron else 0.0,
    }
    phases = []
    for each in passes(config, trainers, rank) if with_activations else ():
        phases.append(_phase_of(each, {**idle, "gradients": gradients} if each.activations > 0 else idle))
    optimizer = config.policy.optimizer
    # Without the fused implementation, torch's Adam takes square roots of all second moments at once.
    is_in_parts = not is_megatron and optimizer is not None and optimizer.kwargs.get("fused") is False
    buffers = {"buffers": kept["optimizer"] / 2} if is_in_parts else {}
    phases.append(StepPhase("optimizer step", {**kept, **buffers}))
    for model, part in zip(beside, parts, strict=True):
        for each in passes(model.config, model.side, rank) if with_activations else ():
            is_training = each.activations > 0
            if model.is_trained or not is_training:
                held = {**idle, part.title: part.resident + part.gradients * is_training}
                kind = "passes" if is_training else "scores"
                phases.append(_phase_of(each, held, f"{kind} of the {model.name}"))
        if model.is_trained:
            held = {**idle, part.title: part.most}
            phases.append(StepPhase(f"optimizer step of the {model.name}", held))
    return RankMemory(rank, kept, tuple(phases))


def _phase_of(each: PassMemory, held: Bytes, name: str = "") -> StepPhase:
    taken = {"activations": each.activations, "images": each.images, "buffers": each.buffers}
    return StepPhase(name or each.name, held | taken)


def _part(each: BesideModel, rank: int) -> ModelMemory:
    """Return what a model beside the policy takes of a rank. It has no adapters of its own."""
    rest, experts, adapters, frozen = _weights(each.config, each.side, rank)
    weights = float(rest + experts + adapters + frozen)
    if not each.is_trained:
        return ModelMemory(title=each.name, weights=weights)
    gradients, state, master_gradients = _learning(each.config, rest, experts)
    stays = each.config.policy.megatron_cfg.enabled
    return ModelMemory(
        title=each.name,
        weights=weights,
        optimizer=state - master_gradients + (gradients if stays else 0.0),
        gradients=0.0 if stays else gradients,
        master_gradients=master_gradients,
    )


def _learning(config: Config, rest: float, experts: float) -> tuple[float, float, float]:
    """Return the bytes of gradients, of optimizer state by closed forms for Adam's moments, and of a part of it.

    That part is only there when the optimizer works: copies of the gradients in float32.
    """
    policy, megatron = config.policy, config.policy.megatron_cfg
    weights = gradients = float(rest + experts)
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
    shard = (rest / shares + experts / shares_E) / item_size
    return gradients, bytes_of_state * shard, bytes_of_gradients * shard


def _kept(config: Config, trainers: ForecastSide, rank: int) -> tuple[Bytes, float]:
    """Return what a rank holds of the policy and its reference when its optimizer begins.

    And the part of the optimizer's that is only there then: copies of the gradients in float32.
    """
    rest, experts, adapters, frozen = _weights(config, trainers, rank)
    if config.policy.adapters is not None:  # frozen weights have neither gradients nor optimizer state
        frozen, rest, experts = frozen + rest + experts, adapters, 0
    weights = rest + experts
    gradients, state, master_gradients = _learning(config, rest, experts)
    kept: Bytes = {"weights": weights, "gradients": gradients, "optimizer": state}
    if frozen:
        kept["frozen weights"] = frozen
    if config.policy.adapters is not None:  # without its adapters it is its own reference
        kept = {"frozen weights": frozen, "adapters": weights, "gradients": gradients, "optimizer": state}
    elif config.needs_reference and "reference" not in config.processes_of:
        # On DTensor, trained weights are in float32 whatever the precision of the passes; other weights are in that.
        held = 2 if config.policy.precision == "bfloat16" else 4
        trained = held if config.policy.megatron_cfg.enabled else 4
        kept["reference model"] = (weights + frozen) * held // trained
    return kept, master_gradients


def _weights(config: Config, side: ForecastSide, rank: int) -> tuple[int, int, int, int]:
    """Return the bytes of a rank's weights: those of the rest, of experts, of adapters, and frozen ones."""
    sizes = [0, 0, 0, 0]
    family = VISION.get(side.model.family)
    frozen = () if family is None else frozen_prefixes(family, config.policy.dtensor_cfg)
    is_megatron = config.policy.megatron_cfg.enabled
    for storage in side.deployment.kept_parameters(side.model, rank).storages:
        kind = 2 if lora.is_adapter(storage.name) else int(".experts." in storage.name)
        name = _as_seeing(storage.name, family) if family is not None and is_megatron else storage.name
        sizes[3 if frozen and name.startswith(frozen) else kind] += storage.num_bytes
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _as_seeing(name: str, family: VisionFamily) -> str:
    """Return a name of Megatron-Core's as Transformers would begin it; an output layer of its own is in no part."""
    own = name.removeprefix("tower.")
    return own if own != name or name.startswith("output_layer.") else family.language_prefix


def size_of_gpu() -> float | None:
    """Return the bytes of the smallest GPU of this machine; None without one."""
    with opened_nvml() as nvml:
        sizes = [] if nvml is None else [gpu.memory_gb for gpu in nvml.links()]
    known = [size for size in sizes if size is not None]
    return 1e9 * min(known) if known else None


def columns(memory: RankMemory) -> list[str]:
    """Return what the phases hold, in order, without what none of them does."""
    names: Mapping[str, None] = dict.fromkeys(name for phase in memory.phases for name in phase.held)
    return [name for name in names if any(phase.held.get(name) for phase in memory.phases)]
