"""Helper processes that are stopped from outside: they are replaced, and nobody's response suffers by it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from agents_harness import write_agent
from environment_harness import WAIT_S, config, problem, results, said
from rollout_harness import Rollout

from tandem.rollout.environments import Score
from tandem.rollout.environments.processes import guarded, workers
from tandem.rollout.environments.processes.workers import WorkerPool
from tandem.rollout.environments.scorer import EnvironmentScorer
from tests.harness.leaks import gone
from tests.harness.runs.running import wait_until

Start = Callable[..., EnvironmentScorer]
LIMIT_S = 12.0
"""A limit that only what is stopped exceeds, also on a machine with much else to do."""


@pytest.fixture
def start() -> Iterator[Start]:
    scorers: list[EnvironmentScorer] = []

    def started(name: str, **settings: object) -> EnvironmentScorer:
        scorers.append(
            EnvironmentScorer(config("mine", {"class": f"own_environments.{name}", "num_workers": 1, **settings}))
        )
        scorers[-1].await_ready()
        return scorers[-1]

    yield started
    for scorer in scorers:
        scorer.close()


def server_of(scorer: EnvironmentScorer) -> psutil.Process:
    """Return the process that forks workers, the first child of its guardian."""
    assert scorer._server is not None
    guardian = psutil.Process(scorer._server._process._process.pid)
    wait_until(lambda: bool(guardian.children()), lambda: "a fork server")
    return min(guardian.children(), key=psutil.Process.create_time)


def worker_of(scorer: EnvironmentScorer) -> workers.EnvironmentWorker:
    """Return the only worker of a scorer."""
    assert isinstance(scorer._pool, WorkerPool)
    (worker,) = scorer._pool._workers
    return worker


def callers(count: int) -> list[int]:
    """Wait until so many calls have begun; return the processes that they are in."""
    deadline = time.monotonic() + WAIT_S
    while not Path("calls").exists() or len(Path("calls").read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(word) for word in Path("calls").read_text().split()]


@pytest.mark.parametrize("whom", ["server", "guardian"])
def test_a_fork_server_that_is_stopped_is_replaced(start: Start, whom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure would end the run; it is never continued, and leaves nothing."""
    monkeypatch.setattr(workers, "_FORK_S", LIMIT_S)
    scorer = start("HeldUntilTold")
    scorer.submit(0, problem(), said("abc"))
    (first,) = callers(1)
    stopped = server_of(scorer)
    stopped = stopped if whom == "server" else psutil.Process(stopped.ppid())
    stopped.suspend()
    os.kill(first, signal.SIGKILL)
    Path("go").touch()
    assert _only(scorer) == Score(3.0, True)
    scorer.close()
    assert gone([stopped.pid, first])


ANSWERS = """
import socket, sys
sys.stdin.read()
socket.socket(fileno=int(sys.argv[1])).sendall(b"-9")
"""


