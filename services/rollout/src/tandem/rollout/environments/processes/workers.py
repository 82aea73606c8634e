"""Worker processes that call an environment, as the rollout process sees them.

One thread (`WorkerPool._run`) owns all of them. It consumes jobs, workers' messages and the clock, and produces an
outcome for each job. It waits for whichever comes first; a byte in a pipe announces a job. A worker that is too slow is
killed and replaced at once, whatever the rollout process's main thread does meanwhile (`losing`).
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

import msgspec

from tandem.common.errors import RewardError
from tandem.common.messages import EngineServer
from tandem.common.process_lifetime import continue_stopped, is_stopped
from tandem.common.user_code import line
from tandem.config import Config
from tandem.rollout.environments import outcomes
from tandem.rollout.environments.processes import channel
from tandem.rollout.environments.processes.guarded import WorkerForkServer, ask_guardian
from tandem.rollout.environments.processes.losing import WaitingJobs, WorkerLosses

_COROUTINES = 256
"""Calls of an asynchronous environment that one worker has at once."""
_AHEAD_S, _MOST_AHEAD = 0.02, 64
"""Seconds of work, and number of calls, sent ahead to a worker; otherwise cheap calls would wait for messages."""
_LOOK_AFTER_S = 1.0
"""Seconds of a call after which its process may have been stopped from outside."""
_SAY_SO_S = 1.0
"""Seconds beyond a call's deadline that an asynchronous worker has to report that it was exceeded."""
_BATCHES = 3
"""Batches at a worker that scores batches: one being scored, others to choose the next from."""
_FORK_S = 30.0
"""Longest time of a fork, which takes milliseconds; a fork server that takes longer hangs, and is replaced."""
_PATIENCE_S = 1.0
"""Longest time between two looks at workers."""
_CLOSE_S = 0.5
_forked = msgspec.msgpack.Decoder(channel.WorkerForked)
_ready = msgspec.msgpack.Decoder(channel.WorkerReady)
_answers = msgspec.msgpack.Decoder(channel.CallOutcome)


class EnvironmentWorker:
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
        self.reader = channel.MessageReader()
        self.outgoing = bytearray()
        self.forked: channel.WorkerForked | None = None
        self.ready: channel.WorkerReady | None = None
        self.is_async = False
        """Whether it does several calls at once."""
        self.batch_size = 0
        """Calls in a batch, if it scores batches; else 0."""
        self.jobs: dict[int, outcomes.EnvironmentCall] = {}
        """Jobs by the numbers of their calls, in the order in which they were sent."""
        self.since = time.monotonic()
        """When its current work began."""
        self.mean_s = _AHEAD_S
        """Rough duration of a call."""
        self.is_alone = False
        """Whether it has a job that must run by itself."""
        self.is_full = False
        """Whether its socket takes no more for now."""
        self.stopped_at = -math.inf
        """When it was last seen to be stopped by a signal."""

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

    def give(self, job: outcomes.EnvironmentCall, message: bytes) -> None:
        """Append a job to those it has."""
        job.started = time.monotonic()
        if not self.jobs:
            self.since = job.started
        self.jobs[job.call.number] = job
        self.is_alone = job.alone
        self.outgoing += message

    def take(self, answer: channel.CallOutcome) -> outcomes.EnvironmentCall | None:
        """Return the job that an answer is for, and start the clock of the next."""
        now = time.monotonic()
        self.mean_s = max(1e-6, 0.8 * self.mean_s + 0.2 * (now - self.since))
        self.since = now
        self.is_alone = False
        return self.jobs.pop(answer.number, None)

    @property
    def begun_at(self) -> float:
        """When the work began whose time limit comes next."""
        if self.ready is None or not self.is_async or not self.jobs:
            return self.since
        first = next(iter(self.jobs.values()))
        assert first.started is not None
        return first.started

    def due(self, build_s: float, timeout_s: float) -> float:
        """Return the time from which it is too slow."""
        if self.forked is None:
            return self.since + _FORK_S
        if self.ready is None:
            return self.since + build_s
        if not self.jobs:
            return float("inf")
        return self.begun_at + timeout_s + (_SAY_SO_S if self.is_async else 0.0)

    def look(self, now: float, timeout_s: float) -> None:
        """Note whether it is stopped: what takes long because of that is no slow code.

        A call that has taken a small share of its time needs no such look.
        """
        if self.forked is None or (self.ready is not None and not self.jobs):
            return
        if now - self.begun_at >= min(_LOOK_AFTER_S, timeout_s / 4) and is_stopped(self.forked.pid):
            self.stopped_at = now

    def ask_for_ending(self) -> str:
        """Ask its guardian how it has ended."""
        return ask_guardian(self.lifeline, None if self.forked is None else self.forked.guardian)

    def close(self) -> None:
        """Have its guardian end it."""
        self.calls.close()
        self.lifeline.close()
        if self.forked is not None:
            continue_stopped(self.forked.guardian)


