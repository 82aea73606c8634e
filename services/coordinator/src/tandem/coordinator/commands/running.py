"""Carry out a run, whichever command asks for it, and say how it ended."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common import signals
from tandem.common.config import notices
from tandem.coordinator.commands.arguments import FAILED, INTERRUPTED, OK

if TYPE_CHECKING:
    from tandem.common.config import Config
    from tandem.coordinator.run.prerequisite import Mode


def run_to_end(source: str, config: Config, mode: Mode, from_step: int | None, to_continue: Sequence[str]) -> int:
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
        case "finished" if config.evaluates:
            print(_evaluated(folder), flush=True)
            return OK
        case "finished":
            from tandem.coordinator.inspect.report import format_summary, write_report

            write_report(folder, folder, [] if config.replay is None else [Path(config.replay.run)])
            print(format_summary(folder), flush=True)
            if config.replay is not None:
                from tandem.coordinator.run.comparison import compare

                print(compare(config), flush=True)
            return OK
        case "interrupted":
            if config.prerequisite is None and not (folder / JOURNAL_NAME).exists():
                print("interrupted before the run had begun", flush=True)
                return INTERRUPTED
            print(f"interrupted; continue with: {shlex.join(to_continue)}", flush=True)
            return INTERRUPTED
        case "failed":
            print(f"error: {finish.error}", file=sys.stderr)
            return FAILED


def _evaluated(folder: Path) -> str:
    """Say what the validation of a run's model has found."""
    from tandem.coordinator.run.journal import read_journal

    with read_journal(folder) as journal:
        record = journal.steps()[-1]
    metrics = {name: value for name, value in record.metrics.items() if name.startswith("val_")}
    lines = [f"{name:>{max(map(len, metrics))}}  {value:.4f}" for name, value in metrics.items()]
    return "\n".join([*lines, f"the validation of step {record.step}; its journal is in {folder}"])
