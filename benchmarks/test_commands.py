"""How long do commands take to answer, and a resumed run to its first step, beside imports of the libraries?

`coordinator --help`, `coordinator check` of the first example with the stage before it, and `coordinator up --resume`
of that example until the line of its first step, whose seconds are part of it. All are typed, as a user does. In turns
with them, a process only imports torch, Transformers and reasoning-gym: what a program that needs them in one process
takes before it does anything. Processor seconds are those of all processes, to their ends.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

NUM_ROUNDS = sized(3, 1, long=7)
ROOT = Path(__file__).parents[1]
COORDINATOR = (sys.executable, "-m", "tandem.coordinator.cli")
IMPORTS = "imports alone"
ALONE = (sys.executable, "-c", "import torch, transformers, reasoning_gym")
SUPERVISED, REINFORCED = "examples/arithmetic_sft.yaml", "examples/arithmetic.yaml"
TIMEOUT_S = 300.0


def processor_s() -> float:
    """Return the processor seconds of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class TypedCommands:
    """Commands that are typed, and what every turn of them took."""

    def __init__(self, folder: Path) -> None:
        self.processor_s: dict[str, list[float]] = {}
        self._folder = folder
        self._num_steps = 1
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def prepare(self) -> None:
        """Train a model for a step, and further for a step of GRPO, to resume that; a smoke test resumes the former."""
        self._run((*COORDINATOR, "up", *self._supervised()), "")
        if not IS_SMOKE:
            self._run((*COORDINATOR, "up", *self._reinforced()), "")

    def turn(self, name: str, command: tuple[str, ...]) -> Callable[[], float]:
        """Return a turn of a command, to its end."""
        return lambda: self._measure(name, command, "")

    def resume(self) -> float:
        """Resume the run for one more step; return the seconds until the line of that step."""
        self._num_steps += 1
        run = self._supervised() if IS_SMOKE else self._reinforced()
        command = (*COORDINATOR, "up", "--resume", *run)
        return self._measure("resumed to its first step", command, f"step {self._num_steps}/")

    def _supervised(self) -> tuple[str, ...]:
        return (SUPERVISED, f"sft.max_num_steps={self._num_steps}", *self._settings("sft"))

    def _reinforced(self) -> tuple[str, ...]:
        model = self._folder / "sft" / "checkpoints" / "step_1" / "policy"
        steps = f"grpo.max_num_steps={self._num_steps}"
        overrides = ("prerequisite=null", f"policy.model_name={model}", steps, "grpo.val_period=0")
        return (REINFORCED, *overrides, *self._settings("grpo"))

    def _settings(self, run: str) -> tuple[str, ...]:
        return ("checkpointing.save_period=1", "checkpointing.keep_top_k=null", f"logger.log_dir={self._folder / run}")

    def _measure(self, name: str, command: tuple[str, ...], line: str) -> float:
        before_s = processor_s()
        seconds = self._run(command, line)
        self.processor_s.setdefault(name, []).append(processor_s() - before_s)
        return seconds

    def _run(self, command: tuple[str, ...], line: str) -> float:
        """Run a command to its end; return the seconds until a line that begins so, or until the end."""
        began, until_line = time.perf_counter(), None
        with subprocess.Popen(
            command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            output = []
            for printed in process.stdout:
                output.append(printed)
                if line and until_line is None and printed.startswith(line):
                    until_line = time.perf_counter() - began
            assert process.wait(TIMEOUT_S) == 0, "".join(output)
        assert not line or until_line is not None, "".join(output)
        return time.perf_counter() - began if until_line is None else until_line


def compare(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return how many times the seconds of imports alone each command takes."""
    return {name: each / seconds[IMPORTS] for name, each in seconds.items() if name != IMPORTS}


@pytest.mark.timeout(900)
def test_commands(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    commands = TypedCommands(tmp_path)
    commands.prepare()
    ways = {
        "--help": commands.turn("--help", (*COORDINATOR, "--help")),
        "check": commands.turn("check", (*COORDINATOR, "check", REINFORCED)),
        "resumed to its first step": commands.resume,
        IMPORTS: commands.turn(IMPORTS, ALONE),
    }
    turns = Turns(ways)
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=sized(1, 0))
    wall = {name: min(times) for name, times in turns.last(NUM_ROUNDS).items()}
    processor = {name: min(times[-NUM_ROUNDS:]) for name, times in commands.processor_s.items()}
    benchmark.extra_info.update(
        {
            "least seconds": wall,
            "least processor seconds": processor,
            "median seconds": {name: statistics.median(times) for name, times in turns.last(NUM_ROUNDS).items()},
            "load": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, "seconds, times imports alone", compare(wall))
    keep_ratios(benchmark, "processor seconds, times imports alone", compare(processor))
    print(f"\n{'least of ' + str(NUM_ROUNDS):28}{'seconds':>10}{'processor':>11}{'times imports alone':>21}")
    for name, seconds in wall.items():
        print(f"{name:28}{seconds:10.2f}{processor[name]:11.2f}{seconds / wall[IMPORTS]:21.2f}")
