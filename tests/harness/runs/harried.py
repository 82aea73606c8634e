"""Runs whose rollouts kill or stop other processes at moments that are said beforehand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.processes import killing_rollout
from tests.harness.runs import consoles
from tests.harness.runs.record_harness import TWO
from tests.harness.runs.running import Command, all_gone, joins, merged, processes_of, wait_until

RUN: dict[str, Any] = merged(
    TWO,
    {
        "grpo": {"max_num_steps": 8, "val_period": 4},
        "checkpointing": {"save_period": 3, "metric_name": None, "keep_top_k": None},
        "cluster": {"trainers": 2, "launch": {"trainers": 2, "refit": True}, "max_replacements": 9},
    },
)
LAUNCHED: dict[str, Any] = {"cluster": {"launch": "all"}}


def coordinator_of(run: Command) -> psutil.Process:
    """Return the process that a supervisor supervises."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for child in psutil.Process(run.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "tandem.coordinator.cli up" in " ".join(child.cmdline()):
                    found.append(child)
        return bool(found)

    wait_until(look, run.output)
    return found[-1]


def service_of(run: Command, kind: str, index: int = 0) -> psutil.Process:
    """Return a process of a supervised run, the coordinator among them, as soon as it is there."""
    if kind == "coordinator":
        return coordinator_of(run)
    wait_until(lambda: len(processes_of(run, kind)) > index, run.output)
    return processes_of(run, kind)[index]


class Harried:
    """A run whose two rollouts kill others."""

    def __init__(self, run: Command, address: str) -> None:
        self.run = run
        self.address = address

    def end(self) -> str:
        """Wait for the run's end; return what it has said. Its rollouts were the same from its beginning to its end."""
        services = self.run.children()
        assert self.run.wait() == 0, self.run.output()
        assert not list(Path().glob("kill_*")), "everybody was killed who was to be"
        assert all_gone(services, 20.0) == []

        def lines() -> list[str]:
            return [path.read_text() for path in Path().glob("rollout-*.txt")]

        wait_until(lambda: all("leaves: the run finished" in line for line in lines()), lambda: f"an end of {lines()}")
        assert [line.count("joined") for line in lines()] == [1, 1]
        return self.run.output()


@contextlib.contextmanager
def harried(config: Path) -> Iterator[Harried]:
    """Start a run, and by hand the two rollouts that kill others."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as started:
        patch.setenv("PYTHONPATH", str(Path.cwd()))
        run = started.enter_context(Command("coordinator", "up", config))
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        for _ in range(2):
            out = started.enter_context(Path(f"rollout-{time.monotonic_ns()}.txt").open("wb"))
            words = joins(address)
            process = consoles.fork_server().start(killing_rollout.__name__, words, out)
            started.callback(process.wait, 20.0)
            started.callback(process.kill)
        yield Harried(run, address)
