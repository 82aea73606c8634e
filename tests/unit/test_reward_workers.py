"""Rewards in worker processes: what they survive, what becomes of a failure, and that nothing stays."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from environment_harness import WAIT_S, config, problem, results, said

from tandem.common import process_lifetime
from tandem.common.errors import ConfigError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config, config_to_json
from tandem.rollout.environments import Score, Turn
from tandem.rollout.environments.outcomes import UnscoredResponse, checked
from tandem.rollout.environments.processes.workers import WorkerPool
from tandem.rollout.environments.scorer import EnvironmentScorer
from tests.harness.leaks import gone, is_alive
from tests.harness.runs.running import kill_at_once

Start = Callable[[Config], EnvironmentScorer]


def here(name: str, **settings: Any) -> Config:
    return config("mine", {"class": f"own_environments.{name}", **settings})


@pytest.fixture
def start() -> Iterator[Start]:
    scorers: list[EnvironmentScorer] = []

    def started(config: Config) -> EnvironmentScorer:
        scorers.append(EnvironmentScorer(config))
        scorers[-1].await_ready()
        return scorers[-1]

    yield started
    for scorer in scorers:
        scorer.close()


def failures(found: list[Score | Turn | UnscoredResponse]) -> list[str | None]:
    return [result.failure if isinstance(result, UnscoredResponse) else None for result in found]


def written(count: int = 3) -> list[int]:
    """Wait for the ids of processes that an environment has started."""
    deadline = time.monotonic() + WAIT_S
    while not Path("pids").exists() or len(Path("pids").read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(word) for word in Path("pids").read_text().split()]


# --- what they survive -----------------------------------------------------------------------------------------------


def test_answers_that_freeze_math_verify_are_worth_nothing(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = start(config("math", {"timeout_s": 3.0, "num_workers": 2}))
    began = time.monotonic()
    found = results(scorer, "$9^{9^{9^9}}$", "7", "$100000000!$", "\\boxed{8}", "\\boxed{7}")
    late = "environment 'math' took longer than 3 s to score a response to problem 'p1' (env.math.timeout_s)"
    assert failures(found) == [late, None, late, None, None]
    said = [Score(1.0, True, answer="7"), Score(0.0, False, answer="8"), Score(1.0, True, answer="7")]
    assert [found[1], found[3], found[4]] == said
    assert time.monotonic() - began < 60
    scorer.close()  # a worker that still says where it is stuck shares the offset at which this reads
    logged = capfd.readouterr().err
    assert logged.count(late) == 2
    assert "assistant: '$9^{9^{9^9}}$'" in logged
    assert "assistant: '$100000000!$'" in logged


def test_a_worker_is_replaced_whatever_ends_it_and_the_others_responses_are_scored(start: Start) -> None:
    scorer = start(here("Misbehaves", on_error="zero", timeout_s=3.0, num_workers=2))
    kinds = ["abc", "freeze", "crash", "exit", "sys.exit", "raise", "fork", "abcd", "group", "write"]
    found = results(scorer, *kinds, *["x" * n for n in range(100)])
    prefix = "environment 'mine', problem 'p1': "
    where = r" \(.*/own_environments\.py:\d+, in score\)"
    expected = [
        None,
        re.escape("environment 'mine' took longer than 3 s to score a response to problem 'p1' (env.mine.timeout_s)"),
        prefix + "its worker process ended: killed by SIGSEGV",
        prefix + "its worker process ended: it exited with code 3",
        prefix + "SystemExit: enough" + where,
        prefix + re.escape(r"LookupError: no such \ud800letter") + where,
        None,
        None,
        prefix + "its worker process ended: killed by SIGKILL",
        prefix + "something else was written to the socket of its worker process",
    ]
    for failure, pattern in zip(failures(found), expected, strict=False):
        assert (failure is None) == (pattern is None)
        assert failure is None or re.fullmatch(str(pattern), failure)
    assert found[0] == Score(3.0, True)
    assert found[6] == Score(4.0, True)
    assert found[10:] == [Score(float(n), True) for n in range(100)]


def test_a_worker_that_is_killed_while_it_waits_is_replaced(start: Start) -> None:
    scorer = start(here("Misbehaves"))
    pids = []
    for _ in range(4):
        (score,) = results(scorer, "pid")
        assert isinstance(score, Score)
        pids.append(int(score.reward))
        os.kill(pids[-1], signal.SIGKILL)
        assert gone([pids[-1]])
    assert len(set(pids)) == 4


def test_the_rollout_process_keeps_running_while_a_worker_is_frozen(start: Start) -> None:
    scorer = start(here("Misbehaves", on_error="zero", timeout_s=8.0))
    scorer.submit(0, problem(), said("freeze"))
    began, longest = time.monotonic(), 0.0
    while not (found := scorer.poll()):
        before = time.monotonic()
        time.sleep(0.001)
        longest = max(longest, time.monotonic() - before)
    assert 7.9 < time.monotonic() - began < 60
    assert longest < 7.0
    assert isinstance(found[0][1], UnscoredResponse)


@pytest.mark.parametrize("metadata", [{"n": 10**40}, {"s": "\ud800"}, {"o": object()}], ids=["int", "text", "object"])
def test_a_problem_that_cannot_travel_is_said(start: Start, metadata: dict[str, Any]) -> None:
    scorer = start(here("Misbehaves", on_error="drop"))
    scorer.submit(0, Problem(problem_id="odd", question="", answer="", metadata=metadata), said("x"))
    scorer.submit(1, Problem(problem_id="long", question="", answer="é" * 10**7, metadata={"": None}), said("xy"))
    found: dict[int, Any] = {}
    while len(found) < 2:
        found |= scorer.poll()
        time.sleep(0.001)
    assert found[0].dropped
    assert found[0].failure.startswith("environment 'mine': the problem cannot be sent to a worker process: ")
    assert found[1] == Score(2.0, True)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit", "making the environment failed: its worker process ended: it exited with code 5"),
        ("raise", "OSError: no licence"),
        ("hang", "the environment was not made within 0.5 s"),
    ],
)
def test_what_waits_for_a_worker_that_cannot_be_replaced_has_failed_and_then_it_is_tried_again(
    start: Start, how: str, why: str
) -> None:
    scorer = start(here("Unmade", on_error="zero"))
    assert isinstance(scorer._pool, WorkerPool)
    scorer._pool._build_s = 0.5 if how == "hang" else 300.0
    Path("unmade").write_text(how)
    found = failures(results(scorer, "exit", "abc", "abcd"))
    assert str(found[0]).endswith("its worker process ended: it exited with code 3")
    prefix = "environment 'mine', problem 'p1': no worker process could take another's place in 3 attempts: env.mine: "
    assert found[1:] == [prefix + why] * 2
    Path("unmade").unlink()
    assert results(scorer, "abcde") == [Score(5.0, True)]


def test_others_go_on_where_one_worker_cannot_be_replaced(start: Start) -> None:
    scorer = start(here("Unmade", on_error="zero", num_workers=2))
    while len({result.reward for result in results(scorer, *["pid"] * 9) if isinstance(result, Score)}) < 2:
        time.sleep(0.02)  # until both are there
    Path("unmade").write_text("exit")
    found = failures(results(scorer, "exit"))
    until = time.monotonic() + 4  # longer than its three attempts
    while time.monotonic() < until:
        found += failures(results(scorer, "abc"))
        time.sleep(0.1)
    assert sum(failure is not None for failure in found) == 1


def test_a_worker_that_cannot_be_replaced_ends_the_run_where_failures_do(start: Start) -> None:
    scorer = start(here("Unmade"))
    (pid,) = (result.reward for result in results(scorer, "pid") if isinstance(result, Score))
    Path("unmade").write_text("raise")
    os.kill(int(pid), signal.SIGKILL)
    assert gone([int(pid)])
    with pytest.raises(RewardError, match=r"problem 'p1': no worker process .* env\.mine: OSError: no licence$"):
        results(scorer, "abc")


# --- coroutines ------------------------------------------------------------------------------------------------------


def test_coroutines_run_together_and_each_has_its_deadline(start: Start) -> None:
    scorer = start(here("Asks", on_error="zero", timeout_s=3.0))
    found = results(scorer, *["x"] * 60, "for ever", "raise", "stubborn")
    late = "environment 'mine' took longer than 3 s"
    said_last = failures(found)[60:]
    assert [(text or "").startswith(late) for text in said_last] == [True, False, True]
    assert re.search(r"LookupError: nobody answers \(.*own_environments\.py:\d+, in score\)$", str(said_last[1]))
    scores = [score for score in found[:60] if isinstance(score, Score)]
    assert len(scores) == 60
    assert max(score.reward for score in scores) > 20
    assert scores[0].components == {"length": 1.0}


@pytest.mark.parametrize("culprit", ["block", "exit"])
def test_who_ends_a_worker_that_others_share_is_found(start: Start, culprit: str) -> None:
    scorer = start(here("Asks", on_error="zero", timeout_s=3.0, num_workers=2))
    found = results(scorer, "a", "b", culprit, "c", "d", "e")
    assert [failure is None for failure in failures(found)] == [True, True, False, True, True, True]


# --- nothing stays ---------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_takes_all_that_it_has_started_along(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = start(here("Misbehaves", on_error="zero", timeout_s=3.0, num_workers=2))
    results(scorer, "start")
    others = written()
    worker = psutil.Process(others[0]).ppid()
    Path("pids").unlink()
    (late,) = results(scorer, "start and sleep")
    assert isinstance(late, UnscoredResponse)
    assert gone(written())
    errors = capfd.readouterr().err  # the worker prints its stack before anything is killed
    stack = re.sub(r"\d\d:\d\d:\d\d environment .*\n(  \w+: .*\n)*", "", errors)  # which may stand in its midst
    assert re.search(r'own_environments\.py", line \d+ in score', stack), errors
    if not all(map(is_alive, others)):  # it was the same one, which may be alive for a moment longer
        assert gone([worker])
    scorer.close()
    assert gone(others)


ROLLOUT = """
import sys, time
from tandem.config import config_from_json
from tandem.common.process_lifetime import adopt_orphans, end_descendants
from tandem.common.messages import Problem
from tandem.rollout.environments.scorer import EnvironmentScorer
adopt_orphans()
scorer = EnvironmentScorer(config_from_json(open(sys.argv[1], "rb").read()))
scorer.await_ready()
problem = Problem(problem_id="p", question="", answer="", metadata={})
for key, response in enumerate(sys.argv[2:]):
    scorer.submit(key, problem, [{"role": "assistant", "content": response}])
