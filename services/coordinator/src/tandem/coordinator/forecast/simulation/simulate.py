"""Whole steps of a configuration, simulated: seconds by phase, tokens a second, idle shares and ages."""

from __future__ import annotations

import copy
import math
import statistics

import msgspec

from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.coordinator.forecast.sides import generation, model_shape, sides, training
from tandem.coordinator.forecast.simulation.gpus import GpuRates
from tandem.coordinator.forecast.simulation.lengths import GroupLengths, LengthSource
from tandem.coordinator.forecast.simulation.roofline import (
    EFFICIENCIES,
    EngineRoofline,
    FittedEfficiencies,
    ModelWork,
    TrainerRoofline,
    describe_work,
    refit_s,
)
from tandem.coordinator.forecast.simulation.virtual_time import SimulatedStep, VirtualRates, VirtualRun
from tandem.coordinator.loop.spec import run_spec
from tandem.coordinator.scheduler.spec import CommandDeadlines, RunSpec
from tandem.refit.adapters.vllm import Vllm

_FOREVER_S = 1e9
_NEVER_LATE = CommandDeadlines(
    join=_FOREVER_S,
    build=_FOREVER_S,
    generate=_FOREVER_S,
    train=_FOREVER_S,
    evaluate=_FOREVER_S,
    refit=_FOREVER_S,
    save=_FOREVER_S,
    leave=_FOREVER_S,
)
_UNLIMITED = 10**9


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The assumptions of a simulation, next to the configuration."""

    gpu: GpuRates
    lengths: LengthSource
    num_steps: int = 10
    """Steps that count."""
    losses_per_hour: float = 0.0
    replace_s: float = 120.0
    seed: int = 0
    fitted: FittedEfficiencies = EFFICIENCIES


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps of a simulated run. Shares are from 0 to 1."""

    num_gpus: int
    num_steps: int
    step_s: float
    generation_s: float
    """Seconds of a step in which engines generate: until the last sample if nothing overlaps, else of a mean engine."""
    logprobs_s: float
    training_s: float
    refit_s: float
    idle_s: float
    """Seconds of a step in which trainers neither compute nor send weights."""
    waiting_s: float
    """Seconds of a step in which the run waits for samples: all of generation if nothing overlaps."""
    tokens_per_s_per_gpu: float
    """Tokens of prompts and responses."""
    engines_idle: float
    """Share of the time in which an engine has nothing to generate."""
    places_idle: float
    """Share of the sequences that engines could run at once, or have of a step if that is less, that they do not."""
    trainers_idle: float
    share_by_age: tuple[float, ...]
    """Share of tokens by the age of the weights that made them, 0 first."""
    longest_over_mean: float
    num_losses: int
    num_too_old: float
    """Rollout groups a step that were made again because their weights were too old."""


