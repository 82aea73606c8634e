"""``coordinator plan``: explain a run before it starts."""

from __future__ import annotations

import argparse
import contextlib

import msgspec

from tandem.common.errors import TandemError
from tandem.config import load_config
from tandem.coordinator.commands.arguments import Commands, add_config, number
from tandem.launch.exit_codes import OK


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
    plan.set_defaults(carry_out=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.launch.preparing.hub_models import find_on_hub
    from tandem.refit.forecast.plan import explain
    from tandem.refit.forecast.plan_ages import GivenRates
    from tandem.refit.forecast.plan_json import describe_plan

    rates = GivenRates(**{name: getattr(arguments, name) for name in GivenRates.__struct_fields__})
    config = load_config(arguments.config, arguments.overrides, to_run=False)
    with contextlib.suppress(TandemError):  # a plan is printed even if the model's sizes are unknown
        config, _ = find_on_hub(config, "new", None, fetches_weights=False)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(describe_plan(config))).decode())
    else:
        explain(config, Console(), rates)
    return OK
