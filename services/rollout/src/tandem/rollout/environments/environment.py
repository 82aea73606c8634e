"""The protocol of environments: what their classes have, and what they return.

A class may say where it runs. ``runs_in = "threads"`` suits one that is cheap, safe to call from several threads at
once, and never stuck. Otherwise it runs in worker processes, which can be killed.

A class with `score` may say what it reads of a response. ``reads = "text"`` is all of it, with its reasoning, calls and
their markers. Otherwise it is the answer: the text after all reasoning, in the last channel.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from tandem.common.messages import Problem
from tandem.config.schema.environments import FUNCTION_ENVIRONMENTS
from tandem.samples.chat_templates import Messages


class Score(msgspec.Struct, frozen=True, tag=True):
    """The worth of a response."""

    reward: float
    """Reward that training maximises; a number from -1e12 to 1e12."""
    correct: bool
    """Whether the response counts as solved, for the accuracy."""
    components: Mapping[str, float] = {}
    """Parts of the reward by name, for an estimator that takes it apart (``grpo.adv_estimator.name: gdpo``); numbers
    from -1e12 to 1e12."""
    answer: str | None = None
    """The answer found in the response, in a form that is equal for equal answers, so that `coordinator eval` can
    vote. None if the environment found none, or looks for none."""
    spent: Mapping[str, float] = {}
    """Cost of the score by name: tokens, dollars, seconds. A step's metrics have the sums (``spent/NAME``)."""


class Turn(msgspec.Struct, frozen=True, tag=True):
    """The environment's reply to a response that does not end the sample."""

    messages: Messages
    """Messages between this response and the next, such as ``[{"role": "user", "content": "84"}]``. If the model sees,
    a content may be a list of parts, such as ``{"type": "image", "image": png}``."""
    reward: float = 0.0
    """Reward added to the sample's; a number from -1e12 to 1e12."""


HEAVY = ("math", "reasoning_gym", "python_code", *FUNCTION_ENVIRONMENTS)
"""Built-in environments that the rollout process does not import: they take a second, may be stuck in C, or wait."""
RunsIn = Literal["processes", "threads"]
Reads = Literal["answer", "text"]
Step = Callable[[Problem, Messages], Score | Turn | Awaitable[Score | Turn]]


class Environment(Protocol):
    """An environment that scores responses. Each worker process has its own; threads all share one."""

    def score(self, problem: Problem, response: str) -> Score:
        """Score one response to one problem. May be ``async def``."""
        ...


class ConversingEnvironment(Protocol):
    """A multi-turn environment: it answers responses, and scores the last.

    It need not remember anything, because it is shown the whole conversation each time. A sample's reward is the sum of
    its score and all its turns. A sample that is cut short has the reward of its turns, and is not correct.
    """

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Answer or score the last response to a problem. May be ``async def``.

        `conversation` holds everything after the prompt: the policy's responses (role ``assistant``), with the
        environment's own messages between them. The `content` of a response is its answer; where there is more, the
        message has `reasoning_content`, `tool_calls` and the whole `text` as well.
        """
        ...


class BatchEnvironment(Protocol):
    """An environment that scores conversations together, such as a reward model."""

    batch_size: int
    """Most conversations at once."""

    def encode(self, problem: Problem, conversation: Messages) -> Sequence[int]:
        """Return the tokens of prompt and conversation. Raises `DataError` if they cannot be scored."""
        ...

    def shape_of(self, num_tokens: int) -> int:
        """Return the shape that sequences must share to be scored at once."""
        ...

    def score_together(self, rows: Sequence[Sequence[int]]) -> Sequence[Score]:
        """Score token sequences of one shape, in one pass."""
        ...


def read_whole_text(message: Mapping[str, Any]) -> str:
    """Return all text of a message, with markers of reasoning and calls."""
    text: str = message["text"] if "text" in message else message["content"]
    return text


def is_multi_turn(environment: Environment | ConversingEnvironment) -> bool:
    """Return whether an environment is multi-turn."""
    return callable(getattr(environment, "step", None))


def is_async(environment: Environment | ConversingEnvironment) -> bool:
    """Return whether an environment's method is a coroutine function."""
    return inspect.iscoroutinefunction(getattr(environment, "step", None) or getattr(environment, "score", None))
