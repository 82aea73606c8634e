"""Lost workers of a pool: places to fill again, and jobs to retry or to blame.

Jobs sent ahead to a lost worker go to another.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from tandem.common.errors import ConfigError, HelperLost, RewardError
from tandem.common.process_lifetime import TRACE
from tandem.common.user_code import line
from tandem.rollout.environments.outcomes import MOST_RETRIES, EnvironmentCall, Failure, Outcome

if TYPE_CHECKING:
    from tandem.rollout.environments.processes.workers import EnvironmentWorker

_MOST_UNMADE, _PAUSE_S = 3, 0.5
"""Failed replacements of a worker in a row, each after a longer pause, before waiting jobs are lost."""
_MOST_IDLE_DEATHS = 10
"""Deaths of idle workers since the last answer of any, before the pool gives up."""


class WorkerVacancy(NamedTuple):
    """The place of a worker that failed to make its environment."""

    at: float
    """When to try again to fill it."""
    is_first: bool
    """Whether no worker has held it yet."""
    num_unmade: int
    """Workers in a row that failed to fill it."""


class WaitingJobs(NamedTuple):
    """The jobs of a pool that no worker has."""

    waiting: deque[EnvironmentCall]
    suspects: deque[EnvironmentCall]
    """Jobs of a worker that ended while several ran at once; each is retried by itself."""
    outcomes: queue.SimpleQueue[tuple[EnvironmentCall, Outcome]]


class WorkerLosses:
    """The losses of one pool. Its thread calls these methods."""

    def __init__(
        self,
        name: str,
        workers: Collection[EnvironmentWorker],
        jobs: WaitingJobs,
        hire: Callable[..., None],
        end: Callable[[EnvironmentWorker], None],
    ) -> None:
        """Take the environment's name, and the pool's workers and jobs, with what begins and ends a worker."""
        self._name = name
        self._workers = workers
        self._jobs = jobs
        self._hire = hire
        self._end = end
        self.num_idle_deaths = 0
        """Workers that have ended, while they had nothing to do, since the last answer of any."""
        self.vacancies: list[WorkerVacancy] = []

    def fill_vacancies(self) -> None:
        """Put workers in the places that are due."""
        now = time.monotonic()
        due = [vacancy for vacancy in self.vacancies if vacancy.at <= now]
        self.vacancies = [vacancy for vacancy in self.vacancies if vacancy.at > now]
        for vacancy in due:
            self._hire(is_first=vacancy.is_first, num_unmade=vacancy.num_unmade)

    def lose(self, worker: EnvironmentWorker, failure: Failure, *, was_killed: bool = False) -> None:
        """End a worker, put another in its place, and find out which of its jobs is to blame.

        `was_killed`: by a signal that usually comes from outside. Then its jobs are retried elsewhere before any is
        blamed.
        """
        if worker.ready is None:
            reason = f"env.{self._name}: making the environment failed: {failure.what}"
            self.miss(worker, reason, was_killed=was_killed)
            return
        if failure.timed_out:
            with contextlib.suppress(OSError):
                worker.lifeline.send(TRACE)  # where it is stuck, for the log
        self._end(worker)
        jobs = [*worker.jobs.values()]
        self.num_idle_deaths += not jobs
        if self.num_idle_deaths > _MOST_IDLE_DEATHS:
            description = f"environment {self._name!r}: its worker processes end while they have nothing to do"
            raise HelperLost(f"{description}: {failure.what}") if was_killed else RewardError(description)
        are_beside = worker.is_async or bool(worker.batch_size)
        running = jobs if are_beside else jobs[:1]
        for job in running:
            job.num_losses += 1
        if was_killed and all(job.num_losses <= MOST_RETRIES for job in running):
            self._jobs.waiting.extendleft(reversed(jobs))
        elif worker.batch_size and all(job.num_losses == 1 for job in jobs):
            # Hardly any job's fault: a reward model computes the same for all.
            self._jobs.waiting.extendleft(reversed(jobs))
        else:
            self._blame(jobs, failure, are_beside=are_beside)
        self._hire()

    def miss(self, worker: EnvironmentWorker, reason: str, *, was_killed: bool = False) -> None:
        """End a worker that has not made its environment; retry if it was killed, or was a replacement.

        If that keeps failing and no other worker is left, waiting jobs fail and `on_error` decides. Raises `HelperLost`
        if the worker was killed, which is not the environment's fault. Raises `ConfigError` for the first workers: the
        environment cannot be made.
        """
        self._end(worker)
        if worker.is_first and not was_killed:
            raise ConfigError(reason)
        num_unmade = worker.num_unmade + 1  # of this place: when the fork server dies, it takes all workers along
        is_in_vain = num_unmade >= _MOST_UNMADE and not any(each.ready is not None for each in self._workers)
        at = time.monotonic() + _PAUSE_S * num_unmade
        # The replacement is retried as often.
        self.vacancies.append(WorkerVacancy(at, worker.is_first, 0 if is_in_vain else num_unmade))
        if not is_in_vain:
            return
        if was_killed:
            raise HelperLost(f"{reason}; that was attempt {num_unmade}")
        failure = Failure(line(f"no worker process could take another's place in {num_unmade} attempts: {reason}"))
        for job in (*self._jobs.suspects, *self._jobs.waiting):
            self._jobs.outcomes.put((job, failure))
        self._jobs.suspects.clear()
        self._jobs.waiting.clear()

    def _blame(self, jobs: list[EnvironmentCall], failure: Failure, *, are_beside: bool) -> None:
        """Blame the first job of a lost worker; of several jobs that ran together, none yet."""
        if len(jobs) == 1 or (jobs and not are_beside):
            self._jobs.outcomes.put((jobs.pop(0), failure))
        if are_beside:
            for job in jobs:
                job.alone = True
            self._jobs.suspects.extend(jobs)
        else:
            self._jobs.waiting.extendleft(reversed(jobs))