time.sleep(600)
"""


def await_programs(pids: list[int]) -> None:
    """Wait until each process runs its program, and is no fork of another's any more."""
    deadline = time.monotonic() + WAIT_S
    while any(psutil.Process(pid).name() != "sleep" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_below(pid: int, least: int) -> list[int]:
    """Wait until a process has so many descendants; return their ids."""
    deadline = time.monotonic() + WAIT_S
    while len(below := psutil.Process(pid).children(recursive=True)) < least:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [child.pid for child in below]


@pytest.mark.parametrize("name", ["Misbehaves", "MisbehavesInThreads"])
def test_nothing_outlives_a_rollout_process_that_is_killed(name: str) -> None:
    Path("config.json").write_bytes(config_to_json(here(name, num_workers=3, timeout_s=600.0)))
    Path("rollout.py").write_text(ROLLOUT)
    responses = ["start", "start and sleep", *(["freeze"] if name == "Misbehaves" else [])]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    process = subprocess.Popen(
        [sys.executable, "rollout.py", "config.json", *responses], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        pids = written(6)
        await_programs(pids)
        below = await_below(process.pid, 6 + (8 if name == "Misbehaves" else 2))
        assert set(pids) <= set(below)
    finally:
        process.kill()
        process.wait()
    assert gone([*below, *pids])


DAEMONIC = """
import os, subprocess, time
from pathlib import Path
from tandem.rollout.environments import Score

def note(pid):
    with Path("pids").open("a") as file:
        file.write(f"{pid}\\n")

def start_one(**options):
    # A program of its own session, as daemons are; its parent ends at once.
    words = ["/bin/sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    words = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, check=True, **options
    )
    note(int(words.stdout))

def fork_one():
    # The same without a program.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 100)
            note(os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()

class Daemonic:
    def score(self, problem, response):
        start_one()
        fork_one()
        start_one(env={})
        return Score(reward=1.0, correct=True)

class DaemonicInThreads(Daemonic):
    runs_in = "threads"

start_one()  # by the process that imports this
"""
_SCORERS = 2


@pytest.fixture
def daemonic(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[subprocess.Popen[bytes], list[int]]]:
    """Start rollout processes whose environments have started daemons, each in a folder of its own."""
    # Production does without; then titles are written over what tells whose process it is.
    monkeypatch.delenv("SPT_NOENV", raising=False)

    def start_rollout(name: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        Path("daemonic.py").write_text(DAEMONIC)
        settings = config("mine", {"class": f"daemonic.{name}", "num_workers": _SCORERS})
        Path("config.json").write_bytes(config_to_json(settings))
        Path("rollout.py").write_text(ROLLOUT)
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())]))
        process = subprocess.Popen(
            [sys.executable, "rollout.py", "config.json", "a", "b"], env=os.environ | {"PYTHONPATH": path}
        )
        imports = 1 if name == "Daemonic" else 2  # with threads the rollout process imports it, too
        return process, written(imports + 3 * _SCORERS)

    return start_rollout


