"""The protocol of environments: what their classes have, and what they return.

A class may say where it runs: ``runs_in = "threads"`` for one that is cheap, safe to call from several threads at once,
and never stuck; without that it runs in worker processes, which can be killed.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from tandem.common.messages import Problem
from tandem.samples.tokenizer import Messages


class Score(msgspec.Struct, frozen=True, tag=True):
    """What a response is worth."""

    reward: float
    """What training maximises; a number from -1e12 to 1e12."""
    correct: bool
    """Whether it counts as solved, for the accuracy."""
    components: Mapping[str, float] = {}
    """What the reward is made of, by name, for an estimator that takes it apart (``grpo.adv_estimator.name: gdpo``);
    numbers from -1e12 to 1e12."""
    answer: str | None = None
    """What the environment took for the answer, in a form that is equal where answers are: so that `coordinator eval`
    can put them to a vote. None: it found none, or looks for none."""
    spent: Mapping[str, float] = {}
    """What the score has cost, by name: tokens, dollars, seconds. A step's metrics have the sums (``spent/NAME``)."""


class Turn(msgspec.Struct, frozen=True, tag=True):
    """What the environment says to a response that does not end the sample."""

    messages: Messages
    """What comes between this response and the next, such as ``[{"role": "user", "content": "84"}]``."""
    reward: float = 0.0
    """Added to the sample's reward; a number from -1e12 to 1e12."""


HEAVY = ("math", "reasoning_gym")
"""Built-in environments that the rollout process does not import: they take a second, and may be stuck in C."""
RunsIn = Literal["processes", "threads"]
Step = Callable[[Problem, Messages], Score | Turn | Awaitable[Score | Turn]]


class Environment(Protocol):
    """Scores responses. Each worker process has one of its own; where it runs in threads, all threads have the same."""

    def score(self, problem: Problem, response: str) -> Score:
        """Score one response to one problem. May be ``async def``."""
        ...


class ConversingEnvironment(Protocol):
    """Answers responses, and scores the last.

    It need not remember anything: it is shown the whole conversation each time. A sample's reward is that of its score
    and of all its turns together; one that is cut short has that of its turns, and is not correct.
    """

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Answer or score the last response to a problem. May be ``async def``.

        `conversation` is what was said after the prompt: the policy's responses (role ``assistant``), with the
        environment's own messages between them.
        """
        ...


class BatchEnvironment(Protocol):
    """Scores conversations that have come together at once: a reward model."""

    batch_size: int
    """How many at once, at most."""

    def encode(self, problem: Problem, conversation: Messages) -> Sequence[int]:
        """Return the tokens of prompt and conversation. Raises `DataError` if they cannot be scored."""
        ...

    def shape_of(self, num_tokens: int) -> int:
        """Return what sequences must have in common to be scored at once."""
        ...

    def score_together(self, rows: Sequence[Sequence[int]]) -> Sequence[Score]:
        """Score token sequences of one shape, in one pass."""
        ...


def step_of(environment: Environment | ConversingEnvironment) -> Step:
    """Return how an environment takes a step; one that only scores does so at once."""
    step: Step | None = getattr(environment, "step", None)
    if step is not None:
        return step
    score: Callable[[Problem, str], Score] = environment.score  # type: ignore[union-attr]
    return lambda problem, conversation: score(problem, conversation[-1]["content"])


def converses(environment: Environment | ConversingEnvironment) -> bool:
    """Tell whether an environment may answer."""
    return callable(getattr(environment, "step", None))


def is_async(environment: Environment | ConversingEnvironment) -> bool:
    """Tell whether an environment's method is a coroutine function."""
    return inspect.iscoroutinefunction(getattr(environment, "step", None) or getattr(environment, "score", None))
