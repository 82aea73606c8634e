"""Worker processes that call an environment, as the rollout process sees them.

One thread (`WorkerPool._run`) owns all of them. It consumes jobs, workers' messages and the clock, and produces an
outcome for each job. It waits for whichever comes first; a byte in a pipe announces a job. A worker that is too slow is
killed and replaced at once, whatever the rollout process's main thread does meanwhile. Jobs sent ahead to a lost worker
go to another.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

import msgspec

from tandem.common.errors import ConfigError, HelperLost, RewardError
from tandem.common.messages import EngineServer
from tandem.common.process_lifetime import TRACE
from tandem.common.returned import line
from tandem.config import Config
from tandem.rollout.environments.outcomes import (
    KILLED_FROM_OUTSIDE,
    MOST_RETRIES,
    Failure,
    Job,
    Outcome,
    timed_out,
)
from tandem.rollout.environments.processes.channel import Answer, Begin, Reader, Ready, packed
from tandem.rollout.environments.processes.guarded import ForkServer, how_it_ended

_COROUTINES = 256
"""Calls of an asynchronous environment that one worker has at once."""
_AHEAD_S, _MOST_AHEAD = 0.02, 64
"""Seconds of work, and number of calls, sent ahead to a worker; otherwise cheap calls would wait for messages."""
_SAY_SO_S = 1.0
"""Seconds beyond a call's deadline that an asynchronous worker has to report that it was exceeded."""
_BATCHES = 3
"""Batches at a worker that scores batches: one being scored, others to choose the next from."""
_PATIENCE_S = 1.0
_CLOSE_S = 0.5
_MOST_UNMADE, _PAUSE_S = 3, 0.5
"""Failed replacements of a worker in a row, each after a longer pause, before waiting jobs are lost."""
_MOST_IDLE_DEATHS = 10
"""Deaths of idle workers since the last answer of any, before the pool gives up."""
_ready = msgspec.msgpack.Decoder(Ready)
_answers = msgspec.msgpack.Decoder(Answer)


class _Worker:
    """One worker process, and its jobs."""

    def __init__(
        self, calls: socket.socket, lifeline: socket.socket, most_at_once: int, *, is_first: bool, num_unmade: int
    ) -> None:
        """Note a new worker; `most_at_once` limits its calls if its environment is asynchronous."""
        self.calls = calls
        self.is_first = is_first
        """Whether it replaces no other worker."""
        self.num_unmade = num_unmade
        """Workers that failed in its place before it."""
        self._most_at_once = most_at_once
        self.lifeline = lifeline
        self.calls.setblocking(False)
        self.reader = Reader()
        self.outgoing = bytearray()
        self.ready: Ready | None = None
        self.is_async = False
        """Whether it does several calls at once."""
        self.batch_size = 0
        """Calls in a batch, if it scores batches; else 0."""
        self.jobs: dict[int, Job] = {}
        """Jobs by the numbers of their calls, in the order in which they were sent."""
        self.since = time.monotonic()
        """When its current work began."""
        self.mean_s = _AHEAD_S
        """Rough duration of a call."""
        self.is_alone = False
        """Whether it has a job that must run by itself."""
        self.is_full = False
        """Whether its socket takes no more for now."""

    def room(self, share: int) -> int:
        """Return how many jobs to send to it now; none before half of its jobs are done."""
        if self.ready is None or self.is_alone:
            return 0
        if self.is_async:
            return min(self._most_at_once - len(self.jobs), share)
        if self.batch_size:
            return min(_BATCHES * self.batch_size - len(self.jobs), share)
        ahead = min(_MOST_AHEAD, max(1, int(_AHEAD_S / self.mean_s)))
        return min(ahead, share) - len(self.jobs) if len(self.jobs) <= ahead // 2 else 0

    def give(self, job: Job, message: bytes) -> None:
        """Append a job to those it has."""
        job.started = time.monotonic()
        if not self.jobs:
            self.since = job.started
        self.jobs[job.call.number] = job
        self.is_alone = job.alone
        self.outgoing += message

    def take(self, answer: Answer) -> Job | None:
        """Return the job that an answer is for, and start the clock of the next."""
        now = time.monotonic()
        self.mean_s = max(1e-6, 0.8 * self.mean_s + 0.2 * (now - self.since))
        self.since = now
        self.is_alone = False
        return self.jobs.pop(answer.number, None)

    def due(self, build_s: float, timeout_s: float) -> float:
        """Return the time from which it is too slow."""
        if self.ready is None:
            return self.since + build_s
        if not self.jobs:
            return float("inf")
        first = next(iter(self.jobs.values()))
        assert first.started is not None
        return first.started + timeout_s + _SAY_SO_S if self.is_async else self.since + timeout_s

    def close(self) -> None:
        """Have its guardian end it."""
        self.calls.close()
        self.lifeline.close()