class WorkerPool:
    """`num_workers` processes, each with an environment of its own."""

    def __init__(self, server: WorkerForkServer, config: Config, engine: EngineServer | None) -> None:
        """Fork the workers; `engine` is the rollout's own, for them to ask."""
        self._server = server
        self._begin = channel.packed(channel.WorkerStart(engine))
        self._name = str(config.data.environment)
        self._settings = config.env[self._name]
        self._timeout_s = self._settings.longest_call_s
        judge = self._settings.judge
        self._most_at_once = (
            _COROUTINES if judge is None else math.ceil(judge.max_concurrency / self._settings.num_workers)
        )
        self._build_s = config.cluster.deadlines.build_s
        self._waiting: deque[outcomes.EnvironmentCall] = deque()
        self._suspects: deque[outcomes.EnvironmentCall] = deque()
        """Jobs of a worker that ended while several ran at once; each is retried by itself."""
        self.outcomes: queue.SimpleQueue[tuple[outcomes.EnvironmentCall, outcomes.Outcome]] = queue.SimpleQueue()
        self._workers: set[EnvironmentWorker] = set()
        self._error: Exception | None = None
        self._first: queue.SimpleQueue[channel.WorkerReady | None] = queue.SimpleQueue()
        self._losses = WorkerLosses(
            self._name, self._workers, WaitingJobs(self._waiting, self._suspects, self.outcomes), self._hire, self._end
        )
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

    def submit(self, job: outcomes.EnvironmentCall) -> None:
        """Queue a job."""
        self._waiting.append(job)
        os.eventfd_write(self._woken, 1)

    def check(self) -> None:
        """Raise whatever keeps the pool from going on."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let workers end if they do so at once, and end the others."""
        self._is_closing = True
        os.eventfd_write(self._woken, 1)
        self._thread.join()
        os.close(self._woken)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for _ in range(self._settings.num_workers):
                self._hire(is_first=True)
            while not self._is_closing:
                if self._losses.vacancies:
                    self._losses.fill_vacancies()
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
        worker = EnvironmentWorker(*sockets, self._most_at_once, is_first=is_first, num_unmade=num_unmade)
        worker.outgoing += self._begin
        self._workers.add(worker)
        self._selector.register(worker.calls, selectors.EVENT_READ, worker)

    def _end(self, worker: EnvironmentWorker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.calls)
        worker.close()

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

    def _give(self, worker: EnvironmentWorker, job: outcomes.EnvironmentCall) -> bool:
        """Send a job to a worker; return False if the worker is gone."""
        if not job.is_wanted:
            return False
        try:
            message = channel.packed(job.call)
        except Exception as error:  # a problem may hold anything
            reason = f"the problem cannot be sent to a worker process: {type(error).__name__}: {error}"
            self.outcomes.put((job, outcomes.Failure(line(reason), on_purpose=True)))
            return False
        worker.give(job, message)
        return True

    def _speak(self, worker: EnvironmentWorker) -> None:
        """Send what the socket takes now; a busy worker reads nothing."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is noticed elsewhere
            while worker.outgoing:
                del worker.outgoing[: worker.calls.send(worker.outgoing)]
        if worker.is_full != bool(worker.outgoing):
            worker.is_full = bool(worker.outgoing)
            waits = selectors.EVENT_WRITE if worker.is_full else 0
            self._selector.modify(worker.calls, selectors.EVENT_READ | waits, worker)

    def _hear(self, worker: EnvironmentWorker) -> None:
        try:
            data = worker.calls.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        try:
            for message in worker.reader.messages(data):
                self._understand(worker, message)
        except (msgspec.MsgspecError, RewardError):
            self._losses.lose(
                worker, outcomes.Failure("something else was written to the socket of its worker process")
            )
            return
        if not data:
            ending = worker.ask_for_ending()
            failure = outcomes.Failure(f"its worker process ended: {ending}")
            self._losses.lose(worker, failure, was_killed=ending in outcomes.KILLED_FROM_OUTSIDE)

    def _understand(self, worker: EnvironmentWorker, message: bytes) -> None:
        if worker.forked is None:
            worker.forked = _forked.decode(message)
            worker.since = time.monotonic()
            return
        if worker.ready is None:
            worker.ready = ready = _ready.decode(message)
            worker.is_async, worker.batch_size = ready.is_async, ready.batch_size
            if ready.error:
                self._losses.miss(worker, ready.error)
                return
            self._first.put(ready)
            return
        answer = _answers.decode(message)
        self._losses.num_idle_deaths = 0
        if (job := worker.take(answer)) is not None:
            self.outcomes.put((job, answer.outcome))

    def _patience(self) -> float:
        """Return the seconds until a worker is too slow, or a vacancy is due."""
        due = time.monotonic() + _PATIENCE_S
        for worker in self._workers:
            due = min(due, worker.due(self._build_s, self._timeout_s))
        for vacancy in self._losses.vacancies:
            due = min(due, vacancy.at)
        return max(0.0, due - time.monotonic())

    def _end_the_slow(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.forked is None and now >= worker.due(0.0, 0.0):
                self._server.replace_hanging(_FORK_S)  # workers notice that theirs is gone
                return
        for worker in [*self._workers]:
            worker.look(now, self._timeout_s)
            if now >= worker.due(self._build_s, self._timeout_s):
                if worker.ready is None and worker.stopped_at >= worker.since:
                    failure = outcomes.Failure("its worker process was stopped from outside")
                    self._losses.lose(worker, failure, was_killed=True)
                elif worker.ready is None:
                    reason = f"env.{self._name}: the environment was not made within {self._build_s:g} s"
                    self._losses.miss(worker, reason)
                elif worker.stopped_at >= worker.begun_at:
                    reason = f"its worker process was stopped from outside, and took longer than {self._timeout_s:g} s"
                    self._losses.lose(worker, outcomes.Failure(reason), was_killed=True)
                else:
                    self._losses.lose(worker, outcomes.timed_out(self._timeout_s))

    def _let_go(self) -> None:
        """Give idle workers the time to end as they wish."""
        idle = [worker for worker in self._workers if worker.ready is not None and not worker.jobs]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.calls.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLOSE_S
        for worker in idle:
            ask_guardian(worker.lifeline, None, deadline - time.monotonic())
        for worker in self._workers:
            worker.close()
        self._workers.clear()
