"""Threads that call an environment, if its class asks for them: ``runs_in = "threads"``.

Nothing can end a thread. If its call takes too long it is left alone, and another takes its place.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time

from tandem.common.messages import Problem
from tandem.config import Config
from tandem.rollout.environments.environment import is_multi_turn
from tandem.rollout.environments.making import make_environment
from tandem.rollout.environments.outcomes import EnvironmentCall, Outcome, outcome_of, step_of, timed_out
from tandem.rollout.environments.printing import bounded, say_left_out
from tandem.samples.chat_templates import Messages


class ThreadPool:
    """`num_workers` threads around one environment. They are daemons: one that hangs cannot keep the process alive."""

    def __init__(self, config: Config) -> None:
        """Make the environment. Raises `ConfigError`."""
        settings = config.env[str(config.data.environment)]
        with bounded():
            environment = make_environment(config)
        self.is_multi_turn = is_multi_turn(environment)
        self._timeout_s = settings.timeout_s
        self._module = (settings.class_path or "").rpartition(".")[0]
        self._step = step_of(environment)
        self._waiting: queue.SimpleQueue[EnvironmentCall | None] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[EnvironmentCall, Outcome]] = queue.SimpleQueue()
        self._at_work: dict[threading.Thread, EnvironmentCall | None] = {}
        """Current job of each thread."""
        for _ in range(settings.num_workers):
            self._start()

    def submit(self, job: EnvironmentCall) -> None:
        """Queue a job."""
        self._waiting.put(job)

    def check(self) -> None:
        """Give up calls that take too long, with their threads."""
        now = time.monotonic()
        for thread, job in [*self._at_work.items()]:
            if job is not None and job.started is not None and now - job.started > self._timeout_s:
                del self._at_work[thread]
                self._start()
                self.outcomes.put((job, timed_out(self._timeout_s)))

    def close(self) -> None:
        """Tell the threads to end; one that hangs is left to the end of the process."""
        for _ in self._at_work:
            self._waiting.put(None)
        for thread in self._at_work:
            thread.join(timeout=0.2)
        say_left_out()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"reward-{len(self._at_work)}", daemon=True)
        self._at_work[thread] = None
        thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (job := self._waiting.get()) is not None:
            if not job.is_wanted:
                continue
            job.started = time.monotonic()
            self._at_work[me] = job
            outcome = outcome_of(job.call, self._call, is_multi_turn=self.is_multi_turn, module=self._module)
            if self._at_work.get(me) is not job:
                return  # its call was given up
            self._at_work[me] = None
            self.outcomes.put((job, outcome))

    def _call(self, problem: Problem, conversation: Messages) -> object:
        result = self._step(problem, conversation)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: object) -> object:
    return await result  # type: ignore[misc]