class _Vacancy(NamedTuple):
    """The place of a worker that failed to make its environment."""

    at: float
    """When to try again to fill it."""
    is_first: bool
    """Whether no worker has held it yet."""
    num_unmade: int
    """Workers in a row that failed to fill it."""


class WorkerPool:
    """`num_workers` processes, each with an environment of its own."""

    def __init__(self, server: ForkServer, config: Config, engine: EngineServer | None) -> None:
        """Fork the workers; `engine` is the rollout's own, for them to ask."""
        self._server = server
        self._begin = packed(Begin(engine))
        self._name = str(config.data.environment)
        self._settings = config.env[self._name]
        self._timeout_s = self._settings.longest_call_s
        judge = self._settings.judge
        self._most_at_once = (
            _COROUTINES if judge is None else math.ceil(judge.max_concurrency / self._settings.num_workers)
        )
        self._build_s = config.cluster.deadlines.build_s
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        """Jobs of a worker that ended while several ran at once; each is retried by itself."""
        self.done: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._error: Exception | None = None
        self._first: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._idle_deaths = 0
        self._vacancies: list[_Vacancy] = []
        self._is_closing = False
        # A counter in the kernel: each submission adds to it, and the thread reads it before it looks for jobs. There
        # is no flag beside it that could disagree with it.
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="reward-workers", daemon=True)
        self._thread.start()

    def await_ready(self) -> bool:
        """Wait for the first worker's environment; return whether it is multi-turn. Raises `ConfigError`."""
        ready = self._first.get()  # it comes, or the error, within `build_s`
        self.check()
        assert ready is not None
        return ready.is_multi_turn

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)
        self._wake()

    def check(self) -> None:
        """Raise whatever keeps the pool from going on."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let workers end if they do so at once, and end the others."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        os.close(self._woken)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for _ in range(self._settings.num_workers):
                self._hire(is_first=True)
            while not self._is_closing:
                if self._vacancies:
                    self._fill_vacancies()
                self._assign()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        os.eventfd_read(self._woken)
                    elif key.data in self._workers:
                        if key.data.is_full:
                            self._speak(key.data)
                        self._hear(key.data)
                self._end_the_slow()
        except Exception as error:
            self._error = error
        finally:
            self._first.put(None)
            self._let_go()
            self._selector.close()

    def _hire(self, *, is_first: bool = False, num_unmade: int = 0) -> None:
        sockets = self._server.fork()
        worker = _Worker(*sockets, self._most_at_once, is_first=is_first, num_unmade=num_unmade)
        worker.outgoing += self._begin
        self._workers.add(worker)
        self._selector.register(worker.calls, selectors.EVENT_READ, worker)

    def _fill_vacancies(self) -> None:
        now = time.monotonic()
        due = [vacancy for vacancy in self._vacancies if vacancy.at <= now]
        self._vacancies = [vacancy for vacancy in self._vacancies if vacancy.at > now]
        for vacancy in due:
            self._hire(is_first=vacancy.is_first, num_unmade=vacancy.num_unmade)

    def _assign(self) -> None:
        """Send waiting jobs to the workers with the least to do."""
        workers = sorted(self._workers, key=lambda worker: len(worker.jobs))
        for worker in workers:
            if self._suspects and worker.ready is not None and not worker.jobs:
                self._give(worker, self._suspects.popleft())
        share = math.ceil(len(self._waiting) / self._settings.num_workers)
        for worker in workers:
            room = worker.room(share)
            while room > 0 and self._waiting:
                room -= self._give(worker, self._waiting.popleft())
            if worker.outgoing and not worker.is_full:
                self._speak(worker)

    def _give(self, worker: _Worker, job: Job) -> bool:
        """Send a job to a worker; return False if the worker is gone."""
        if not job.wanted:
            return False
        try:
            message = packed(job.call)
        except Exception as error:  # a problem may hold anything
            what = f"the problem cannot be sent to a worker process: {type(error).__name__}: {error}"
            self.done.put((job, Failure(line(what), on_purpose=True)))
            return False
        worker.give(job, message)
        return True

    def _speak(self, worker: _Worker) -> None:
        """Send what the socket takes now; a busy worker reads nothing."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is noticed elsewhere
            while worker.outgoing:
                del worker.outgoing[: worker.calls.send(worker.outgoing)]
        if worker.is_full != bool(worker.outgoing):
            worker.is_full = bool(worker.outgoing)
            waits = selectors.EVENT_WRITE if worker.is_full else 0
            self._selector.modify(worker.calls, selectors.EVENT_READ | waits, worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            data = worker.calls.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        try:
            for message in worker.reader.messages(data):
                self._understand(worker, message)
        except (msgspec.MsgspecError, RewardError):  # the environment writes to sockets that are not its own
            data = b""
        if not data:
            how = how_it_ended(worker.lifeline)
            failure = Failure(f"its worker process ended: {how}")
            self._lose(worker, failure, was_killed=how in KILLED_FROM_OUTSIDE)

    def _understand(self, worker: _Worker, message: bytes) -> None:
        if worker.ready is None:
            worker.ready = ready = _ready.decode(message)
            worker.is_async, worker.batch_size = ready.is_async, ready.batch_size
            if ready.error:
                self._miss(worker, ready.error)
                return
            self._first.put(ready)
            return
        answer = _answers.decode(message)
        self._idle_deaths = 0
        if (job := worker.take(answer)) is not None:
            self.done.put((job, answer.outcome))

    def _patience(self) -> float:
        """Return the seconds until a worker is too slow, or a vacancy is due."""
        due = time.monotonic() + _PATIENCE_S
        for worker in self._workers:
            due = min(due, worker.due(self._build_s, self._timeout_s))
        for vacancy in self._vacancies:
            due = min(due, vacancy.at)
        return max(0.0, due - time.monotonic())

    def _end_the_slow(self) -> None:
        now = time.monotonic()
        for worker in [*self._workers]:
            if now >= worker.due(self._build_s, self._timeout_s):
                if worker.ready is None:
                    self._miss(worker, f"env.{self._name}: the environment was not made within {self._build_s:g} s")
                else:
                    self._lose(worker, timed_out(self._timeout_s))

    def _lose(self, worker: _Worker, failure: Failure, *, was_killed: bool = False) -> None:
        """End a worker, put another in its place, and find out which of its jobs is to blame.

        `was_killed`: by a signal that usually comes from outside. Then its jobs are retried elsewhere before any is
        blamed.
        """
        if worker.ready is None:
            why = f"env.{self._name}: making the environment failed: {failure.what}"
            self._miss(worker, why, was_killed=was_killed)
            return
        if failure.timed_out:
            with contextlib.suppress(OSError):
                worker.lifeline.send(TRACE)  # where it is stuck, for the log
        self._end(worker)
        jobs = [*worker.jobs.values()]
        self._idle_deaths += not jobs
        if self._idle_deaths > _MOST_IDLE_DEATHS:
            what = f"environment {self._name!r}: its worker processes end while they have nothing to do"
            raise HelperLost(f"{what}: {failure.what}") if was_killed else RewardError(what)
        are_beside = worker.is_async or bool(worker.batch_size)
        running = jobs if are_beside else jobs[:1]
        for job in running:
            job.num_losses += 1
        if was_killed and all(job.num_losses <= MOST_RETRIES for job in running):
            self._waiting.extendleft(reversed(jobs))
        elif worker.batch_size and all(job.num_losses == 1 for job in jobs):
            self._waiting.extendleft(reversed(jobs))  # hardly any job's fault: a reward model computes the same for all
        else:
            self._blame(jobs, failure, are_beside=are_beside)
        self._hire()

    def _miss(self, worker: _Worker, why: str, *, was_killed: bool = False) -> None:
        """End a worker that has not made its environment; retry if it was killed, or was a replacement.

        If that keeps failing and no other worker is left, waiting jobs fail and `on_error` decides. Raises `HelperLost`
        if the worker was killed, which is not the environment's fault. Raises `ConfigError` for the first workers: the
        environment cannot be made.
        """
        self._end(worker)
        if worker.is_first and not was_killed:
            raise ConfigError(why)
        num_unmade = worker.num_unmade + 1  # of this place: when the fork server dies, it takes all workers along
        is_in_vain = num_unmade >= _MOST_UNMADE and not any(each.ready is not None for each in self._workers)
        at = time.monotonic() + _PAUSE_S * num_unmade
        # The replacement is retried as often.
        self._vacancies.append(_Vacancy(at, worker.is_first, 0 if is_in_vain else num_unmade))
        if not is_in_vain:
            return
        if was_killed:
            raise HelperLost(f"{why}; that was attempt {num_unmade}")
        failure = Failure(line(f"no worker process could take another's place in {num_unmade} attempts: {why}"))
        for job in (*self._suspects, *self._waiting):
            self.done.put((job, failure))
        self._suspects.clear()
        self._waiting.clear()

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.calls)
        worker.close()

    def _blame(self, jobs: list[Job], failure: Failure, *, are_beside: bool) -> None:
        """Blame the first job of a lost worker; of several jobs that ran together, none yet."""
        if len(jobs) == 1 or (jobs and not are_beside):
            self.done.put((jobs.pop(0), failure))
        if are_beside:
            for job in jobs:
                job.alone = True
            self._suspects.extend(jobs)
        else:
            self._waiting.extendleft(reversed(jobs))

    def _let_go(self) -> None:
        """Give idle workers the time to end as they wish."""
        idle = [worker for worker in self._workers if worker.ready is not None and not worker.jobs]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.calls.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLOSE_S
        for worker in idle:
            how_it_ended(worker.lifeline, deadline - time.monotonic())
        for worker in self._workers:
            worker.close()
        self._workers.clear()
