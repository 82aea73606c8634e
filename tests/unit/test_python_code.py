"""Programs in responses, run shut in: what they may do, what they may not, and what that costs."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from environment_harness import config

from tandem.common import descriptors
from tandem.common.errors import ConfigError, RewardError
from tandem.common.messages import Problem
from tandem.rollout.environments.making import make_environment
from tandem.rollout.environments.python_code import PythonCode
from tandem.rollout.environments.sandbox import running
from tandem.rollout.environments.sandbox.running import SandboxLimits, run_program

try:
    running.check_machine()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)
LIMITS = SandboxLimits(time_s=60.0, memory_mb=256, disk_mb=8, processes=8, files=64)
ADD = "Here it is:\n```python\ndef add(x, y):\n    return {}\n```\n"


def problem(tests: Any = None, answer: Any = "") -> Problem:
    return Problem(problem_id="p", question="?", answer=answer, metadata={} if tests is None else {"tests": tests})


@pytest.mark.parametrize(
    ("body", "expected"), [("x + y", (1.0, True, 1.0)), ("3", (0.0, False, 0.5)), ("nothing", (0.0, False, 0.0))]
)
def test_code_that_follows_a_program_says_whether_it_is_right(body: str, expected: tuple[float, bool, float]) -> None:
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    environment = make_environment(config("python_code", {"kwargs": {"partial_credit": False, "time_s": 60}}))
    score = environment.score(problem(tests), ADD.format(body))  # type: ignore[union-attr]
    assert (score.reward, score.correct) == expected[:2]  # type: ignore[union-attr]
    partial = PythonCode(partial_credit=True, time_s=60).score(problem(tests), ADD.format(body))
    assert (partial.reward, partial.components) == (expected[2], {"passed": expected[2]})


def test_standard_streams_are_compared_line_by_line() -> None:
    environment = PythonCode(partial_credit=True, time_s=60)
    response = "```\nfor line in open(0):\n    print(int(line) ** 2, '')\n```"
    tests = [{"input": "2\n3\n", "output": "4\n9"}, {"input": "4\n", "output": "17\n"}]
    assert environment.score(problem(answer=tests), response).reward == 0.5


def test_a_process_with_many_open_descriptors_runs_programs_too() -> None:
    """`select` takes no descriptor beyond 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.raise_limit()
    held = [os.dup(0) for _ in range(1100)]
    try:
        assert run_program("print(1)", limits=LIMITS).output == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_that_ends_before_the_test_has_not_passed() -> None:
    environment = PythonCode(time_s=60)
    assert environment.score(problem(answer="assert False"), "```python\nimport os\nos._exit(0)\n```").reward == 0.0
    assert environment.score(problem(answer="assert False"), "no program").reward == 0.0
    for tests in ([], [1], [{"input": "1"}]):
        with pytest.raises(RewardError, match="problem 'p' has "):
            environment.score(problem(tests), "```python\n```")


KEPT_OUT = {
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', 22))", "Network is unreachable"),
    "forks without end": ("import os\nwhile True:\n    os.fork()", "Resource temporarily unavailable"),
    "a full disk": ("file = open('x', 'wb')\nwhile True:\n    file.write(b'x' * 65536)", "No space left on device"),
    "files without end": ("for n in range(99999):\n    open(str(n), 'w').close()", "No space left on device"),
    "memory": ("bytearray(1 << 29)", "MemoryError"),
    "the system's files": ("open('/usr/mine', 'w')", "Read-only file system"),
    "the run's files": (f"open({__file__!r})", "No such file or directory"),
    "privileges": ("import os\nos.setuid(0)", "Operation not permitted"),
    "output without end": ("while True:\n    print('x' * 999)", ""),
}


@pytest.mark.parametrize("what", KEPT_OUT)
def test_a_program_is_kept_from(what: str) -> None:
    source, reason = KEPT_OUT[what]
    run = run_program(source, limits=LIMITS)
    assert run.exit_code != 0
    assert reason in run.errors
    assert run.ending == ("output" if not reason else "exit")


def test_a_program_sees_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    source = (
        "import os\nprint('SOME_API_KEY' in os.environ, os.getuid(), os.getpid(), os.listdir('.'), os.listdir('/dev/'))"
    )
    assert run_program(source, limits=LIMITS).output.startswith("False 1000 1 ['program.py'] [")
    assert os.environ["SOME_API_KEY"] == "secret"


def test_what_ignores_signals_or_stays_behind_ends_with_its_run() -> None:
    """Nothing of it is left, and no run takes longer than it may."""
    stubborn = (
        "import signal, time\nfor number in (1, 2, 15):\n    signal.signal(number, signal.SIG_IGN)\ntime.sleep(999)"
    )
    began = time.monotonic()
    assert run_program(stubborn, limits=SandboxLimits(time_s=1.0)).ending == "time"
    assert time.monotonic() - began < 30
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(999)\nprint('bye')"
    assert run_program(daemon, limits=LIMITS).output == "bye\n"
    deadline = time.monotonic() + 30
    while [each for each in psutil.process_iter(["cmdline"]) if "program.py" in (each.info["cmdline"] or ())]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_machine_that_shuts_nothing_in_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no.py").write_text("import sys\nsys.exit('unshare: Operation not permitted')")
    monkeypatch.setattr(running.program, "__file__", str(tmp_path / "no.py"))
    with pytest.raises(ConfigError, match=r"runs no shut-in program: unshare: Operation not permitted$"):
        make_environment(config("python_code"))
