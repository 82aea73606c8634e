"""The output of ``coordinator plan CONFIG --simulate``: steps, costs of tails and losses, and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.common.errors import ConfigError, RunFolderError, SamplesError
from tandem.config import Config
from tandem.coordinator.forecast.sides import generation, training, words
from tandem.coordinator.forecast.simulation import simulate
from tandem.coordinator.forecast.simulation.gpus import GPU_KINDS, find_rates
from tandem.coordinator.forecast.simulation.lengths import (
    RUNAWAYS,
    SPREAD,
    LengthSource,
    fit_lengths,
    read_lengths,
)
from tandem.coordinator.forecast.simulation.splits import LoadConfig, SplitSearch, search_splits

_AGES = (1, 2, 4)
_PROMPT = 107
"""Tokens of a prompt where nothing is known: those of the published runs."""
_USUAL_SHARE = 4
"""The longest response over the mean, where nothing is known."""
_STEPS = 10
_STEPS_PER_LOSS = 3
_LEAST_LOSSES = 4
_WIDTH = 160
NOTE = "predicted, not measured: docs/planning.md says how far such predictions were off"


class SimulationArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a simulation on the command line; None for those that it leaves open."""

    gpu: str | None = None
    doctor: str | None = None
    gpus: int | None = None
    mean_length: float | None = None
    prompt_length: int | None = None
    spread: float | None = None
    losses_per_hour: float | None = None
    steps: int | None = None
    seed: int | None = None


