"""What does it cost to start the services of a host, forked by the coordinator and as a command each?

One trainer and two engines, until each has imported what it needs; then, one engine in the place of a lost one. Seconds
on the clock and of the processor, of all processes, the one that forks included, and their memory: of what is shared,
each process counts its share (PSS).
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import importing
import psutil
import pytest
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.launch.child import ForkedChild
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.launch import preload

NUM_ROUNDS = sized(3, 1, long=7)
SERVICES = sized(("trainer", "rollout", "rollout"), ("trainer", "rollout"))
TIMEOUT_S = 120.0
Started = ForkedChild | subprocess.Popen[bytes]


class Family:
    """Processes of one turn."""

    def __init__(self) -> None:
        self.processes: list[psutil.Process] = []
        self._started: list[Started] = []

    def begin(self, start: Callable[[str, Any], Started], services: tuple[str, ...]) -> float:
        """Start services; return the seconds until all are ready."""
        began = time.perf_counter()
        logs = []
        for service in services:
            logs.append(Path(f"log-{len(self._started)}"))
            with logs[-1].open("wb") as out:
                self._started.append(start(service, out))
            self.processes.append(psutil.Process(self._started[-1].pid))
        while not all(log.read_text() for log in logs):
            assert time.perf_counter() - began < TIMEOUT_S
            time.sleep(0.002)
        return time.perf_counter() - began

    def processor_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)

    def gigabytes(self) -> float:
        return sum(process.memory_full_info().pss for process in self.processes) / 1e9

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(TIMEOUT_S)


class Way:
    """A way to start processes, and what every turn of it took."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {
            name: [] for name in ("all ready, s", "all ready, processor s", "memory, GB", "one more, s")
        }

    @contextlib.contextmanager
    def starting(self, family: Family) -> Iterator[Callable[[str, Any], Started]]:
        """Yield what starts a service."""
        yield lambda service, out: subprocess.Popen([sys.executable, importing.__file__, service], stdout=out)

    def turn(self) -> float:
        family = Family()
        began = time.perf_counter()
        with self.starting(family) as start:
            try:
                family.begin(start, SERVICES)
                ready_s = time.perf_counter() - began
                self.found["all ready, s"].append(ready_s)
                self.found["all ready, processor s"].append(family.processor_s())
                self.found["memory, GB"].append(family.gigabytes())
                self.found["one more, s"].append(family.begin(start, SERVICES[-1:]))
            finally:
                family.end()
        return ready_s


class Forked(Way):
    @contextlib.contextmanager
    def starting(self, family: Family) -> Iterator[Callable[[str, Any], Started]]:
        before = set(psutil.Process().children())
        with ServiceForkServer(lambda: preload(("trainer", "rollout")), TIMEOUT_S) as fork_server:
            family.processes += set(psutil.Process().children()) - before
            yield lambda service, out: fork_server.start("benchmarks.importing", [service], out)


def test_start(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    ways = {"commands": Way(), "forked": Forked()}
    turns = Turns({name: way.turn for name, way in ways.items()})
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
    medians = {
        name: {what: statistics.median(values[-NUM_ROUNDS:]) for what, values in way.found.items()}
        for name, way in ways.items()
    }
    ratios = {what: medians["commands"][what] / medians["forked"][what] for what in medians["forked"]}
    benchmark.extra_info.update(
        {
            "services": SERVICES,
            "medians": medians,
            "commands, of forked": ratios,
            "all": {n: w.found for n, w in ways.items()},
        }
    )
    keep_ratios(benchmark, "commands, times what forked takes", ratios)
    print(f"\n{'medians':28}{'commands':>12}{'forked':>12}{'times':>8}")
    for what, ratio in ratios.items():
        print(f"{what:28}{medians['commands'][what]:12.3f}{medians['forked'][what]:12.3f}{ratio:8.2f}")
