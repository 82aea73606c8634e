"""``coordinator bisect``: name the smallest cause of a run's trouble by short trials."""

from __future__ import annotations

import argparse
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import FAILED, INTERRUPTED, OK, ConfigError
from tandem.coordinator.commands.arguments import Commands, add_run, count, number

if TYPE_CHECKING:
    from tandem.coordinator.bisecting.search import BisectionEnd
    from tandem.coordinator.bisecting.trials import TrialRecord
    from tandem.coordinator.bisecting.troubles import RunTrouble
    from tandem.observe.diagnosis.evidence import RunEvidence

_minutes = number("above 0", lambda value: value > 0)
_limit = number("as a limit", lambda _: True)


def add(commands: Commands) -> None:
    """Declare the command."""
    bisect = commands.add_parser(
        "bisect",
        help="name what broke a run, by short trials with one thing changed",
        description="Name what broke a run: short trials, replays of its samples where training alone shows the "
        "trouble, each with one thing changed. Trials that are done are not done again, so that the same command "
        "continues a search that was interrupted.",
    )
    add_run(bisect)
    bisect.add_argument("--metric", metavar="NAME", help="the trouble is that this metric is beyond a limit")
    limits = bisect.add_mutually_exclusive_group()
    limits.add_argument("--above", type=_limit, metavar="X", help="with --metric: the trouble is a value above X")
    limits.add_argument("--below", type=_limit, metavar="X", help="with --metric: the trouble is a value below X")
    bisect.add_argument("--step", type=count, metavar="N", help="with --metric: the step of the trouble")
    bisect.add_argument("--max-trials", type=count, default=40, metavar="N", help="most trials (default: 40)")
    bisect.add_argument(
        "--budget", type=_minutes, default=120.0, metavar="MINUTES", help="longest time of all trials (default: 120)"
    )
    bisect.add_argument(
        "--trial-minutes", type=_minutes, default=20.0, metavar="M", help="longest time of one trial (default: 20)"
    )
    bisect.add_argument("--restart", action="store_true", help="remove earlier trials and begin anew")
    bisect.add_argument("--json", action="store_true", help="print the table and the cause as JSON")
    bisect.set_defaults(carry_out=_bisect)


def _bisect(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.bisecting.search import RunBisection, TrialLimits
    from tandem.coordinator.bisecting.trials import BisectionInterrupted
    from tandem.observe.diagnosis.evidence import gather

    run: Path = arguments.run
    evidence = gather(run)
    if evidence.config.replay is not None:
        raise ConfigError(f"{run} is a replay, of {evidence.config.replay.run}: bisect that")
    say = partial(print, flush=True) if not arguments.json else _say_nothing
    troubles = _troubles(evidence, arguments)
    if not troubles:
        say(f"{run} shows no trouble: nothing to look for")
        if arguments.json:
            _print_json([], None)
        return OK
    base = run if run.name else run.absolute()
    root = base.with_name(f"{base.name}-bisect")
    if arguments.restart:
        shutil.rmtree(root, ignore_errors=True)
    limits = TrialLimits(
        most_trials=arguments.max_trials, most_s=60 * arguments.budget, trial_s=60 * arguments.trial_minutes
    )
    bisection = RunBisection(evidence, root, limits, say)
    try:
        end = bisection.search(troubles)
    except BisectionInterrupted:
        words = ["coordinator", "bisect", str(run), *_options(arguments)]
        say(f"interrupted; continue with: {shlex.join(words)}")
        return INTERRUPTED
    finally:
        bisection.table.close()
    if arguments.json:
        _print_json(bisection.table.records, end)
    else:
        _print_table(bisection.table.records)
        say(_conclusion(end))
    return OK if end.cause is not None or not end.is_cut_short else FAILED


def _say_nothing(text: str) -> None:
    """Print nothing."""


def _troubles(evidence: RunEvidence, arguments: argparse.Namespace) -> list[RunTrouble]:
    from tandem.common.errors import nearest
    from tandem.coordinator.bisecting.troubles import find_by_hand, find_troubles
    from tandem.observe.diagnosis import diagnose

    metric, above, below = arguments.metric, arguments.above, arguments.below
    if metric is None:
        if above is not None or below is not None or arguments.step is not None:
            raise ConfigError("--above, --below and --step belong to --metric NAME")
        return find_troubles(evidence, diagnose(evidence.folder).findings)
    names = sorted({name for record in evidence.steps for name in record.metrics})
    if metric not in names:
        raise ConfigError(f"--metric {metric}: {evidence.folder} has no such metric{nearest(metric, names)}")
    if above is None and below is None:
        raise ConfigError(f"--metric {metric}: --above X or --below X says what the trouble is")
    trouble = find_by_hand(evidence, metric, above, below, arguments.step)
    return [] if trouble is None else [trouble]


def _options(arguments: argparse.Namespace) -> list[str]:
    values = {
        "--metric": arguments.metric,
        "--above": arguments.above,
        "--below": arguments.below,
        "--step": arguments.step,
    }
    return [f"{option}={value}" for option, value in values.items() if value is not None]


def _conclusion(end: BisectionEnd) -> str:
    if end.cause is None:
        return f"no cause is named: {end.reason}"
    numbers = ", ".join(map(str, end.cause.trials))
    return f"cause of {end.cause.trouble}: {end.cause.text} (trials {numbers})"


def _print_table(records: list[TrialRecord]) -> None:
    """Print the table of trials."""
    from rich.console import Console
    from rich.text import Text

    from tandem.observe.listing import new_table

    console = Console(highlight=False)
    table = new_table(console)
    for name in ("trial", "kind", "change", "outcome", "last values", "steps", "seconds"):
        table.add_column(name, overflow="fold")
    for record in records:
        cells = [str(record.number), record.kind, record.change, record.outcome, record.values]
        table.add_row(*map(Text, [*cells, str(record.num_steps), f"{record.seconds:g}"]))
    console.print(table)


def _print_json(records: list[TrialRecord], end: BisectionEnd | None) -> None:
    from typing import Any

    import msgspec

    content: dict[str, Any] = {"trials": records, "cause": None, "reason": "no trouble"}
    if end is not None:
        content |= {"cause": end.cause, "reason": end.reason}
    print(msgspec.json.format(msgspec.json.encode(content)).decode())