class SimulatedVariant(msgspec.Struct, frozen=True):
    """The configuration with one thing changed."""

    name: str
    run: simulate.SimulatedRun


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a simulation."""

    model: str
    trainers: str
    engines: str
    run: simulate.SimulatedRun
    variants: tuple[SimulatedVariant, ...]
    """Responses all alike, and other ages where trainers and engines have GPUs of their own."""
    seconds_per_loss: float | None
    """Cost of a lost engine; None for a run with one engine, which waits for its replacement."""
    losses_per_hour: float
    share_lost: float | None
    """Share of the time that so many losses an hour take."""
    search: SplitSearch | None
    lengths: str
    gpu: str
    assumptions: tuple[str, ...]
    note: str = NOTE


def describe_simulation(config: Config, load: LoadConfig, arguments: SimulationArguments) -> SimulationReport:
    """Simulate a configuration, its variants, and splits of a budget. Raise `ConfigError` if it cannot be simulated."""
    simulate.check(config)
    if arguments.gpu is not None and arguments.gpu not in GPU_KINDS:
        raise ConfigError(f"--gpu: {arguments.gpu!r} is not one of {', '.join(GPU_KINDS)}")
    options = simulate.SimulationOptions(
        gpu=find_rates(arguments.gpu, arguments.doctor, config.cluster.links),
        lengths=_find_lengths(config, arguments),
        num_steps=arguments.steps or _STEPS,
        seed=arguments.seed or 0,
    )
    model = simulate.StepModel(config, options)
    run = simulate.simulate_model(model)
    per_hour = 1.0 if arguments.losses_per_hour is None else arguments.losses_per_hour
    seconds = _measure_loss(model, run) if per_hour else None
    search = None if arguments.gpus is None else search_splits(config, load, arguments.gpus, options)
    return SimulationReport(
        model=config.policy.model_name,
        trainers=f"{config.cluster.trainers} trainers: {words(config, training(config))}",
        engines=f"{generation(config).num_ranks} engine GPUs: {words(config, generation(config))}",
        run=run,
        variants=tuple(_vary(model, load)),
        seconds_per_loss=seconds,
        losses_per_hour=per_hour,
        share_lost=None if seconds is None else seconds * per_hour / (3600 + seconds * per_hour),
        search=search,
        lengths=options.lengths.source,
        gpu=f"{options.gpu.kind.name}: {options.gpu.source}",
        assumptions=(
            *(() if arguments.gpu or arguments.doctor else ("--gpu is not given: as if on H100",)),
            "prompts of a group are prefilled once; rewards, environments and tools take no time",
            *(("every group is worth training on",) if config.rollout_section.use_dynamic_sampling else ()),
            "sequences fill packed rows as well as they can, and data-parallel ranks get equal work",
            "validation, checkpoints and the check of weights are left out; any number of engines may be replaced",
        ),
    )


def _find_lengths(config: Config, arguments: SimulationArguments) -> LengthSource:
    """Return lengths as given, else of the run in the run folder, else assumed."""
    settings = (arguments.mean_length, arguments.prompt_length, arguments.spread)
    if all(setting is None for setting in settings):
        try:
            recorded = read_lengths(Path(config.logger.log_dir))
        except (SamplesError, RunFolderError) as error:
            raise ConfigError(
                f"--simulate: lengths of the run in logger.log_dir: {error}; give --mean-length"
            ) from error
        if recorded is not None:
            longest = max(group.prompt for group in recorded.recorded) + recorded.longest
            if longest > config.policy.max_total_sequence_length:
                raise ConfigError(
                    f"policy.max_total_sequence_length: {config.policy.max_total_sequence_length} is less than the "
                    f"{longest} tokens of a sample of the run in {config.logger.log_dir}: give --mean-length"
                )
            return recorded
    prompt = _PROMPT if arguments.prompt_length is None else arguments.prompt_length
    longest = simulate.usual_longest(config, prompt)
    if config.policy.max_total_sequence_length <= prompt:
        raise ConfigError(
            f"--prompt-length: {prompt} tokens leave no room within policy.max_total_sequence_length "
            f"({config.policy.max_total_sequence_length})"
        )
    mean = max(1.0, longest / _USUAL_SHARE) if arguments.mean_length is None else arguments.mean_length
    spread = SPREAD if arguments.spread is None else arguments.spread
    return fit_lengths(mean, longest, prompt, spread=spread, runaways=RUNAWAYS if spread else 0.0)


def _vary(model: simulate.StepModel, load: LoadConfig) -> list[SimulatedVariant]:
    """Simulate the configuration with one thing changed at a time."""
    config = model.config
    options = msgspec.structs.replace(model.options, num_steps=min(model.options.num_steps, _STEPS))
    even = msgspec.structs.replace(options, lengths=options.lengths.even)
    variants = [SimulatedVariant("responses all alike", simulate.simulate_model(model.replace(even)))]
    if config.is_colocated:
        return variants
    key = config.asynchronous_key
    for age in (0, *_AGES):
        if age == config.max_trajectory_age_steps:
            continue
        settings = [f"{key}.enabled={str(age > 0).lower()}"]
        if age:
            settings += [f"{key}.max_trajectory_age_steps={age}", f"{key}.in_flight_weight_updates=true"]
        try:
            aged = simulate.StepModel(load(settings), options, model.work)
        except ConfigError:  # settings that only go with the configured age
            continue
        variants.append(SimulatedVariant(f"age {age}", simulate.simulate_model(aged)))
    return variants


def _measure_loss(model: simulate.StepModel, run: simulate.SimulatedRun) -> float | None:
    """Return the seconds that a lost engine costs, from a run that loses several."""
    if model.config.cluster.rollouts < 2:
        return None
    options = model.options
    num_steps = _STEPS_PER_LOSS * _LEAST_LOSSES
    rate = 3600 / (_STEPS_PER_LOSS * run.step_s)
    losing = msgspec.structs.replace(options, num_steps=num_steps, losses_per_hour=rate)
    calm = msgspec.structs.replace(options, num_steps=num_steps)
    with_losses, without = simulate.simulate_model(model.replace(losing)), simulate.simulate_model(model.replace(calm))
    if not with_losses.num_losses:
        return None
    lost_s = (with_losses.step_s - without.step_s) * with_losses.num_steps
    return max(0.0, lost_s / with_losses.num_losses)


# --- for people ------------------------------------------------------------------------------------------------------


def print_simulation(report: SimulationReport, config: Config, console: Console) -> None:
    """Print a report."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    placement = "on the same GPUs" if config.is_colocated else "on GPUs of their own"
    console.print(
        f"[bold]{report.model}[/] simulated on {report.run.num_gpus:,} {report.gpu.partition(':')[0]}", soft_wrap=True
    )
    console.print(f"  {report.trainers}; {report.engines}; {placement}", soft_wrap=True)
    age = config.max_trajectory_age_steps
    name = "as configured" + (f" (age {age})" if age else "")
    console.print(_table([(name, report.run), *((each.name, each.run) for each in report.variants)]))
    console.print(f"  {_describe_loss(report)}", soft_wrap=True)
    if report.search is not None:
        _print_search(report.search, console)
    console.print(
        f"  lengths: {report.lengths}; the longest of a step {report.run.longest_over_mean:.2g} × the mean",
        style="dim",
        soft_wrap=True,
    )
    console.print(f"  rates: {report.gpu}", style="dim", soft_wrap=True)
    for line in report.assumptions:
        console.print(f"  assumed: {line}", style="dim", soft_wrap=True)
    console.print(f"  {report.note}", style="dim", soft_wrap=True)


