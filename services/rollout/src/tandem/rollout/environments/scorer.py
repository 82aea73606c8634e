"""Scores responses in threads, so that rewards overlap with generation; each has a deadline."""

from __future__ import annotations

import math
import queue
import threading
import time

import msgspec

from tandem.common.config import Config
from tandem.common.errors import RewardError, TandemError
from tandem.common.messages import Problem
from tandem.rollout.environments.environment import Environment, Score, make_environment


class _Job(msgspec.Struct):
    key: int
    problem: Problem
    response: str
    started: float | None = None
    score: Score | None = None
    error: BaseException | None = None


class Scorer:
    """A pool of threads around one environment.

    `submit` never waits; `poll` returns what is done and raises for what failed or took too long. The threads are
    daemons: an environment that hangs cannot keep the process from ending.
    """

    def __init__(self, config: Config) -> None:
        self._name = config.data.environment
        settings = config.env[str(self._name)]
        self._timeout_s = settings.timeout_s
        self._environment: Environment = make_environment(config)
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._running: dict[int, _Job] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(settings.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, problem: Problem, response: str) -> None:
        """Queue a response; `key` comes back with its score."""
        job = _Job(key, problem, response)
        self._running[key] = job
        self._waiting.put(job)

    def poll(self) -> list[tuple[int, Score]]:
        """Return the scores that are ready, in the order in which they were.

        Raises `RewardError` if the environment failed, returned no finite reward, or exceeded its ``timeout_s``.
        """
        scores: list[tuple[int, Score]] = []
        while not self._done.empty():
            job = self._done.get()
            if self._running.pop(job.key, None) is not job:
                continue  # abandoned by `reset`
            scores.append((job.key, self._checked(job)))
        now = time.monotonic()
        for job in self._running.values():
            if job.started is not None and now - job.started > self._timeout_s:
                raise RewardError(
                    f"environment {self._name!r} took longer than {self._timeout_s:g} s to score a response to problem "
                    f"{job.problem.problem_id!r} (env.{self._name}.timeout_s)"
                )
        return scores

    def reset(self) -> None:
        """Abandon everything submitted."""
        self._running.clear()

    def close(self) -> None:
        """Tell the threads to end; one that hangs is left to the end of the process."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=0.2)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            job.started = time.monotonic()
            try:
                job.score = self._environment.score(job.problem, job.response)
            except Exception as error:
                job.error = error
            self._done.put(job)

    def _checked(self, job: _Job) -> Score:
        where = f"environment {self._name!r}, problem {job.problem.problem_id!r}"
        if isinstance(job.error, TandemError):
            raise job.error
        if job.error is not None:
            raise RewardError(f"{where}: {type(job.error).__name__}: {job.error}") from job.error
        assert job.score is not None
        if not math.isfinite(job.score.reward):
            raise RewardError(f"{where}: the reward is {job.score.reward}, which is no finite number")
        return job.score
