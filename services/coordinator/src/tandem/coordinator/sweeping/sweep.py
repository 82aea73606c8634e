"""``coordinator sweep``: run a configuration once for each combination of values."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands, add_config, count

if TYPE_CHECKING:
    from tandem.coordinator.sweeping.checking import PlannedRun, SweepSettings


def add(commands: Commands) -> None:
    """Declare the command."""
    sweep = commands.add_parser(
        "sweep",
        help="run a configuration for all combinations of values, key=1,2,3",
        description="Run a configuration once for each combination of the values that keys have, such as "
        "grpo.seed=1,2,3 policy.optimizer.kwargs.lr=1e-6,3e-6. Runs that have finished are left alone, "
        "so that the same command continues a sweep that was interrupted.",
    )
    add_config(sweep)
    sweep.add_argument(
        "--jobs", type=count, metavar="N", help="runs at a time (default: as cores and memory have room for)"
    )
    sweep.add_argument("--restart", action="store_true", help="set earlier runs of the sweep aside and begin anew")
    sweep.add_argument("--json", action="store_true", help="print the table at the end as JSON; lines go to the errors")
    sweep.set_defaults(carry_out=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from tandem.config import load_config, notices
    from tandem.coordinator.sweeping.checking import check_runs, combinations, parse_sweep, plan_runs, representatives
    from tandem.coordinator.sweeping.side_by_side import SideBySide

    say = partial(print, flush=True, file=sys.stderr if arguments.json else sys.stdout)
    settings = parse_sweep(arguments.overrides)
    root = _root(arguments.config, settings)
    runs = plan_runs(arguments.config, combinations(settings, root), restarts=arguments.restart)
    _refuse_ports(runs, arguments.jobs)
    for notice in notices(load_config(arguments.config, runs[0].settings)):
        say(f"note: {notice}")
    waiting = [run for run in runs if run.progress != "finished"]
    representative_runs = representatives(settings, [run.combination for run in runs])
    check_runs(arguments.config, [run for run in waiting if run.combination in representative_runs], len(runs))
    num_finished = len(runs) - len(waiting)
    say(f"{len(runs)} runs below {root}{f', of which {num_finished} have finished before' if num_finished else ''}")
    code = OK
    if waiting:
        side_by_side = SideBySide(arguments.config, waiting, len(runs), arguments.jobs, say)
        code = side_by_side.run(["--restart"] if arguments.restart else [])
    _report(settings, runs, root, is_json=arguments.json)
    if code != OK:
        jobs = [f"--jobs={arguments.jobs}"] if arguments.jobs else []
        words = ["coordinator", "sweep", arguments.config, *arguments.overrides, *jobs]
        say(f"continue with: {shlex.join(words)}")
    return code


def _root(path: str, settings: SweepSettings) -> Path:
    """Return the folder of a sweep's runs: beside the run folder that the configuration names."""
    from tandem.common.errors import ConfigError
    from tandem.config import load_config, valid_part

    try:
        config = load_config(path, settings.fixed)
    except ConfigError:  # a swept key may be what it lacks; all problems are said once combinations are loaded
        part = valid_part(path, settings.fixed)
        if part is None:
            raise
        config = part.config
    folder = Path(config.logger.log_dir)
    return folder.with_name(f"{folder.name}_sweep")


def _refuse_ports(runs: Sequence[PlannedRun], jobs: int | None) -> None:
    """Raise `ConfigError` if runs that are to go on side by side would listen at the same port."""
    from tandem.common.errors import ConfigError

    config = runs[0].config
    fixed = {
        "logger.page": isinstance(config.logger.page, int),
        "logger.prometheus.port": config.logger.prometheus.port not in (None, 0),
        "cluster.address": not config.cluster.address.endswith((":*", ":0")),
    }
    problems = [
        f"{key}: runs side by side cannot share a port; use --jobs 1" for key, is_fixed in fixed.items() if is_fixed
    ]
    if problems and jobs != 1 and len(runs) > 1:
        raise ConfigError(*problems)


def _report(settings: SweepSettings, runs: Sequence[PlannedRun], root: Path, *, is_json: bool) -> None:
    """Print the table of a sweep, and write its curves."""
    import msgspec
    from rich.console import Console

    from tandem.observe.listing import print_combinations, read_run
    from tandem.observe.report.report import write_report

    keys = [each.key for each in settings.swept]
    rows = {run.combination.values: read_run(run.folder).row for run in runs}
    if is_json:
        content = [
            {"settings": dict(zip(keys, values, strict=True)), **msgspec.to_builtins(row)}
            for values, row in rows.items()
        ]
        print(msgspec.json.format(msgspec.json.encode(content)).decode())
        return
    print_combinations(keys, rows, Console(highlight=False))
    folders = [run.folder for run in runs if rows[run.combination.values].step > 0]
    if folders:
        write_report(folders, root, is_brief=True)
        print(f"curves: {root / 'report.html'}; on the page: coordinator view {shlex.quote(str(root))}/*/")
