"""Helper processes of environments that are killed from outside: nobody's response suffers by it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from environment_harness import WAIT_S, config, problem, results, said

from tandem.common.errors import HelperLost
from tandem.config import Config
from tandem.rollout.agents.programs import ProgramLauncher
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import EnvironmentCall, ScoringCall, UnscoredResponse
from tandem.rollout.environments.processes.guarded import GuardedProcess
from tandem.rollout.environments.processes.workers import WorkerPool
from tandem.rollout.environments.scorer import EnvironmentScorer
from tests.harness.leaks import gone
from tests.harness.runs.running import wait_until

Start = Callable[..., EnvironmentScorer]


@pytest.fixture
def start() -> Iterator[Start]:
    scorers: list[EnvironmentScorer] = []

    def started(name: str, **settings: object) -> EnvironmentScorer:
        made: Config = config("mine", {"class": f"own_environments.{name}", **settings})
        scorers.append(EnvironmentScorer(made))
        scorers[-1].await_ready()
        return scorers[-1]

    yield started
    for scorer in scorers:
        scorer.close()


def kill_fork_server(scorer: EnvironmentScorer) -> GuardedProcess:
    """Kill the process that forks workers, the first child of its guardian; return what it was."""
    assert scorer._server is not None
    killed = scorer._server._process
    deadline = time.monotonic() + WAIT_S
    while not (children := psutil.Process(killed._process.pid).children()):  # the guardian may not have forked yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    min(children, key=psutil.Process.create_time).kill()
    return killed


def await_another(scorer: EnvironmentScorer, killed: GuardedProcess) -> None:
    """Wait until there is another fork server, which has imported the class."""
    assert scorer._server is not None
    deadline = time.monotonic() + WAIT_S
    while scorer._server._process is killed:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def callers(count: int) -> list[int]:
    """Wait until so many calls have begun; return the processes that they are in."""
    deadline = time.monotonic() + WAIT_S
    while not Path("calls").exists() or len(Path("calls").read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(word) for word in Path("calls").read_text().split()]


def test_a_fork_server_that_is_killed_is_started_again(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = start("Length", num_workers=2)  # the first failure would end the run
    assert results(scorer, "abc") == [Score(3.0, True)]
    for _ in range(3):
        killed = kill_fork_server(scorer)
        assert results(scorer, *("x" * n for n in range(20))) == [Score(float(n), n > 2) for n in range(20)]
        await_another(scorer, killed)
        assert results(scorer, "abc") == [Score(3.0, True)]
    assert capfd.readouterr().out.count("the process that forks workers has ended (killed by SIGKILL)") == 3


def test_a_fork_server_that_is_killed_while_workers_are_at_work_costs_no_response(start: Start) -> None:
    scorer = start("HeldUntilTold", num_workers=2)
    for key in range(4):
        scorer.submit(key, problem(), said("abc"))
    first = callers(2)
    kill_fork_server(scorer)
    assert set(callers(4)[2:]).isdisjoint(first)
    Path("go").touch()
    assert _all(scorer, 4) == [Score(3.0, True)] * 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_whose_worker_is_killed_twice_is_made_again(start: Start, number: signal.Signals) -> None:
    scorer = start("HeldUntilTold", num_workers=1)
    scorer.submit(0, problem(), said("abc"))
    for count in (1, 2):
        os.kill(callers(count)[-1], number)
    assert len(set(callers(3))) == 3
    Path("go").touch()
    assert _all(scorer, 1) == [Score(3.0, True)]


def test_a_call_whose_worker_is_killed_each_time_has_failed(start: Start) -> None:
    scorer = start("HeldUntilTold", num_workers=1, on_error="zero")
    scorer.submit(0, problem(), said("abc"))
    for count in (1, 2, 3):
        os.kill(callers(count)[-1], signal.SIGKILL)
    (failed,) = _all(scorer, 1)
    assert isinstance(failed, UnscoredResponse)
    assert failed.failure == "environment 'mine', problem 'p1': its worker process ended: killed by SIGKILL"
    Path("go").touch()
    assert results(scorer, "ab") == [Score(2.0, True)]


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_call_whose_worker_is_stopped_is_made_again_elsewhere(start: Start, is_continued: bool) -> None:
    """The first failure would end the run; a stop that is over before the limit counts, too."""
    scorer = start("HeldUntilTold", num_workers=1, timeout_s=6.0)
    scorer.submit(0, problem(), said("abc"))
    (stopped,) = callers(1)
    os.kill(stopped, signal.SIGSTOP)
    if is_continued:
        assert isinstance(scorer._pool, WorkerPool)
        deadline = time.monotonic() + WAIT_S
        while not any(worker.stopped_at > 0 for worker in [*scorer._pool._workers]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(stopped, signal.SIGCONT)
    assert callers(2)[1] != stopped
    Path("go").touch()
    assert _all(scorer, 1) == [Score(3.0, True)]
    assert not psutil.pid_exists(stopped)


def test_a_call_whose_worker_is_stopped_each_time_has_failed_and_code_that_is_slow_is_not_called_again(
    start: Start,
) -> None:
    scorer = start("HeldUntilTold", num_workers=1, timeout_s=4.0, on_error="zero")
    scorer.submit(0, problem(), said("abc"))
    for count in (1, 2, 3):
        os.kill(callers(count)[-1], signal.SIGSTOP)
    (failed,) = _all(scorer, 1)
    assert isinstance(failed, UnscoredResponse)
    assert "its worker process was stopped from outside, and took longer than 4 s" in failed.failure
    scorer.submit(0, problem(), said("abc"))
    (slow,) = _all(scorer, 1)
    assert isinstance(slow, UnscoredResponse)
    assert "took longer than 4 s" in slow.failure
    assert len(callers(4)) == 4


def _all(scorer: EnvironmentScorer, count: int) -> list[object]:
    found: dict[int, object] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found |= scorer.poll()
        time.sleep(0.001)
    return [found[key] for key in range(count)]


MADE_IN_ITS_TIME = """
import os, time
from pathlib import Path
from tandem.rollout.environments import Score