class EnvironmentTree(NamedTuple):
    """What is below the guardian of an environment."""

    server: psutil.Process
    guardians: list[psutil.Process]
    """Those of workers."""
    sweeper: psutil.Process


def parents_of(guardian: psutil.Process) -> EnvironmentTree:
    """Return the processes below a guardian, whose first child forks workers."""
    server, *others = guardian.children()
    guardians = [child for child in server.children() if child.children()]
    assert len(guardians) == _SCORERS
    (sweeper,) = (child for child in others if os.getpgid(child.pid) == child.pid and child.ppid() == guardian.pid)
    return EnvironmentTree(server=server, guardians=guardians, sweeper=sweeper)


def end_all(process: subprocess.Popen[bytes], below: list[psutil.Process], pids: list[int]) -> None:
    """Kill what a failing test has left."""
    process.kill()
    process.wait()
    for pid in (*(child.pid for child in below if child.is_running()), *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_PARENTS = ("guardian", "fork server", "guardians of workers")


@pytest.mark.parametrize(
    "killed", [names for length in range(4) for names in itertools.combinations(_PARENTS, length)], ids=" and ".join
)
def test_nothing_outlives_a_rollout_process_that_is_killed_with_what_guards_its_environment(
    daemonic: Callable[[str], tuple[subprocess.Popen[bytes], list[int]]], killed: tuple[str, ...]
) -> None:
    """Whatever of what forks workers, of its guardian, and of theirs is killed with it at once."""
    process, pids = daemonic("Daemonic")
    rollout = psutil.Process(process.pid)
    below = rollout.children(recursive=True)
    try:
        (guardian,) = rollout.children()
        tree = parents_of(guardian)
        parents = {"guardian": [guardian], "fork server": [tree.server], "guardians of workers": tree.guardians}
        if {"guardian", "guardians of workers"} <= {*killed}:
            time.sleep(process_lifetime._SWEEPER_LOOK_S + 1)  # the sweeper has seen those without an environment
        kill_at_once([rollout, *(parent for name in killed for parent in parents[name])])
        process.wait()
        assert gone([*(child.pid for child in below), *pids])
    finally:
        end_all(process, below, pids)


def test_nothing_outlives_a_rollout_process_with_threads_that_is_killed_with_its_guardian(
    daemonic: Callable[[str], tuple[subprocess.Popen[bytes], list[int]]],
) -> None:
    process, pids = daemonic("DaemonicInThreads")
    rollout = psutil.Process(process.pid)
    below = rollout.children(recursive=True)
    try:
        (guardian,) = (child for child in rollout.children() if child.children())
        time.sleep(process_lifetime._SWEEPER_LOOK_S + 1)  # the sweeper has seen those without an environment
        kill_at_once([rollout, guardian])
        process.wait()
        assert gone([*(child.pid for child in below), *pids])
    finally:
        end_all(process, below, pids)


def test_a_sweeper_that_is_killed_is_replaced_and_sweeps_while_the_rollout_process_lives(
    daemonic: Callable[[str], tuple[subprocess.Popen[bytes], list[int]]],
) -> None:
    process, pids = daemonic("Daemonic")
    rollout = psutil.Process(process.pid)
    below = rollout.children(recursive=True)
    try:
        (guardian,) = rollout.children()
        tree = parents_of(guardian)
        tree.sweeper.kill()
        deadline = time.monotonic() + WAIT_S
        while not (set(guardian.children()[1:]) - {tree.sweeper, *below}):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(process_lifetime._SWEEPER_LOOK_S + 1)
        below = rollout.children(recursive=True)
        kill_at_once([guardian, tree.server, *tree.guardians])
        assert gone([*(child.pid for child in below), *pids])
        assert process.poll() is None
    finally:
        end_all(process, below, pids)


# --- what becomes of a failure ---------------------------------------------------------------------------------------


def test_the_first_failure_ends_the_run_where_that_is_asked_and_the_log_has_it_all(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = start(here("Misbehaves"))
    with pytest.raises(RewardError) as caught:
        results(scorer, "raise")
    line = str(caught.value)
    source = Path(__file__).with_name("own_environments.py")
    number = 1 + next(n for n, text in enumerate(source.read_text().splitlines()) if "no such\\n" in text)
    assert line == rf"environment 'mine', problem 'p1': LookupError: no such \ud800letter ({source}:{number}, in score)"
    logged = capfd.readouterr().err
    assert line in logged
    assert "problem: 'p1'\n  assistant: 'raise'\nTraceback (most recent call last):" in logged
    assert 'raise LookupError("no such' in logged


@pytest.mark.parametrize(("on_error", "dropped"), [("zero", False), ("drop", True)])
def test_so_many_failures_are_borne_and_no_more(start: Start, on_error: str, dropped: bool) -> None:
    scorer = start(here("Misbehaves", on_error=on_error, max_failures=2))
    found = results(scorer, "raise", "abc", "raise")
    assert [getattr(result, "dropped", None) for result in found] == [dropped, None, dropped]
    with pytest.raises(RewardError, match=r"; this is failure 3 \(env\.mine\.max_failures: 2\)$"):
        results(scorer, "raise")


def test_a_problem_that_a_built_in_environment_cannot_score_ends_the_run_unless_said_otherwise(start: Start) -> None:
    for settings, fails in (({}, True), ({"on_error": "drop"}, False)):
        scorer = start(config("exact_match", settings))
        scorer.submit(0, problem(answer=""), said("x"))
        time.sleep(0.2)
        if fails:
            with pytest.raises(RewardError, match="problem 'p1' has no reference answer"):
                scorer.poll()
        else:
            ((_, result),) = scorer.poll()
            assert isinstance(result, UnscoredResponse)
            assert result.dropped


def test_a_limit_of_failures_where_the_first_ends_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.mine\.max_failures: the first failure ends the run; set env\.mine"):
        here("Length", max_failures=3)
    assert config("math", {"max_failures": 3}).env["math"].max_failures == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "env.mine.class: cannot import 'bad.Bad': No module named 'no_such_module'"),
        ("1 / 0", "env.mine.class: cannot import 'bad.Bad': ZeroDivisionError: division by zero"),
        ("import os; os._exit(4)", "env.mine: importing its class ended the process: it exited with code 4"),
        ("class Bad:\n runs_in = 'trheads'", "env.mine.class: bad.Bad.runs_in is 'trheads', not 'processes' or 'thre"),
        ("class Bad: pass", "env.mine.class: bad.Bad has no method score("),
        ("class Bad:\n def __init__(self): raise OSError('no\\nlicence')", "env.mine: OSError: no licence"),
        (
            "import os\nclass Bad:\n def __init__(self): os._exit(5)",
            "env.mine: making the environment failed: ",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_said_before_anything_is_scored(
    monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    Path("bad.py").write_text(source)
    monkeypatch.syspath_prepend(os.getcwd())
    scorer = EnvironmentScorer(config("mine", {"class": "bad.Bad"}))
    with pytest.raises(ConfigError) as caught:
        scorer.await_ready()
    scorer.close()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# --- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [True, "1.0", np.True_, np.nan, np.inf, None, 10**400, [1.0], 1j, np.array([1.0])])
def test_what_is_no_number_is_no_reward(reward: Any) -> None:
    wanted = "is .*, not a finite number$"
    with pytest.raises(RewardError, match=f"^the reward {wanted}"):
        checked(Score(reward, correct=True), is_multi_turn=False)
    with pytest.raises(RewardError, match=f"^the reward {wanted}"):
        checked(Turn([{"role": "user", "content": "1"}], reward), is_multi_turn=True)
    with pytest.raises(RewardError, match=f"^the component 'a' {wanted}"):
        checked(Score(1.0, correct=True, components={"a": reward}), is_multi_turn=False)


@pytest.mark.parametrize("reward", [1, 0.25, np.float32(0.25), np.int64(3), np.float64(1.5), -7])
def test_numbers_of_python_and_numpy_are_rewards(reward: Any) -> None:
    for correct in (True, np.True_, np.bool_(0)):
        taken = checked(Score(reward, correct, {"a": reward}), is_multi_turn=False)
        assert taken == Score(float(reward), bool(correct), {"a": float(reward)})
        assert isinstance(taken, Score)
        assert type(taken.reward) is float
        assert type(taken.correct) is bool


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Score(1.0, 1), "correct is 1, not True or False"),  # type: ignore[arg-type]
        (Score(1.0, "yes"), "correct is 'yes', not True or False"),  # type: ignore[arg-type]
        (Score(1.0, True, None), "the components are None, not numbers by name"),  # type: ignore[arg-type]
        (Score(1.0, True, {1: 1.0}), "the components are {1: 1.0}, not numbers by name"),  # type: ignore[dict-item]
        (Turn([{"role": "user", "content": "\ud800"}]), "a message of a Turn is '\\ud800', which is not Unicode text"),
        ((1.0, True), "step() returned tuple, not a Score or a Turn"),
    ],
)
def test_what_is_not_taken(result: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        checked(result, is_multi_turn=True)
    assert str(caught.value) == message


# --- the page --------------------------------------------------------------------------------------------------------


class Verifier(http.server.BaseHTTPRequestHandler):
    """A resources server that gives a point to a response with a digit."""

    def do_POST(self) -> None:
        """Read what is to be verified, as the Responses API has it, and answer."""
        assert self.path == "/verify"
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = row["response"]["output"]
        said = "".join(part["text"] for part in message["content"])
        answer = json.dumps({**row, "reward": float(any(character.isdigit() for character in said))}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def verifier() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Verifier) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_every_environment_of_the_page_bears_what_a_policy_says(
    start: Start, monkeypatch: pytest.MonkeyPatch, verifier: str
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    draw = random.Random(7)
    said_by_a_policy = ["", "r1", "7", " 7\n", "-0", "9" * 5000, "\0", "\u0661\u0662"]
    responses = [*said_by_a_policy, *("".join(draw.choices(string.printable, k=8)) for _ in range(20))]
    names = []
    monkeypatch.syspath_prepend(os.getcwd())
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        (name,) = re.findall(r"^class (\w+)", block, re.MULTILINE)
        names.append(name)
        Path(f"page_{name.lower()}.py").write_text(block)
        kwargs = {"kwargs": {"url": verifier}} if name == "Gym" else {}
        scorer = start(config("mine", {"class": f"page_{name.lower()}.{name}", **kwargs}))
        assert failures(results(scorer, *responses)) == [None] * len(responses), name
        scorer.close()
    assert names == ["Brevity", "Careful", "Guess", "Judge", "Exact", "Gym"]
