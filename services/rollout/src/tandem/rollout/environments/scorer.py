"""Run environments beside generation, by name: in worker processes, in threads, or in another program.

Nothing can end a thread. If its call takes too long it is left alone, and another takes its place.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Collection

from tandem.common.messages import EngineServer, Problem
from tandem.config import Config
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.rollout.environments import outcomes
from tandem.rollout.environments.environment import HEAVY, Score, Turn, is_multi_turn
from tandem.rollout.environments.making import make_environment, runs_in
from tandem.rollout.environments.printing import bounded, say_left_out
from tandem.rollout.environments.processes.guarded import WorkerForkServer
from tandem.rollout.environments.processes.workers import WorkerPool
from tandem.rollout.environments.program import ProgramPool, RewardProgram
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
        self._step = outcomes.step_of(environment)
        self._waiting: queue.SimpleQueue[outcomes.EnvironmentCall | None] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[outcomes.EnvironmentCall, outcomes.Outcome]] = queue.SimpleQueue()
        self._at_work: dict[threading.Thread, outcomes.EnvironmentCall | None] = {}
        """Current job of each thread."""
        for _ in range(settings.num_workers):
            self._start()

    def submit(self, job: outcomes.EnvironmentCall) -> None:
        """Queue a job."""
        self._waiting.put(job)

    def check(self) -> None:
        """Give up calls that take too long, with their threads."""
        now = time.monotonic()
        for thread, job in [*self._at_work.items()]:
            if job is not None and job.started is not None and now - job.started > self._timeout_s:
                del self._at_work[thread]
                self._start()
                self.outcomes.put((job, outcomes.timed_out(self._timeout_s)))

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
            outcome = outcomes.outcome_of(job.call, self._call, is_multi_turn=self.is_multi_turn, module=self._module)
            if self._at_work.get(me) is not job:
                return  # its call was given up
            self._at_work[me] = None
            self.outcomes.put((job, outcome))

    def _call(self, problem: Problem, conversation: Messages) -> object:
        result = self._step(problem, conversation)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: object) -> object:
    return await result  # type: ignore[misc]


class EnvironmentScorer:
    """One environment, with whatever runs it.

    `submit` never waits; `poll` returns what is done. One thread calls these methods, first of all `await_ready`.
    Before that, another process imports a custom class, beside whatever this one does.
    """

    def __init__(self, config: Config, program: RewardProgram | None = None) -> None:
        """Start importing; `program` is the environment's, if it consists of functions given to `tandem.train`."""
        self._config = config
        self._program = program
        self._name = str(config.data.environment)
        settings = config.env[self._name]
        self._faults = outcomes.FaultPolicy(config)
        self.is_multi_turn = False
        """Whether a response may be answered; otherwise each is scored."""
        is_apart = settings.is_custom or settings.judge or settings.is_reward_model or self._name in HEAVY
        self._server = WorkerForkServer(config) if is_apart else None
        self._pool: ThreadPool | WorkerPool | ProgramPool | None = None
        self._wanted: dict[int, outcomes.EnvironmentCall] = {}
        self._num_calls = 0

    def await_ready(self, engine: EngineServer | None = None) -> None:
        """Wait until responses can be scored. Raises `ConfigError` if the environment cannot be made.

        `engine` is the rollout's own, for a judge.
        """
        if self._program is not None:
            self._pool = ProgramPool(self._program, self._config)
            return
        if self._server is None:
            place = runs_in(self._config)
            assert place == "threads", "built-in environments that are not HEAVY"
        else:
            place = self._server.imported(self._config.cluster.deadlines.build_s).runs_in
        if place == "threads":
            if self._server is not None:
                self._server.watch()
            self._pool = ThreadPool(self._config)
            self.is_multi_turn = self._pool.is_multi_turn
        else:
            assert self._server is not None
            self._pool = WorkerPool(self._server, self._config, engine)
            self.is_multi_turn = self._pool.await_ready()

    def submit(self, key: int, problem: Problem, conversation: Messages, step: int | None = None) -> None:
        """Queue a conversation that ends with a response; `key` comes back with its score, or with the next turn."""
        self._num_calls += 1
        self._wanted[key] = job = outcomes.EnvironmentCall(
            key, outcomes.ScoringCall(self._num_calls, problem, conversation, step)
        )
        assert self._pool is not None, "await_ready comes first"
        self._pool.submit(job)

    def poll(self) -> list[tuple[int, Score | Turn | outcomes.UnscoredResponse]]:
        """Return what is ready, in the order in which it became ready.

        Raises `RewardError` if a failure of the environment ends the run.
        """
        pool = self._pool
        assert pool is not None, "await_ready comes first"
        pool.check()
        results: list[tuple[int, Score | Turn | outcomes.UnscoredResponse]] = []
        while not pool.outcomes.empty():
            job, outcome = pool.outcomes.get()
            is_wanted = self._wanted.get(job.key) is job
            if is_wanted:
                del self._wanted[job.key]
            # A thread that is stuck with an abandoned call is stuck all the same.
            if is_wanted or (isinstance(outcome, outcomes.Failure) and outcome.timed_out):
                result = (
                    self._faults.judged(job.call.problem, job.call.conversation, outcome)
                    if isinstance(outcome, outcomes.Failure)
                    else outcome
                )
                if is_wanted:
                    results.append((job.key, result))
        return results

    def forget(self, keys: Collection[int]) -> None:
        """Abandon what was submitted with these keys."""
        for key in keys:
            if (job := self._wanted.pop(key, None)) is not None:
                job.is_wanted = False

    def refuse(self, problem: Problem, conversation: Messages, reason: str) -> outcomes.UnscoredResponse:
        """Judge the environment's answer that cannot be used. Raises `RewardError` if that ends the run."""
        return self._faults.judged(problem, conversation, outcomes.Failure(reason))

    def close(self) -> None:
        """End what runs the environment; a thread that hangs is left to the end of the process."""
        self._wanted.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


class RunEnvironments:
    """A `EnvironmentScorer` for each of the run's environments. Keys are unique among all of them."""

    def __init__(self, config: Config, program: RewardProgram | None = None) -> None:
        """Make the scorers; `program` scores with functions given to `tandem.train`."""
        self._scorers = [
            EnvironmentScorer(config.of_environment(name), program if name == PYTHON_REWARDS else None)
            for name in config.environments
        ]
        self.of = dict(zip(config.environments, self._scorers, strict=True))
        """Scorers by what prompts name as their environment; where there is one, they need not name it."""
        if len(self._scorers) == 1:
            self.of[""] = self._scorers[0]

    def await_ready(self, engine: EngineServer | None = None) -> None:
        """Wait until responses can be scored. Raises `ConfigError` if an environment cannot be made."""
        for scorer in self._scorers:
            scorer.await_ready(engine)

    def poll(self) -> list[tuple[int, Score | Turn | outcomes.UnscoredResponse]]:
        """Return what is ready. Raises `RewardError` where a failure of an environment ends the run."""
        ready: list[tuple[int, Score | Turn | outcomes.UnscoredResponse]] = []
        for scorer in self._scorers:
            ready += scorer.poll()
        return ready

    def forget(self, keys: Collection[int]) -> None:
        """Abandon what was submitted with these keys."""
        for scorer in self._scorers:
            scorer.forget(keys)

    def close(self) -> None:
        """End everything that runs the environments."""
        for scorer in self._scorers:
            scorer.close()