_COLUMNS = (
    "step",
    "generation",
    "log-probs",
    "training",
    "refit",
    "idle",
    "tokens/s/GPU",
    "engines idle",
    "trainers idle",
)


def _table(rows: Sequence[tuple[str, simulate.SimulatedRun]]) -> Table:
    table = _make_table("seconds", *_COLUMNS, "tokens by age 0, 1, ...")
    for name, run in rows:
        table.add_row(name, *_cells(run), " ".join(f"{share:.0%}" for share in run.share_by_age))
    return table


def _make_table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(
            column,
            justify="left" if column.startswith(("tokens by", "engines:", "trainers:")) else "right",
            no_wrap=True,
        )
    return table


def _cells(run: simulate.SimulatedRun) -> tuple[str, ...]:
    seconds = (run.step_s, run.generation_s, run.logprobs_s, run.training_s, run.refit_s, run.idle_s)
    shares = (run.engines_idle, run.trainers_idle)
    return (*map(_number, seconds), _number(run.tokens_per_s_per_gpu), *(f"{share:.0%}" for share in shares))


def _number(value: float) -> str:
    """Return three digits, or all before the point."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, min(3, digits))}f}"


def _describe_loss(report: SimulationReport) -> str:
    if report.losses_per_hour == 0:
        return "no engine is lost"
    if report.seconds_per_loss is None or report.share_lost is None:
        return "a lost engine: there is one, and the run waits for its replacement"
    return (
        f"a lost engine costs {report.seconds_per_loss:.3g} s; with {report.losses_per_hour:g} an hour "
        f"{report.share_lost:.1%} of the time"
    )


def _print_search(search: SplitSearch, console: Console) -> None:
    columns = ("step", "tokens/s/GPU", "engines idle", "trainers idle", "trainers:", "engines:", "GB of a trainer")
    table = _make_table(f"splits of {search.budget:,} GPUs", *columns)
    for split in search.splits:
        name = f"{split.num_trainers} shared" if split.is_shared else f"{split.num_trainers} + {split.num_engine_gpus}"
        cells = _cells(split.run)
        memory = "" if split.memory_gb is None else f"{split.memory_gb:.0f}{'' if split.fits else ', too much'}"
        sizes = (text.partition(" ")[2] for text in (split.trainers, split.engines))
        table.add_row(name + " *" * (split is search.best), cells[0], *cells[-3:], *sizes, memory)
    console.print(table)
    best = search.best
    if best is None:
        console.print("  none fits the memory of its trainers: raise their parallel sizes, or --gpus", soft_wrap=True)
    else:
        console.print(f"  * the best: {' '.join(best.settings)}", soft_wrap=True)
    if search.num_refused:
        message = f"  {search.num_refused} others cannot be; the last: {search.refusal}"
        console.print(message, style="dim", soft_wrap=True)