class StepModel:
    """The rates of one configuration."""

    def __init__(self, config: Config, options: SimulationOptions, work: ModelWork | None = None) -> None:
        """Take the model's work, if it is known. Raise as `describe_model` does, or if the sizes do not fit it."""
        check(config)
        self.config = config
        self.work = describe_model(config) if work is None else work
        self.trainers, engines = training(config), generation(config)
        assert isinstance(engines, Vllm), "checked"
        self.engines = engines
        for key, size in (("trainers'", getattr(self.trainers, "tp", 1)), ("engines'", engines.tp)):
            if self.work.num_heads % size:
                message = f"--simulate: {self.work.num_heads} attention heads do not divide by the {key} TP{size}"
                raise ConfigError(message)
        self._set(options)

    def replace(self, options: SimulationOptions) -> StepModel:
        """Return the rates with other options."""
        model = copy.copy(self)
        model._set(options)
        return model

    def _set(self, options: SimulationOptions) -> None:
        self.options = options
        share = self.config.policy.generation.vllm_cfg.gpu_memory_utilization
        per_node = self.config.cluster.gpus_per_node
        self.engine = EngineRoofline(self.work, self.engines, options.gpu, options.fitted, share, per_node)
        self.trainer = TrainerRoofline(self.config, self.work, self.trainers, options.gpu, options.fitted)

    def check_memory(self) -> None:
        """Raise `ConfigError` if an engine's weights, or its longest sequence, do not fit its memory."""
        lengths, kind = self.options.lengths, self.options.gpu.kind
        if self.engine.max_tokens < lengths.mean_prompt + lengths.longest:
            raise ConfigError(
                f"--simulate: an engine of {self.engines.tp * self.engines.pp} {kind.name} has no room for the "
                "weights and the longest response: raise policy.generation.vllm_cfg.tensor_parallel_size"
            )

    def draw_step(self) -> list[GroupLengths]:
        """Return the lengths of the groups of a step."""
        section, options = self.config.rollout_section, self.options
        num = section.num_generations_per_prompt
        return [options.lengths.draw(1, group, num, options.seed) for group in range(section.num_prompts_per_step)]

    @property
    def num_places(self) -> int:
        """Sequences that an engine runs at once, if its cache holds them."""
        return self.config.policy.generation.width

    @property
    def num_gpus(self) -> int:
        """GPUs of trainers and engines together."""
        num_trainers, num_engines = self.trainers.num_ranks, self.engines.num_ranks
        return max(num_trainers, num_engines) if self.config.is_colocated else num_trainers + num_engines

    @property
    def refit_s(self) -> float:
        """Seconds of a refit; on shared GPUs, with what it takes to make room for the other side's memory."""
        num_trainers = self.trainers.num_ranks
        gpu, fitted = self.options.gpu, self.options.fitted
        moved_s = refit_s(self.config, self.work, num_trainers, self.engines.replicas, gpu, fitted)
        if not self.config.is_colocated:
            return moved_s
        # Weights in an engine's element type, and AdamW's three copies in float32.
        engine = self.work.num_parameters * self.work.engine_item / (self.engines.tp * self.engines.pp)
        optimizer = 12 * self.work.num_parameters / num_trainers
        return moved_s + fitted.shared_s_per_gb * (engine + optimizer) / 1e9


def describe_model(config: Config) -> ModelWork:
    """Return the work of the policy. Raise `ConfigError` if its sizes are unknown, `ModelError` for unusable files."""
    shape = model_shape(config)
    if isinstance(shape, str):
        raise ConfigError(f"--simulate: the model's sizes are unknown: {shape}: set policy.model_name=FOLDER")
    return describe_work(*sides(config, shape))


def check(config: Config) -> None:
    """Raise `ConfigError` if a configuration cannot be simulated."""
    if not config.generates or not config.declaration.rolls_out:
        raise ConfigError(f"--simulate: algorithm: {config.algorithm} generates nothing whose time could be predicted")
    kind = config.policy.generation.kind
    if not kind.is_on_gpus or not config.cluster.gpus_per_node:
        raise ConfigError(
            "--simulate: the rates of CPUs are unknown: it needs engines on GPUs "
            f"(policy.generation.backend: vllm, not {config.policy.generation.backend}; cluster.gpus_per_node above 0)"
        )
    if not isinstance(generation(config), Vllm):
        raise ConfigError(
            f"--simulate: policy.generation.backend: rates of {config.policy.generation.backend} are unknown"
        )
    if any(config.processes_of.values()) and set(config.processes_of) != {"policy"}:
        models = ", ".join(name for name in config.processes_of if name != "policy")
        raise ConfigError(f"--simulate: cluster.processes_of: processes of their own are not simulated ({models})")
    if len(config.declaration.trains) > 1:
        raise ConfigError(f"--simulate: algorithm: the value model of {config.algorithm} is not simulated")


def simulate(config: Config, options: SimulationOptions) -> SimulatedRun:
    """Simulate a configuration. Raise `ConfigError` if it cannot be, or `ServiceError` if the run would fail."""
    return simulate_model(StepModel(config, options))


