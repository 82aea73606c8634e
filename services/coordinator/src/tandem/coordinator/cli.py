"""The ``coordinator`` command: run a configuration, check one, look back on a run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tandem.common import collector, signals
from tandem.common.config import dump_yaml, load_config, notices
from tandem.common.errors import ConfigError, TandemError

_EXIT_FAILED = 1
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0 is success, 1 a run that failed, 2 input that cannot be run, 130 a run that was interrupted and saved.
    """
    collector.retire_at_exit()
    arguments = _parse(argv)
    try:
        match arguments.command:
            case "up":
                return _up(arguments)
            case "check":
                return _check(arguments)
            case "report":
                return _report(arguments)
            case "refits":
                return _refits(arguments)
            case "plan":
                return _plan(arguments)
            case other:
                raise AssertionError(other)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; settings may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator", description="Tandem: post-training for language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="run a configuration: launch, train, tear down")
    _add_config_arguments(up)
    how = up.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the run that is in the run folder")
    how.add_argument("--restart", action="store_true", help="set an earlier run in the run folder aside and begin anew")
    check = commands.add_parser("check", help="validate a configuration and print it resolved; starts nothing")
    _add_config_arguments(check)
    report = commands.add_parser("report", help="summarise a run: curves as PNG and JSON, and where the time went")
    report.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")
    report.add_argument("--out", type=Path, help="folder for report.png and report.json (default: the run folder)")
    refits = commands.add_parser("refits", help="list a run's refits: bytes by link, seconds, share of the bound")
    refits.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")
    plan = commands.add_parser("plan", help="explain a run before it starts: ranks, batches, memory, refits")
    _add_config_arguments(plan)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")


def _up(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    from tandem.coordinator.journal_file import JOURNAL_NAME
    from tandem.coordinator.launch import make_importable, preload
    from tandem.coordinator.nursery import Nursery
    from tandem.coordinator.scheduler.events import Finish
    from tandem.coordinator.spec import launched_processes

    make_importable(arguments.config)
    signals.interrupt_when_asked()
    folder = Path(config.logger.log_dir)
    try:
        # First: what follows imports much as well.
        kinds = [kind for kind, count in launched_processes(config).items() if count]
        with Nursery(partial(preload, kinds), config.cluster.deadlines.join_s) as nursery:
            from tandem.coordinator.run import Mode, run

            mode: Mode = "resume" if arguments.resume else "restart" if arguments.restart else "new"
            finish = run(config, mode, lambda text: print(text, flush=True), nursery)
    except KeyboardInterrupt:  # before the loop began, which takes it for itself
        finish = Finish(outcome="interrupted")
    match finish.outcome:
        case "finished":
            from tandem.coordinator.report import format_summary, write_report

            write_report(folder, folder)
            print(format_summary(folder), flush=True)
            return 0
        case "interrupted":
            if config.prerequisite is None and not (folder / JOURNAL_NAME).exists():
                print("interrupted before the run had begun", flush=True)
                return _EXIT_INTERRUPTED
            words = ["coordinator", "up", arguments.config, *arguments.overrides, "--resume"]
            print(f"interrupted; continue with: {shlex.join(words)}", flush=True)
            return _EXIT_INTERRUPTED
        case "failed":
            print(f"error: {finish.error}", file=sys.stderr)
            return _EXIT_FAILED


def _check(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    print(dump_yaml(config), end="")
    for notice in notices(config):
        print(f"note: {notice}", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.report import format_summary, write_report

    write_report(arguments.run, arguments.out or arguments.run)
    print(format_summary(arguments.run))
    return 0


def _refits(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.coordinator.refits import print_refits

    print_refits(arguments.run, Console())
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.coordinator.explain import explain

    explain(load_config(arguments.config, arguments.overrides, to_run=False), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
