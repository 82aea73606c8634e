"""How many programs a minute does `environments.sandbox` run shut in, as many at once as there are cores?

The goal is 1,000 on two cores. Beside it: the same programs in plain processes of the same interpreter, which are what
isolation is added to.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measure import keep_ratios, seconds_of
from benchmarks.smoke import sized
from tandem.common.errors import ConfigError
from tandem.rollout.environments.sandbox.running import SandboxLimits, check_machine, run_program

NUM_RUNS, NUM_ROUNDS = sized(500, 4), sized(3, 1)
PROGRAM = "def add(x, y):\n    return x + y\n\n\nassert add(1, 2) == 3\nprint('passed')\n"


def run_shut_in(_: int) -> str:
    return run_program(PROGRAM, limits=SandboxLimits(time_s=60.0)).output


def run_plainly(_: int) -> str:
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_programs_a_minute(benchmark: BenchmarkFixture) -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    seconds: dict[str, list[float]] = {"shut in": [], "plain processes": []}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def measure(name: str, run: Callable[[int], str]) -> None:
            outputs: list[str] = []
            seconds[name].append(seconds_of(lambda: outputs.extend(pool.map(run, range(NUM_RUNS)))))
            assert outputs == ["passed\n"] * NUM_RUNS

        def measure_both() -> None:
            measure("shut in", run_shut_in)
            measure("plain processes", run_plainly)

        benchmark.pedantic(measure_both, rounds=NUM_ROUNDS)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    benchmark.extra_info["programs a minute"] = {name: round(60 * NUM_RUNS / time) for name, time in medians.items()}
    print(f"programs a minute: {benchmark.extra_info['programs a minute']}")
    ratios = {"shut in": medians["plain processes"] / medians["shut in"]}
    keep_ratios(benchmark, "programs, as fast as in plain processes", ratios)
