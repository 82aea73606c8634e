"""Run environments beside generation, by name: in worker processes, in threads, or in another program."""

from __future__ import annotations

from collections.abc import Collection

from tandem.common.messages import EngineServer, Problem
from tandem.config import Config
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.rollout.environments.environment import HEAVY, Score, Turn
from tandem.rollout.environments.faults import FaultPolicy, UnscoredResponse
from tandem.rollout.environments.making import runs_in
from tandem.rollout.environments.outcomes import EnvironmentCall, Failure, ScoringCall
from tandem.rollout.environments.processes.guarded import WorkerForkServer
from tandem.rollout.environments.processes.workers import WorkerPool
from tandem.rollout.environments.program import ProgramPool, RewardProgram
from tandem.rollout.environments.threads import ThreadPool
from tandem.samples.chat_templates import Messages


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
        self._faults = FaultPolicy(config)
        self.is_multi_turn = False
        """Whether a response may be answered; otherwise each is scored."""
        is_apart = settings.is_custom or settings.judge or settings.is_reward_model or self._name in HEAVY
        self._server = WorkerForkServer(config) if is_apart else None
        self._pool: ThreadPool | WorkerPool | ProgramPool | None = None
        self._wanted: dict[int, EnvironmentCall] = {}
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
        self._wanted[key] = job = EnvironmentCall(key, ScoringCall(self._num_calls, problem, conversation, step))
        assert self._pool is not None, "await_ready comes first"
        self._pool.submit(job)

    def poll(self) -> list[tuple[int, Score | Turn | UnscoredResponse]]:
        """Return what is ready, in the order in which it became ready.

        Raises `RewardError` if a failure of the environment ends the run.
        """
        pool = self._pool
        assert pool is not None, "await_ready comes first"
        pool.check()
        results: list[tuple[int, Score | Turn | UnscoredResponse]] = []
        while not pool.outcomes.empty():
            job, outcome = pool.outcomes.get()
            is_wanted = self._wanted.get(job.key) is job
            if is_wanted:
                del self._wanted[job.key]
            # A thread that is stuck with an abandoned call is stuck all the same.
            if is_wanted or (isinstance(outcome, Failure) and outcome.timed_out):
                result = (
                    self._faults.judged(job.call.problem, job.call.conversation, outcome)
                    if isinstance(outcome, Failure)
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

    def refuse(self, problem: Problem, conversation: Messages, reason: str) -> UnscoredResponse:
        """Judge the environment's answer that cannot be used. Raises `RewardError` if that ends the run."""
        return self._faults.judged(problem, conversation, Failure(reason))

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

    def poll(self) -> list[tuple[int, Score | Turn | UnscoredResponse]]:
        """Return what is ready. Raises `RewardError` where a failure of an environment ends the run."""
        ready: list[tuple[int, Score | Turn | UnscoredResponse]] = []
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
