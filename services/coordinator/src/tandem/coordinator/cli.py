"""The ``coordinator`` command: run a configuration, check one, look back on a run."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tandem.common import gc_tuning, signals
from tandem.common.config import dump_yaml, load_config, notices
from tandem.common.errors import ConfigError, DamagedCheckpoint, TandemError

if TYPE_CHECKING:
    from tandem.common.config import Config
    from tandem.coordinator.run.prerequisite import Mode, Ready

_EXAMPLE = "example: coordinator up examples/arithmetic.yaml grpo.max_num_steps=20"
_EXIT_FAILED = 1
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0 is success, 1 a run that failed, 2 input that cannot be run, 130 a run that was interrupted and saved.
    """
    gc_tuning.retire_at_exit()
    arguments = _parse(argv)
    try:
        match arguments.command:
            case "up":
                return _up(arguments)
            case "check":
                return _check(arguments)
            case "replay":
                return _replay(arguments)
            case "report":
                return _report(arguments)
            case "refits":
                return _refits(arguments)
            case "plan":
                return _plan(arguments)
            case other:
                raise AssertionError(other)
    except ConfigError as error:
        for line in error.problems:
            print(f"error: {line}", file=sys.stderr)
        if len(error.problems) > 1:
            print(f"{len(error.problems)} problems", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except DamagedCheckpoint as error:
        print(f"error: {error}; {_way_out(error, arguments)}", file=sys.stderr)
        return _EXIT_FAILED
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says by an example what to type."""

    def error(self, message: str) -> NoReturn:
        """Print usage, what is wrong and an example; exit with code 2."""
        self.exit(_EXIT_BAD_INPUT, f"{self.format_usage()}{self.prog}: error: {message}\n{_EXAMPLE}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; settings may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    if arguments.command == "up" and arguments.from_step is not None and not arguments.resume:
        parser.error("--from STEP says where to --resume: give both")
    if arguments.command == "replay" and arguments.resume and arguments.to_step is not None:
        parser.error("--to STEP is said when a replay begins: leave it out with --resume")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="coordinator", description="Tandem: post-training for language models.", epilog=_EXAMPLE)
    parser.add_argument("--version", action="version", version=f"tandem {importlib.metadata.version('tandem')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="run a configuration: launch, train, tear down")
    _add_config_arguments(up)
    how = up.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the run that is in the run folder")
    how.add_argument("--restart", action="store_true", help="set an earlier run in the run folder aside and begin anew")
    up.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="with --resume: go on from the checkpoint of this step, and do later ones again",
    )
    replay = commands.add_parser("replay", help="train again on the samples that a run recorded, with no engine")
    replay.add_argument("run", type=Path, metavar="RUN", help="run folder; with --resume that of the replay")
    replay.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the run's")
    replay.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="begin after this step, from the run's checkpoint (default: as early as samples are recorded)",
    )
    replay.add_argument(
        "--to", dest="to_step", type=int, metavar="STEP", help="end with this step (default: the newest recorded)"
    )
    replay.add_argument("--resume", action="store_true", help="continue the replay whose run folder RUN is")
    check = commands.add_parser("check", help="find what is wrong with a run before it starts; starts nothing")
    _add_config_arguments(check)
    check.add_argument("--resolved", action="store_true", help="print the whole configuration, every default filled in")
    report = commands.add_parser("report", help="summarise a run: curves as PNG and JSON, and where the time went")
    report.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")
    report.add_argument("--out", type=Path, help="folder for report.png and report.json (default: the run folder)")
    refits = commands.add_parser("refits", help="list a run's refits: bytes by link, seconds, share of the bound")
    refits.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")
    plan = commands.add_parser("plan", help="explain a run before it starts: ranks, batches, memory, refits")
    _add_config_arguments(plan)
    rates = plan.add_argument_group(
        "rates",
        "of a synchronous step, for what asynchronous ones would take; those that are not given are medians of the run "
        "in logger.log_dir, if there is one",
    )
    above_0, from_1 = _number("above 0", lambda number: number > 0), _number("from 1 on", lambda number: number >= 1)
    for name, text in (
        ("generation", "seconds from the first prompt to the last sample"),
        ("training", "seconds of log-probabilities and optimizer steps"),
        ("refit", "seconds until engines hold new weights"),
    ):
        rates.add_argument(f"--{name}-s", type=above_0, metavar="SECONDS", help=text)
    text = "the longest response of a step over the mean"
    rates.add_argument("--longest-over-mean", type=from_1, metavar="RATIO", help=text)
    return parser


def _number(which: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads a finite number from the command line."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            number = float(text)
            if is_valid(number) and math.isfinite(number):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {which}")

    return read


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the file's"
    )


def _up(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    mode: Mode = "resume" if arguments.resume else "restart" if arguments.restart else "new"
    words = ["coordinator", "up", arguments.config, *arguments.overrides, "--resume"]
    return _run(arguments.config, config, mode, arguments.from_step, words)


def _replay(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.run.replay import begin_replay, continue_replay, describe_start, source_of

    run: Path = arguments.run
    if arguments.resume:
        config = continue_replay(run, arguments.overrides)
        words = ["coordinator", "replay", str(run), *arguments.overrides, "--resume"]
        return _run(source_of(run), config, "resume", arguments.from_step, words)
    config = begin_replay(run, arguments.from_step, arguments.to_step, arguments.overrides).config
    for line in describe_start(config):
        print(line, flush=True)
    words = ["coordinator", "replay", config.logger.log_dir, "--resume"]
    return _run(source_of(run), config, "new", None, words)


def _run(source: str, config: Config, mode: Mode, from_step: int | None, to_continue: Sequence[str]) -> int:
    """Run a configuration, which `source` holds, to its end; `to_continue` is what to type if it is interrupted."""
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    from tandem.coordinator.run.fork_server import ForkServer
    from tandem.coordinator.run.journal_file import JOURNAL_NAME
    from tandem.coordinator.run.launch import preload
    from tandem.coordinator.run.spec import launched_processes
    from tandem.coordinator.scheduler.events import Finish

    signals.interrupt_when_asked()
    folder = Path(config.logger.log_dir)
    try:
        # First: what follows imports much as well.
        kinds = [kind for kind, count in launched_processes(config).items() if count]
        environment = config.policy.megatron_cfg.environment
        with ForkServer(partial(preload, kinds, environment), config.cluster.deadlines.join_s) as fork_server:
            from tandem.coordinator.run.preflight import preflight
            from tandem.coordinator.run.run import run

            ready = preflight(source, config, mode)
            say = partial(print, flush=True)
            finish = run(ready, mode, say, fork_server, from_step)
    except KeyboardInterrupt:  # before the loop began, which takes it for itself
        finish = Finish(outcome="interrupted")
    match finish.outcome:
        case "finished":
            from tandem.coordinator.inspect.report import format_summary, write_report

            write_report(folder, folder, [] if config.replay is None else [Path(config.replay.run)])
            print(format_summary(folder), flush=True)
            if config.replay is not None:
                from tandem.coordinator.run.comparison import compare

                print(compare(config), flush=True)
            return 0
        case "interrupted":
            if config.prerequisite is None and not (folder / JOURNAL_NAME).exists():
                print("interrupted before the run had begun", flush=True)
                return _EXIT_INTERRUPTED
            print(f"interrupted; continue with: {shlex.join(to_continue)}", flush=True)
            return _EXIT_INTERRUPTED
        case "failed":
            print(f"error: {finish.error}", file=sys.stderr)
            return _EXIT_FAILED


def _way_out(error: DamagedCheckpoint, arguments: argparse.Namespace) -> str:
    """Return what to type after a checkpoint was found damaged."""
    if arguments.command == "replay" and not arguments.resume:
        return "choose another with --from"
    if arguments.command == "replay" and error.whole is None:
        return "no other checkpoint of the replay is whole: begin a new one"
    words = ["coordinator", arguments.command, _subject(arguments), *arguments.overrides]
    if error.config_file:
        words = ["coordinator", "up", error.config_file]
    if error.whole is None:
        return f"no other checkpoint is whole: begin anew with {shlex.join([*words, '--restart'])}"
    how = ["--resume", "--from", str(error.whole)]
    return f"the newest that is whole is that of step {error.whole}: {shlex.join([*words, *how])}"


def _subject(arguments: argparse.Namespace) -> str:
    return str(arguments.run) if arguments.command == "replay" else str(arguments.config)


def _check(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    if arguments.resolved:
        print(dump_yaml(config), end="")
    for notice in notices(config):
        print(f"note: {notice}", file=sys.stderr)
    from tandem.coordinator.run.preflight import preflight

    ready = preflight(arguments.config, config, "new")
    for note in [*ready.notices, *_earlier(ready)]:
        print(f"note: {note}", file=sys.stderr)
    print(_summary(ready))
    return 0


def _earlier(ready: Ready) -> Iterator[str]:
    """Yield what there is already of a run, and of the one before it."""
    from tandem.coordinator.run.prerequisite import differences, has_begun, model_differences

    config = ready.config
    if changed := model_differences(config):
        yield f"policy.new_model differs from {config.policy.model_name} in {changed}; --restart makes it again"
    if has_begun(config):
        yield f"{config.logger.log_dir} already holds a run: go on with it by --resume, or begin anew by --restart"
    if ready.prerequisite is not None and (changed := differences(ready.prerequisite)):
        yield f"prerequisite {ready.prerequisite.source} differs from its run in {changed}; --restart makes it again"


def _summary(ready: Ready) -> str:
    """Say on one line what a run will be."""
    from tandem.coordinator.run.spec import expected_processes

    config, first = ready.config, "" if ready.prerequisite is None else f", after {ready.prerequisite.source}"
    counts = expected_processes(config).items()
    processes = ", ".join(f"{count} {kind} process{'es' * (count > 1)}" for kind, count in counts)
    return (
        f"OK: {config.algorithm} on {config.policy.model_name}, {ready.algorithm.num_steps} steps, {processes}{first}"
    )


def _report(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.inspect.report import format_summary, write_report

    write_report(arguments.run, arguments.out or arguments.run)
    print(format_summary(arguments.run))
    return 0


def _refits(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.coordinator.inspect.refits import print_refits

    print_refits(arguments.run, Console())
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.coordinator.inspect.plan import explain
    from tandem.coordinator.inspect.plan_ages import GivenRates

    given = GivenRates(**{name: getattr(arguments, name) for name in GivenRates.__struct_fields__})
    explain(load_config(arguments.config, arguments.overrides, to_run=False), Console(), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
