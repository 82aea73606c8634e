"""Splits of a budget of GPUs between trainers and engines, with their parallel sizes, each simulated.

Trainers and engines are apart, in eighths of the budget, or take turns on all of it. Of their tensor parallel sizes,
the configured ones, their halves and their doubles are considered. For trainers, the fastest is chosen by its roofline;
for engines, by one of them that generates its share of a step alone. What remains is simulated. If trainers need more
memory than a GPU has, the next fastest take their place. Configurations that Tandem itself refuses are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tandem.common.errors import ConfigError, RefitError
from tandem.config import Config
from tandem.coordinator.forecast.memory import describe_beside_models, memory_of
from tandem.coordinator.forecast.sides import model_shape, sides, words
from tandem.coordinator.forecast.simulation import roofline, simulate, virtual_time

_EIGHTHS = 8
_SCALES = (1, 0.5, 2)
_MOST_CHECKED = 12
"""Splits whose trainers' memory is computed, from the fastest on, until one fits."""

LoadConfig = Callable[[Sequence[str]], Config]
"""Loads the configuration with further settings. Raises `ConfigError` if these cannot be."""


class GpuSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A division of GPUs, and what it leads to."""

    num_trainers: int
    num_engine_gpus: int
    is_shared: bool
    """Whether engines have the trainers' GPUs."""
    trainers: str
    """Library and parallel sizes, as in the plan."""
    engines: str
    settings: tuple[str, ...]
    """Settings that lead to it."""
    run: simulate.SimulatedRun
    memory_gb: float | None = None
    """GB of the trainer that needs most, at its peak; None if it was not computed."""
    fits: bool = True
    """Whether that is within a GPU's memory, as far as it was computed."""


class SplitSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The splits of a budget."""

    budget: int
    splits: tuple[GpuSplit, ...]
    """The fastest first."""
    num_refused: int
    """Candidates that Tandem refuses, or that have no room for an engine's weights."""
    refusal: str
    """The reason of the last of these."""

    @property
    def best(self) -> GpuSplit | None:
        """The fastest that fits."""
        return next((split for split in self.splits if split.fits), None)


class _Candidates:
    """Models of configurations, of which some are refused."""

    def __init__(self, load: LoadConfig, options: simulate.SimulationOptions, work: roofline.ModelWork) -> None:
        self._load, self._options, self._work = load, options, work
        self.num_refused, self.refusal = 0, ""

    def describe(self, settings: Sequence[str]) -> simulate.StepModel | None:
        """Return the model of a configuration; None if it is refused."""
        try:
            model = simulate.StepModel(self._load(settings), self._options, self._work)
            model.check_memory()
        except (ConfigError, RefitError) as error:
            self.refuse(str(error))
            return None
        return model

    def refuse(self, reason: str) -> None:
        """Count a candidate that cannot be."""
        self.num_refused += 1
        self.refusal = reason


Candidate = tuple[list[str], simulate.StepModel]
"""The settings of a split, and its model."""


def search_splits(config: Config, load: LoadConfig, budget: int, options: simulate.SimulationOptions) -> SplitSearch:
    """Simulate splits of `budget` GPUs. Raise `ConfigError` if none can be."""
    candidates = _Candidates(load, options, simulate.describe_model(config))
    slower: dict[tuple[bool, int], list[Candidate]] = {}
    splits: list[GpuSplit] = []
    for division in _divide(config, budget):
        shared, num_trainers = division
        slower[division] = _choose_sizes(candidates, config, budget, num_trainers, shared=shared)
        if slower[division]:
            splits.append(_simulate(slower[division].pop(0), shared=shared))
    if not splits:
        raise ConfigError(f"--gpus: no split of {budget} GPUs can be: {candidates.refusal}")
    for _ in range(_MOST_CHECKED):
        splits.sort(key=lambda split: split.run.step_s)
        place = next((at for at, split in enumerate(splits) if split.memory_gb is None), None)
        if place is None:
            break
        split = splits[place] = _check_memory(splits[place], load, options)
        if split.fits:
            break
        remaining = slower[split.is_shared, split.num_trainers]
        if remaining:
            splits[place] = _simulate(remaining.pop(0), shared=split.is_shared)
    return SplitSearch(
        budget=budget,
        splits=tuple(splits),
        num_refused=candidates.num_refused,
        refusal=candidates.refusal,
    )


def _simulate(candidate: Candidate, *, shared: bool) -> GpuSplit:
    settings, model = candidate
    return GpuSplit(
        num_trainers=model.config.cluster.trainers,
        num_engine_gpus=model.engines.num_ranks,
        is_shared=shared,
        trainers=words(model.config, model.trainers),
        engines=words(model.config, model.engines),
        settings=tuple(settings),
        run=simulate.simulate_model(model),
    )