def test_a_guardian_that_is_stopped_still_says_how_its_worker_has_ended(start: Start) -> None:
    scorer = start("HeldUntilTold")
    scorer.submit(0, problem(), said("abc"))
    (first,) = callers(1)
    guardian = psutil.Process(first).ppid()
    os.kill(guardian, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    assert callers(2)[1] != first
    Path("go").touch()
    assert _only(scorer) == Score(3.0, True)
    assert gone([first, guardian])


def test_a_guardian_that_is_stopped_while_it_is_asked_still_answers() -> None:
    """A stop can be obeyed after one has looked: a busy machine runs a process late."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", ANSWERS, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.PIPE
        ) as guardian,
    ):
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(guarded.ask_guardian(ours, guardian.pid)))
        thread.start()
        time.sleep(0.1)
        os.kill(guardian.pid, signal.SIGSTOP)
        assert guardian.stdin is not None
        guardian.stdin.close()
        thread.join()
    assert answers == ["killed by SIGKILL"]


def test_a_slow_worker_ends_though_its_guardian_is_stopped(start: Start) -> None:
    scorer = start("HeldUntilTold", timeout_s=1.0, on_error="zero")
    scorer.submit(0, problem(), said("abc"))
    (first,) = callers(1)
    os.kill(psutil.Process(first).ppid(), signal.SIGSTOP)
    assert not isinstance(_only(scorer), Score)
    assert gone([first])


HELD = """
import os, time
from pathlib import Path
from tandem.rollout.environments import Score

def begin():
    with open("calls", "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    deadline = time.monotonic() + {wait_s}
    while not Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

if "{when}" == "imported":
    begin()

class Made:
    def __init__(self):
        if "{when}" == "made":
            begin()

    def score(self, problem, response):
        return Score(float(len(response)), True)
"""


@pytest.mark.parametrize("when", ["imported", "made"])
def test_a_helper_that_is_stopped_while_it_begins_is_replaced(
    start: Start, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "_LOOK_S", 1.0)
    Path("held.py").write_text(HELD.format(when=when, wait_s=WAIT_S))
    monkeypatch.syspath_prepend(os.getcwd())
    made = config("mine", {"class": "held.Made", "num_workers": 1})
    deadlines = msgspec.structs.replace(made.cluster.deadlines, build_s=LIMIT_S if when == "made" else WAIT_S)
    made = msgspec.structs.replace(made, cluster=msgspec.structs.replace(made.cluster, deadlines=deadlines))
    scorer = EnvironmentScorer(made)
    try:

        def stop_the_first() -> None:
            os.kill(callers(1)[0], signal.SIGSTOP)
            callers(2)
            Path("go").touch()

        thread = threading.Thread(target=stop_the_first)
        thread.start()
        scorer.await_ready()
        thread.join()
        assert results(scorer, "abc") == [Score(3.0, True)]
    finally:
        scorer.close()


OWNER = """
import os, socket, sys, time
from tandem.common.process_lifetime import fork_guarded

ours, theirs = socket.socketpair()
owner = os.getpid()
if os.fork() == 0:
    ours.close()
    fork_guarded(theirs.fileno(), owner)
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_a_guardian_that_is_stopped_ends_with_its_owner() -> None:
    # An environment of this process may have named it for its descendants: a guardian would wait for its end.
    unnamed = {name: value for name, value in os.environ.items() if name != "TANDEM_STARTED_BY"}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=unnamed) as owner:
        assert owner.stdout is not None
        guardian, child = map(int, owner.stdout.readline().split())
        os.kill(guardian, signal.SIGSTOP)
        owner.kill()
    assert gone([guardian, child])


PLAYED = """
answer = ask([user("12")])
with open("begun", "a") as file:
    file.write("x")
if len(open("begun").read()) == 1:
    import psutil
    psutil.Process().{whom}.suspend()
    time.sleep(600)
reward(1)
"""


@pytest.mark.parametrize(
    "whom",
    ["children() or psutil.Process()", "parents()[0]", "parents()[1]", "parents()[2]"],
    ids=["program", "guardian", "launcher", "guardian-of-launcher"],
)
def test_an_episode_whose_program_is_stopped_is_played_again(
    tmp_path: Path, whom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure would end the run."""
    monkeypatch.chdir(tmp_path)
    source = PLAYED.format(whom=whom)
    rollout = Rollout(tmp_path, None, timeout_s=LIMIT_S, command=[*write_agent(source)])
    try:
        ((scored, _),) = rollout.run(rollout.group(0, [7])).values()
        assert (scored.reward, scored.dropped) == (1.0, False)
        ((scored, _),) = rollout.run(rollout.group(1, [8])).values()
        assert (scored.reward, scored.dropped) == (1.0, False)
    finally:
        rollout.service.close()
    assert Path("begun").read_text() == "xxx"


def _only(scorer: EnvironmentScorer) -> object:
    """Return the outcome of the only call."""
    deadline = time.monotonic() + WAIT_S
    while not (outcomes := scorer.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return outcomes[0][1]