def begin(what):
    with open(what, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    deadline = time.monotonic() + {wait_s}
    while not Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

if "{when}" == "imported":
    begin("calls")

class Made:
    def __init__(self):
        if "{when}" == "made":
            begin("calls")

    def score(self, problem, response):
        return Score(float(len(response)), True)
"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Begin to make a scorer whose class is imported, or made, only once the file ``go`` is there."""

    def begin(when: str, **settings: object) -> EnvironmentScorer:
        Path("held.py").write_text(MADE_IN_ITS_TIME.format(when=when, wait_s=WAIT_S))
        monkeypatch.syspath_prepend(os.getcwd())
        return EnvironmentScorer(config("mine", {"class": "held.Made", "num_workers": 1, **settings}))

    return begin


class Ready:
    """Waits in a thread until a scorer can score."""

    def __init__(self, scorer: EnvironmentScorer) -> None:
        self.error: Exception | None = None
        self._scorer = scorer
        self._thread = threading.Thread(target=self._await)
        self._thread.start()

    def outcome(self) -> Exception | None:
        """Return what it could not be made for."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.error

    def _await(self) -> None:
        try:
            self._scorer.await_ready()
        except Exception as error:
            self.error = error


@pytest.mark.parametrize("when", ["imported", "made"])
def test_a_helper_that_is_killed_while_it_begins_is_started_again(held: Start, when: str) -> None:
    with contextlib.closing(held(when)) as scorer:
        ready = Ready(scorer)
        for count in (1, 2):
            os.kill(callers(count)[-1], signal.SIGKILL)
        assert len(set(callers(3))) == 3
        Path("go").touch()
        assert ready.outcome() is None
        assert results(scorer, "abc") == [Score(3.0, True)]


def test_a_fork_server_that_takes_all_workers_along_while_they_begin_counts_once(held: Start) -> None:
    with contextlib.closing(held("made", num_workers=4)) as scorer:
        ready = Ready(scorer)
        callers(4)
        kill_fork_server(scorer)
        callers(8)
        Path("go").touch()
        assert ready.outcome() is None
        assert results(scorer, "abc") == [Score(3.0, True)]


@pytest.mark.parametrize("when", ["imported", "made"])
def test_that_helpers_are_killed_each_time_is_no_error_of_the_users(held: Start, when: str) -> None:
    """Another process may have more luck, or another host more memory."""
    with contextlib.closing(held(when)) as scorer:
        ready = Ready(scorer)
        for count in (1, 2, 3):
            os.kill(callers(count)[-1], signal.SIGKILL)
        error = ready.outcome()
        assert isinstance(error, HelperLost), error
        assert "killed by SIGKILL" in str(error)


def test_a_fork_server_that_is_killed_again_while_it_imports_is_started_again(held: Start) -> None:
    with contextlib.closing(held("imported")) as scorer:
        Path("go").touch()
        scorer.await_ready()
        assert results(scorer, "abc") == [Score(3.0, True)]
        Path("go").unlink()
        kill_fork_server(scorer)
        for count in (2, 3):  # those that take its place
            os.kill(callers(count)[-1], signal.SIGKILL)
        callers(4)
        Path("go").touch()
        assert results(scorer, "abcd") == [Score(4.0, True)]


def test_a_response_that_no_worker_can_be_made_for_is_no_failure_of_the_environment(
    held: Start,
) -> None:
    """Since each was killed from outside while it was made, which ``on_error`` is not asked about."""
    with contextlib.closing(held("made")) as scorer:
        Path("go").touch()
        scorer.await_ready()
        Path("go").unlink()
        (first,) = callers(1)
        os.kill(first, signal.SIGKILL)
        for count in (2, 3, 4):
            os.kill(callers(count)[-1], signal.SIGKILL)
        with pytest.raises(HelperLost, match="killed by SIGKILL"):
            results(scorer, "abc")


def patient(scorer: EnvironmentScorer) -> WorkerPool:
    """Return the pool, whose thread looks for jobs only when it is woken: a lost wake-up is never made up for."""
    pool = scorer._pool
    assert isinstance(pool, WorkerPool)
    pool._patience = lambda: 4 * WAIT_S  # type: ignore[method-assign]
    assert results(scorer, "abc") == [Score(3.0, True)]
    return pool


def test_no_wake_up_is_lost_however_often_jobs_come(start: Start) -> None:
    pool = patient(start("Length", num_workers=1))
    for number in range(10, 3000):  # each comes when the thread may just have looked
        job = EnvironmentCall(0, ScoringCall(number, problem(), said("x")))
        pool.submit(job)
        assert pool.outcomes.get(timeout=WAIT_S) == (job, Score(1.0, False))


def test_a_wake_up_that_comes_while_another_is_heeded_is_kept(start: Start) -> None:
    pool = patient(start("Length", num_workers=1))
    heeding, goes_on = threading.Event(), threading.Event()
    assign = pool._assign

    def slowly() -> None:
        assign()
        heeding.set()
        goes_on.wait(WAIT_S)

    pool._assign = slowly  # type: ignore[method-assign]
    os.eventfd_write(pool._woken, 1)
    assert heeding.wait(WAIT_S)
    job = EnvironmentCall(0, ScoringCall(10, problem(), said("abc")))
    pool.submit(job)  # the thread has looked for jobs, and does not wait yet
    goes_on.set()
    assert pool.outcomes.get(timeout=WAIT_S) == (job, Score(3.0, True))


def test_daemons_of_a_program_end_though_all_above_them_are_killed_at_once() -> None:
    """A program has an environment of its own."""
    launcher, pids = ProgramLauncher(), Path("pids")
    script = "setsid sleep 600 & echo $! > pids; exec sleep 600"
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        environment = {"PATH": os.environ["PATH"]}
        lifeline = launcher.start(["/bin/sh", "-c", script], environment, (nowhere, nowhere, nowhere))
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), lambda: "a daemon", timeout_s=WAIT_S)
        daemon = psutil.Process(int(pids.read_text()))
        guardian = psutil.Process(launcher._process._process.pid)
        wait_until(lambda: daemon.name() == "sleep", lambda: "its program", timeout_s=WAIT_S)
        below = guardian.children(recursive=True)
        victims = [guardian, *(child for child in below if child.children() or child == daemon.parent())]
        assert len(victims) >= 3, "also the launcher, and the guardian of the program"
        for victim in victims:
            victim.suspend()
        for victim in victims:
            victim.kill()
        assert gone([child.pid for child in below])
        assert gone([daemon.pid])
        lifeline.close()
    finally:
        os.close(nowhere)
        launcher.close()
