"""The run of a configuration for any command, and the report of how it ended."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common import signals
from tandem.common.errors import FAILED, INTERRUPTED, OK, DamagedCheckpoint, TandemError, is_shortage
from tandem.config import load_config, notices

if TYPE_CHECKING:
    from tandem.common.messages import RewardServer
    from tandem.config import Config
    from tandem.coordinator.scheduler.events import FinishRun
    from tandem.launch.preparing.beginning import Mode
    from tandem.launch.supervision import SupervisorConnection


def run_to_end(
    source: str,
    config: Config,
    mode: Mode,
    from_step: int | None,
    to_continue: Sequence[str],
    *,
    supervision: SupervisorConnection | None = None,
    unfinished_code: int = OK,
) -> int:
    """Run a configuration, read from `source`, to its end; `to_continue` is the command line that resumes it.

    `unfinished_code` is the exit code if the run's time limit is reached.
    """
    finish = run_to_outcome(source, config, mode, from_step, supervision=supervision)
    if supervision is not None and (finish.error is None or finish.error.is_final):
        supervision.give_up()
    match finish.outcome:
        case "finished":
            return OK
        case "interrupted":
            from tandem.observe.run_folder.journal_file import JOURNAL_NAME

            if config.prerequisite is None and not (Path(config.logger.log_dir) / JOURNAL_NAME).exists():
                print("interrupted before the run had begun", flush=True)
                return INTERRUPTED
            ending = "saved in time" if finish.is_out_of_time else "interrupted"
            print(f"{ending}; continue with: {shlex.join(to_continue)}", flush=True)
            return unfinished_code if finish.is_out_of_time else INTERRUPTED
        case "failed":
            print(f"error: {finish.error}", file=sys.stderr)
            if finish.error is not None and (supervision is None or finish.error.is_final):
                say_how_to_continue(finish.error, config, to_continue)
            return FAILED


def say_how_to_continue(error: TandemError | OSError, config: Config, to_continue: Sequence[str]) -> None:
    """Print the command line that continues a run after an error, if it has begun and the error names no other."""
    from tandem.observe.run_folder.journal_file import JOURNAL_NAME

    if isinstance(error, DamagedCheckpoint) or "--resume" in str(error):
        return
    if not (Path(config.logger.log_dir) / JOURNAL_NAME).exists():
        return
    if is_shortage(error):
        when = "once that is over, continue with"
    elif isinstance(error, TandemError) and error.is_final:
        when = "once that is mended, continue with"
    else:
        when = "continue with"
    print(f"{when}: {shlex.join(to_continue)}", flush=True)


def run_to_outcome(
    source: str,
    config: Config,
    mode: Mode,
    from_step: int | None,
    reward_server: RewardServer | None = None,
    begun: Callable[[], None] = lambda: None,
    *,
    supervision: SupervisorConnection | None = None,
) -> FinishRun:
    """Run a configuration, as `run_without_report` does, and report on it when it has finished."""
    finish = run_without_report(source, config, mode, from_step, reward_server, begun, supervision=supervision)
    if finish.outcome == "finished":
        folder = Path(config.logger.log_dir)
        print(_evaluated(folder) if config.evaluates else _report(config, folder), flush=True)
    return finish


def run_without_report(
    source: str,
    config: Config,
    mode: Mode,
    from_step: int | None,
    reward_server: RewardServer | None = None,
    begun: Callable[[], None] = lambda: None,
    *,
    supervision: SupervisorConnection | None = None,
) -> FinishRun:
    """Run a configuration; `begun` is called after the checks.

    `supervision` belongs to this process if another one takes over when it is lost.

    Raises:
        TandemError: something is wrong that is known before any process starts.
    """
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    from tandem.coordinator.scheduler.events import FinishRun
    from tandem.launch.fork_server import ServiceForkServer
    from tandem.launch.launch import preload
    from tandem.launch.nodes import launched_processes

    signals.interrupt_when_asked()
    try:
        # First, because the imports below are large, too.
        kinds = [kind for kind, count in launched_processes(config).items() if count]
        environment = config.policy.environment
        with ServiceForkServer(partial(preload, kinds, environment), config.cluster.deadlines.join_s) as fork_server:
            if supervision is not None:
                supervision.start()  # not before: a process with threads should not fork
            from tandem.coordinator.loop.opening import CommandInvocation
            from tandem.coordinator.loop.run import run
            from tandem.coordinator.preparing.preflight import preflight

            load = load_config if supervision is None else supervision.load_config
            ready = preflight(source, config, mode, has_rewards=reward_server is not None, load=load)
            begun()
            invocation = CommandInvocation(
                ready=ready,
                mode=mode,
                say=partial(print, flush=True),
                fork_server=fork_server,
                from_step=from_step,
                supervision=supervision,
                reward_server=reward_server,
            )
            return run(invocation)
    except KeyboardInterrupt:  # before the loop began, which takes it for itself
        return FinishRun(outcome="interrupted")


def _report(config: Config, folder: Path) -> str:
    """Write the report of a finished run; return its summary."""
    from tandem.observe.report.report import format_report, write_report

    beside = [] if config.replay is None else [Path(config.replay.run)]
    runs = write_report([folder, *beside], folder, is_brief=True)
    summary = format_report(runs[:1], folder)
    if config.replay is not None:
        from tandem.coordinator.preparing.replay import compare

        return f"{summary}\n{compare(config)}"
    return f"{summary}{_describe_next_steps(config, folder)}"


def _describe_next_steps(config: Config, folder: Path) -> str:
    """Return where the model is, and the command line to talk to it or to merge its adapters."""
    from tandem.config.models import lora
    from tandem.observe.run_folder.checkpoints import checkpoints_of

    checkpoints = checkpoints_of(folder, config)
    steps = checkpoints.steps()
    if not steps:
        return ""
    policy = checkpoints.folder_of(steps[-1]) / "policy"
    run = shlex.quote(str(folder))
    if (policy / lora.CONFIG).exists():
        return f"\nthe adapters are in {policy}; make a plain model of them: coordinator merge {run} FOLDER"
    writes = config.declaration.head == "vocabulary"
    return f"\nthe model is in {policy}{f'; talk to it: coordinator chat {run}' if writes else ''}"


def _evaluated(folder: Path) -> str:
    """Return the results of the validation of a run's model."""
    from tandem.observe.run_folder.journal import read_journal

    with read_journal(folder) as journal:
        record = journal.steps()[-1]
    metrics = {name: value for name, value in record.metrics.items() if name.startswith("val_")}
    lines = [f"{name:>{max(map(len, metrics))}}  {value:.4f}" for name, value in metrics.items()]
    return "\n".join([*lines, f"the validation of step {record.step}; its journal is in {folder}"])
