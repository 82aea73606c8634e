"""Runs whose environments freeze, fail, start processes or wait for others: what goes on, what is said, what stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs.running import (
    Command,
    coordinator,
    deterministic,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

LOG = Path("run/logs/rollout-0.log")


def own(source: str, over: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write an environment and a configuration that names it."""
    Path("judging.py").write_text(source)
    return write_config({"env": {"mine": {"class": "judging.Judge", **settings}}, **(over or {})})


def test_a_run_survives_expressions_that_freeze_math_verify() -> None:
    """Reference answers are parsed where responses are: some here never come to an end, whatever the response."""
    answers = ("9^{9^{9^9}}", "7", "12", "100000000!", "3", "5")
    problems = [{"input": f"{n}", "output": answers[n % len(answers)]} for n in range(90)]
    config = write_config({"env": {"math": {"timeout_s": 1.5, "num_workers": 4}}})
    Path("frozen.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
    ended = coordinator("up", config, "data.train_data_path=frozen.jsonl")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "is lost" not in ended.stdout
    steps = steps_of()
    assert [step.step for step in steps] == [1, 2, 3]
    # Each group has one problem, and four samples; two thirds of all problems can be scored.
    late = [step.metrics.get("environment_timeouts", 0.0) for step in steps]
    assert 4 <= sum(late) <= 36
    assert late == [step.metrics.get("environment_failures", 0.0) for step in steps]
    said = re.findall(r"environment 'math' took longer than 1\.5 s .*", ended.stdout)
    assert 1 <= len(said) <= 2  # the first and the tenth
    assert "the sample is worth nothing, the first so far" in said[0]
    log = LOG.read_text()
    assert log.count("environment 'math' took longer than 1.5 s") >= sum(late)
    frozen = {int(number) for number in re.findall(r"^  problem: 'frozen\.jsonl:(\d+)'", log, re.MULTILINE)}
    assert frozen & {line for line in range(1, 91) if (line - 1) % 6 in (0, 3)}


RAISES = """
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        if sum(map(ord, response)) % 3 == 0:
            raise LookupError("no such room")
        return Score(0.1 * len(response), correct=False)
"""


def test_the_first_exception_of_ones_own_environment_ends_the_run_in_one_line() -> None:
    ended = coordinator("up", own(RAISES))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    pattern = (
        r"error: rollout-0 failed while generating step \d: "
        r"environment 'mine', problem '(.+)': LookupError: no such room \((.*)judging\.py:7, in score\)"
    )
    said = re.fullmatch(pattern, line)
    assert said is not None, line
    log = LOG.read_text()
    assert f"problem: {said[1]!r}\n  assistant: " in log
    assert "Traceback (most recent call last):" in log
    assert '    raise LookupError("no such room")' in log


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_exceptions_are_borne_where_that_is_asked(on_error: str) -> None:
    ended = coordinator("up", own(RAISES, on_error=on_error, num_workers=2))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of()
    failed = [int(step.metrics.get("environment_failures", 0)) for step in steps]
    assert sum(failed) > 0
    for step, count in zip(steps, failed, strict=True):
        assert step.metrics.get("environment_dropped", 0.0) == (count if on_error == "drop" else 0)
        assert step.metrics["num_valid_samples"] == 16 - (count if on_error == "drop" else 0)
    said = re.findall(
        r"environment 'mine', problem '.*': LookupError: no such room \(.*\); the sample .*", ended.stdout
    )
    became = "is worth nothing" if on_error == "zero" else "is dropped"
    assert f"the sample {became}, the first so far; all are in the rollout's log" in said[0]
    assert 1 <= len(said) <= 3
    assert LOG.read_text().count("Traceback") >= sum(failed)


SLEEPS = """
import time
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        if problem.question in ("1 + 1", "2 - 1") or len(response) < 2:
            time.sleep(1000)
        return Score(0.1 * len(response), correct=False)
"""


def test_a_run_goes_on_where_the_environment_sleeps_for_ever() -> None:
    ended = coordinator("up", own(SLEEPS, timeout_s=0.3, on_error="zero", num_workers=2, max_failures=None))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(steps_of()) == 3


WAITS = """
import asyncio
from tandem.rollout.environments import Score

class Judge:
    async def score(self, problem, response):
        await asyncio.sleep(0.05 * (len(response) % 4))
        return Score(0.1 * len(response), correct=problem.answer in response)
"""


def test_coroutines_and_processes_and_threads_make_the_same_run_to_the_bit() -> None:
    plain = WAITS.replace("async def", "def").replace("        await asyncio.sleep(0.05 * (len(response) % 4))\n", "")
    threads = plain.replace("class Judge:\n", 'class Judge:\n    runs_in = "threads"\n')
    made = []
    for name, source in (("waits", WAITS), ("plain", plain), ("threads", threads)):
        ended = coordinator("up", own(source, num_workers=2), f"logger.log_dir={name}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        made.append([deterministic(step.metrics) for step in steps_of(name)])
    assert made[0] == made[1] == made[2]
    assert len(made[0]) == 3


STARTS = """
import os, subprocess
from pathlib import Path
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        started = [subprocess.Popen(["sleep", "600"]).pid]
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            daemon = os.fork()
            if daemon == 0:
                os.execvp("sleep", ["sleep", "600"])
            os.write(write, str(daemon).encode())
            os._exit(0)
        started.append(int(os.read(read, 32)))
        os.close(read)
        os.close(write)
        with Path(__file__).with_name("pids").open("a") as file:
            file.write("".join(f"{pid}\\n" for pid in started))
        return Score(0.1 * len(response), correct=False)
"""
IN_THREADS = STARTS.replace("class Judge:\n", 'class Judge:\n    runs_in = "threads"\n')


def left(pids: Sequence[int]) -> list[psutil.Process]:
    """Return which of these processes are still there a few seconds later."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def started() -> list[int]:
    return [int(word) for word in Path("pids").read_text().split()] if Path("pids").exists() else []


@pytest.mark.parametrize("source", [STARTS, IN_THREADS], ids=["processes", "threads"])
def test_what_an_environment_has_started_ends_with_the_run(source: str) -> None:
    ended = coordinator("up", own(source, {"grpo": {"max_num_steps": 1}}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(started()) >= 3 * 16
    assert left(started()) == []


@pytest.mark.parametrize("whom", ["the rollout process", "the coordinator"])
def test_what_an_environment_has_started_ends_with_whoever_is_killed(whom: str) -> None:
    with Command("coordinator", "up", own(STARTS, {"grpo": {"max_num_steps": 50}})) as run:
        wait_until(
            lambda: len(started()) >= 48, lambda: "processes to be started", died=lambda: run.process.poll() is not None
        )
        rollout = process_of(run, "rollout")
        below = [child.pid for child in rollout.children(recursive=True)]
        assert len(below) >= 48 + 4
        if whom == "the coordinator":
            run.process.kill()
        else:
            rollout.kill()
            run.wait_for("another is launched in its place")
        assert left(below) == []
