"""``coordinator plan``: explain a run before it starts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

import msgspec

from tandem.common.errors import OK, ConfigError, TandemError
from tandem.config import Config, load_config
from tandem.coordinator.commands.arguments import Commands, add_config, count, number

_RATES = ("generation_s", "training_s", "refit_s", "longest_over_mean")
_OF_SIMULATIONS = (
    "gpu",
    "doctor",
    "gpus",
    "mean_length",
    "prompt_length",
    "spread",
    "losses_per_hour",
    "steps",
    "seed",
)


def add(commands: Commands) -> None:
    """Declare the command."""
    plan = commands.add_parser("plan", help="explain a run before it starts: ranks, batches, memory, refits")
    add_config(plan)
    text = "print ranks, memory and the refit as JSON, for machines; without asynchronous steps"
    plan.add_argument("--json", action="store_true", help=text)
    rates = plan.add_argument_group(
        "rates",
        "rates of a synchronous step, from which asynchronous ones are predicted; by default medians of the run "
        "in logger.log_dir, if there is one",
    )
    above_0, from_1 = number("above 0", lambda number: number > 0), number("from 1 on", lambda number: number >= 1)
    for name, text in (
        ("generation", "seconds from the first prompt to the last sample"),
        ("training", "seconds of log-probabilities and optimizer steps"),
        ("refit", "seconds until engines hold new weights"),
    ):
        rates.add_argument(f"--{name}-s", type=above_0, metavar="SECONDS", help=text)
    text = "the longest response of a step over the mean"
    rates.add_argument("--longest-over-mean", type=from_1, metavar="RATIO", help=text)
    _add_simulation(plan)
    plan.set_defaults(carry_out=_plan)


def _add_simulation(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group(
        "simulation",
        "instead, predict whole steps from the rates of GPUs: the run's own scheduler in virtual time",
    )
    from_0, above_0 = number("from 0 on", lambda number: number >= 0), number("above 0", lambda number: number > 0)
    text = "simulate steps, with what tails, ages and lost engines cost; as JSON with --json"
    group.add_argument("--simulate", action="store_true", help=text)
    text = "name the best split of so many GPUs between trainers and engines"
    group.add_argument("--gpus", type=count, metavar="N", help=text)
    group.add_argument("--gpu", metavar="KIND", help="A100, H100, H200 or GB200 (default: the doctor's, else H100)")
    text = "report of coordinator doctor --json, whose measured rates replace those of data sheets"
    group.add_argument("--doctor", metavar="FILE", help=text)
    text = "mean tokens of a response (default: those of the run in logger.log_dir, else a quarter of the longest)"
    group.add_argument("--mean-length", type=above_0, metavar="TOKENS", help=text)
    group.add_argument("--prompt-length", type=count, metavar="TOKENS", help="tokens of a prompt (default: 107)")
    text = "standard deviation of the logarithm of a response's length; 0 for equal ones (default: 0.6)"
    group.add_argument("--spread", type=from_0, metavar="SPREAD", help=text)
    text = "engines that are lost in an hour (default: 1)"
    group.add_argument("--losses-per-hour", type=from_0, metavar="RATE", help=text)
    group.add_argument("--steps", type=count, metavar="N", help="steps to simulate (default: 10)")
    group.add_argument("--seed", type=count, metavar="N", help="another draw of lengths")


def _plan(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    if arguments.simulate:
        return _simulate(arguments)
    from rich.console import Console

    from tandem.coordinator.forecast.plan import explain
    from tandem.coordinator.forecast.plan_ages import GivenRates
    from tandem.coordinator.forecast.plan_json import describe_plan

    rates = GivenRates(**{name: getattr(arguments, name) for name in GivenRates.__struct_fields__})
    config = _load(arguments)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(describe_plan(config))).decode())
    else:
        explain(config, Console(), rates)
    return OK


def _simulate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.coordinator.forecast.simulation.report import (
        SimulationArguments,
        describe_simulation,
        print_simulation,
    )

    config = _load(arguments)
    simulation = SimulationArguments(**{name: getattr(arguments, name) for name in _OF_SIMULATIONS})
    report = describe_simulation(config, lambda settings: _load(arguments, settings), simulation)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_simulation(report, config, Console())
    return OK


def _load(arguments: argparse.Namespace, settings: Sequence[str] = ()) -> Config:
    from tandem.launch.preparing.needed_models import find_on_hub

    config = load_config(arguments.config, [*arguments.overrides, *settings], to_run=False)
    with contextlib.suppress(TandemError):  # a plan is printed even if the model's sizes are unknown
        config, _ = find_on_hub(config, "new", None, fetches_weights=False)
    return config


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for options of the other kind of prediction."""
    refused = _RATES if arguments.simulate else _OF_SIMULATIONS
    wrong = [f"--{name.replace('_', '-')}" for name in refused if getattr(arguments, name) is not None]
    if wrong:
        side = "rates of steps, which --simulate predicts" if arguments.simulate else "needs --simulate"
        raise ConfigError(f"{', '.join(wrong)}: {side}")