def _divide(config: Config, budget: int) -> Iterator[tuple[bool, int]]:
    """Yield whether GPUs are shared, and how many trainers there are."""
    yield True, budget
    per_node = config.cluster.gpus_per_node
    unit = per_node if budget > per_node else 1
    counts = {round(eighth * budget / _EIGHTHS / unit) * unit for eighth in range(1, _EIGHTHS)}
    yield from ((False, count) for count in sorted(counts) if 0 < count < budget)


def _choose_sizes(
    candidates: _Candidates, config: Config, budget: int, num_trainers: int, *, shared: bool
) -> list[Candidate]:
    """Return the settings and models of a split with the best engines, the fastest trainers first."""
    num_engine_gpus = budget if shared else budget - num_trainers
    policy = config.policy
    engine, is_megatron = policy.generation.vllm_cfg, policy.megatron_cfg.enabled
    key = "megatron_cfg.tensor_model_parallel_size" if is_megatron else "dtensor_cfg.tensor_parallel_size"
    tp = policy.megatron_cfg.tensor_model_parallel_size if is_megatron else policy.dtensor_cfg.tensor_parallel_size

    def describe(tp: int, engine_tp: int) -> list[Candidate]:
        num_of_engine = engine_tp * engine.pipeline_parallel_size
        if num_engine_gpus < num_of_engine:
            candidates.refuse(f"an engine of {num_of_engine} GPUs is more than {num_engine_gpus}")
            return []
        settings = [
            *_place(config, budget, num_trainers, num_engine_gpus, shared=shared),
            f"policy.{key}={tp}",
            f"policy.generation.vllm_cfg.tensor_parallel_size={engine_tp}",
            f"cluster.rollouts={num_engine_gpus // num_of_engine}",
        ]
        model = candidates.describe(settings)
        return [] if model is None else [(settings, model)]

    trainer_sizes = [*dict.fromkeys(_scale(tp, scale) for scale in _SCALES)]
    engine_sizes = dict.fromkeys(_scale(engine.tensor_parallel_size, scale) for scale in _SCALES)
    for trainer_tp in trainer_sizes:
        by_engine = [candidate for size in engine_sizes for candidate in describe(trainer_tp, size)]
        if by_engine:
            best = min(by_engine, key=lambda candidate: _measure_engine(candidate[1]))
            by_trainer = [best]
            for size in trainer_sizes:
                by_trainer += describe(size, best[1].engines.tp) if size != trainer_tp else []
            return sorted(by_trainer, key=lambda candidate: _measure_training(candidate[1]))
    return []


def _scale(size: int, scale: float) -> int:
    return max(1, int(size * scale))


def _place(config: Config, budget: int, num_trainers: int, num_engine_gpus: int, *, shared: bool) -> Iterator[str]:
    """Yield the settings that place trainers and engines."""
    per_node = config.cluster.gpus_per_node
    num_nodes = -(-budget // per_node)
    yield f"cluster.num_nodes={num_nodes}"
    yield f"cluster.trainers={num_trainers}"
    yield f"policy.generation.colocated.enabled={str(shared).lower()}"
    if shared:
        if config.max_trajectory_age_steps:
            yield f"{config.asynchronous_key}.enabled=false"
        return
    if num_nodes > 1:
        yield f"policy.generation.colocated.resources.num_nodes={-(-num_engine_gpus // per_node)}"
        yield f"policy.generation.colocated.resources.gpus_per_node={per_node}"
    else:
        yield "policy.generation.colocated.resources.num_nodes=null"
        yield f"policy.generation.colocated.resources.gpus_per_node={num_engine_gpus}"


def _measure_training(model: simulate.StepModel) -> float:
    """Return the seconds of trainers for a step."""
    seconds = model.trainer.step([group.prompt + n for group in model.draw_step() for n in group.responses])
    return seconds.logprobs_s + seconds.training_s


def _measure_engine(model: simulate.StepModel) -> float:
    """Return the seconds that an engine alone takes for its share of a step."""
    groups = model.draw_step()
    share = -(-len(groups) // model.config.cluster.rollouts)
    return virtual_time.measure_generation(model.engine, model.num_places, groups[:share])


def _check_memory(split: GpuSplit, load: LoadConfig, options: simulate.SimulationOptions) -> GpuSplit:
    """Compute the memory of the trainer that needs most."""
    config = load(split.settings)
    shape = model_shape(config)
    assert not isinstance(shape, str), "simulated"
    trainers, _ = sides(config, shape)
    peak = memory_of(config, trainers, beside=describe_beside_models(config, shape)).peak.num_bytes
    fits = peak <= options.gpu.kind.memory_gb * 1e9
    return msgspec.structs.replace(split, memory_gb=peak / 1e9, fits=fits)