def simulate_model(model: StepModel) -> SimulatedRun:
    """Simulate what `StepModel` describes."""
    config, options = model.config, model.options
    model.check_memory()
    age = config.max_trajectory_age_steps
    num_first = 1 + 2 * age if age else 0
    # Steps that are generated together also end together: only whole rounds of them have a mean.
    num_steps = -(-options.num_steps // (age + 1)) * (age + 1)
    spec = _describe_run(config, num_steps + num_first + age)
    rates = VirtualRates(
        engine=model.engine,
        num_places=model.num_places,
        train=model.trainer.step,
        refit_s=model.refit_s,
        between_s=options.fitted.step_s,
        losses_per_hour=options.losses_per_hour,
        notice_s=config.cluster.heartbeat_timeout_s,
        replace_s=options.replace_s,
    )
    num_samples, lengths = config.rollout_section.num_generations_per_prompt, options.lengths
    run = VirtualRun(
        spec,
        rates,
        lambda step, group: lengths.draw(step, group, num_samples, options.seed),
        config.policy.max_total_sequence_length,
        options.seed,
    )
    run.run()
    return _summarise(model, run, num_first, num_steps)


def _describe_run(config: Config, num_steps: int) -> RunSpec:
    """Return the run's own spec, without validation, checkpoints and deadlines, and with one trainer for all ranks."""
    spec = run_spec(config, first_step=1, last_step=num_steps, num_validation=0, resume_from="", checkpoint_folder="")
    return msgspec.structs.replace(
        spec,
        expected={"trainer": 1, "rollout": config.cluster.rollouts, "refit": 1},
        without_policy=frozenset(),
        validate_every=0,
        validate_at_start=False,
        validate_at_end=False,
        save_every=0,
        samples_folder="",
        engines_first=False,
        is_verified=False,
        max_replacements=_UNLIMITED,
        dynamic_sampling=None,
        streaming=None,
        deadlines=_NEVER_LATE,
    )


def _summarise(model: StepModel, run: VirtualRun, num_first: int, num_steps: int) -> SimulatedRun:
    steps: list[SimulatedStep] = run.steps[num_first : num_first + num_steps]
    began = run.steps[num_first - 1].ended_at if num_first else run.steps[0].ended_at - steps[0].by_phase["total"]
    seconds = steps[-1].ended_at - began
    num = len(steps)
    step_s = seconds / num

    def mean(name: str) -> float:
        return sum(step.by_phase.get(name, 0.0) for step in steps) / num

    logprobs_s, training_s = (statistics.fmean(getattr(step, name) for step in steps) for name in _OF_TRAINERS)
    engines, ended_at = run.engines.values(), run.steps[-1].ended_at
    busy_s = sum(engine.busy_s for engine in engines) / len(engines)
    per_engine = model.config.units_per_step / len(engines)
    places = min(model.num_places, per_engine * (1 + model.config.max_trajectory_age_steps))
    place_s = sum(engine.place_s for engine in engines) / len(engines) / places
    generated_share = busy_s / ended_at
    total = sum(run.tokens_by_age.values())
    ages = range(model.config.max_trajectory_age_steps + 1)
    computed = logprobs_s + training_s + (model.refit_s if model.config.max_trajectory_age_steps else mean("refit"))
    return SimulatedRun(
        num_gpus=model.num_gpus,
        num_steps=num,
        step_s=step_s,
        generation_s=generated_share * step_s if model.config.max_trajectory_age_steps else mean("generation"),
        logprobs_s=logprobs_s,
        training_s=training_s,
        refit_s=mean("refit") or model.refit_s,
        idle_s=max(0.0, step_s - computed),
        waiting_s=mean("generation"),
        tokens_per_s_per_gpu=sum(step.num_tokens for step in steps) / seconds / model.num_gpus,
        engines_idle=max(0.0, 1 - generated_share),
        places_idle=max(0.0, 1 - place_s / ended_at),
        trainers_idle=max(0.0, 1 - (logprobs_s + training_s) / step_s),
        share_by_age=tuple(run.tokens_by_age.get(age, 0) / total for age in ages),
        longest_over_mean=statistics.fmean(step.longest_over_mean for step in steps),
        num_losses=run.num_losses,
        num_too_old=run.num_too_old / max(1, len(run.steps)),
    )


_OF_TRAINERS = ("logprobs_s", "training_s")


def usual_longest(config: Config, prompt: int) -> int:
    """Return the most tokens of a response after a prompt."""
    generation, longest = config.policy.generation, config.policy.max_total_sequence_length
    return max(1, math.floor(min(generation.max_new_tokens, longest - prompt)))
