"""Scores and answers responses in threads, so that this overlaps with generation; each has a deadline."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable

import msgspec

from tandem.common.config import Config
from tandem.common.errors import RewardError, TandemError
from tandem.common.messages import MAX_COMPONENTS, MAX_NAME, Problem
from tandem.common.tokenizer import Messages
from tandem.rollout.environments.environment import Score, Turn, converses, make_environment, step_of


class _Job(msgspec.Struct, eq=False):
    """A conversation whose last response is to be scored or answered. Its thread fills in the second half and then
    hands it back."""

    key: int
    problem: Problem
    conversation: Messages
    started: float | None = None
    result: object = None
    error: Exception | None = None


class Scorer:
    """A pool of threads around one environment.

    `submit` never waits; `poll` returns what is done and raises for what failed or took too long. The threads are
    daemons: an environment that hangs cannot keep the process from ending. One thread calls these methods.
    """

    def __init__(self, config: Config) -> None:
        self._name = config.data.environment
        settings = config.env[str(self._name)]
        self._timeout_s = settings.timeout_s
        environment = make_environment(config)
        self.converses = converses(environment)
        """Whether a response may be answered; without that, each is scored."""
        self._step = step_of(environment)
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._wanted: dict[int, _Job] = {}
        self._at_work: list[_Job | None] = [None] * settings.num_workers
        """What each thread is scoring."""
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"reward-{i}", daemon=True)
            for i in range(settings.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, problem: Problem, conversation: Messages) -> None:
        """Queue a conversation that ends with a response; `key` comes back with its score, or with the next turn."""
        self._wanted[key] = job = _Job(key, problem, conversation)
        self._waiting.put(job)

    def poll(self) -> list[tuple[int, Score | Turn]]:
        """Return what is ready, in the order in which it was.

        Raises `RewardError` if the environment failed, returned no finite reward, or exceeded its ``timeout_s``.
        """
        scores: list[tuple[int, Score | Turn]] = []
        while not self._done.empty():
            job = self._done.get()
            if self._is_wanted(job):
                del self._wanted[job.key]
                scores.append((job.key, self._checked(job)))
        self._check_deadlines()
        return scores

    def forget(self, keys: Iterable[int]) -> None:
        """Abandon what was submitted with these keys."""
        for key in keys:
            self._wanted.pop(key, None)

    def close(self) -> None:
        """Tell the threads to end; one that hangs is left to the end of the process."""
        self._wanted.clear()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=0.2)

    def _work(self, index: int) -> None:
        while (job := self._waiting.get()) is not None:
            if not self._is_wanted(job):
                continue
            job.started = time.monotonic()
            self._at_work[index] = job
            try:
                job.result = self._step(job.problem, job.conversation)
            except Exception as error:
                job.error = error
            self._at_work[index] = None
            self._done.put(job)

    def _is_wanted(self, job: _Job) -> bool:
        return self._wanted.get(job.key) is job

    def _check_deadlines(self) -> None:
        """Raise for a thread that is stuck, also in what was abandoned: it scores nothing else."""
        now = time.monotonic()
        for job in self._at_work:
            if job is not None and job.started is not None and now - job.started > self._timeout_s:
                raise RewardError(
                    f"environment {self._name!r} took longer than {self._timeout_s:g} s to score a response to problem "
                    f"{job.problem.problem_id!r} (env.{self._name}.timeout_s)"
                )

    def _checked(self, job: _Job) -> Score | Turn:
        where = f"environment {self._name!r}, problem {job.problem.problem_id!r}"
        if isinstance(job.error, TandemError):
            raise RewardError(f"environment {self._name!r}: {job.error}") from job.error
        if job.error is not None:
            raise RewardError(f"{where}: {type(job.error).__name__}: {job.error}") from job.error
        if self.converses and isinstance(job.result, Turn):
            return Turn(_valid_messages(job.result.messages, where), _valid_reward(job.result.reward, where))
        if isinstance(job.result, Score):
            components = {_valid_name(n, where): _valid_reward(v, where) for n, v in job.result.components.items()}
            if len(components) > MAX_COMPONENTS:
                raise RewardError(f"{where}: {len(components)} components of a reward, more than {MAX_COMPONENTS}")
            return Score(_valid_reward(job.result.reward, where), bool(job.result.correct), components)
        wanted = "step() returned {}, not a Score or a Turn" if self.converses else "score() returned {}, not a Score"
        raise RewardError(f"{where}: {wanted.format(type(job.result).__name__)}")


def _valid_reward(given: object, where: str) -> float:
    """Return a reward as a finite number; environments come from anywhere."""
    try:
        reward = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise RewardError(f"{where}: the reward is {given!r}, not a finite number")
    return reward


def _valid_name(given: object, where: str) -> str:
    """Return the name of a component as text that is not too long to travel."""
    name = str(given)
    if not 1 <= len(name) <= MAX_NAME:
        raise RewardError(f"{where}: the name of a component has {len(name)} characters, not 1 to {MAX_NAME}")
    return name


def _valid_messages(given: object, where: str) -> Messages:
    """Return messages if each has a role and a content, both text, and none is the policy's own."""
    try:
        messages = msgspec.convert(given, list[dict[str, str]])
    except msgspec.ValidationError:
        messages = []
    if not messages or not all({"role", "content"} <= message.keys() for message in messages):
        raise RewardError(f"{where}: the messages of a Turn are {given!r}, not a list of {{role, content}}")
    if any(message["role"] == "assistant" for message in messages):
        raise RewardError(f"{where}: a Turn holds a message of the assistant, which the policy alone can give")
    return messages
