"""The protocol of environments, and how the configuration names one.

A class may say where it runs: ``runs_in = "threads"`` for one that is cheap, safe to call from several threads at once,
and never stuck; without that it runs in worker processes, which can be killed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Literal, Protocol, get_args

import msgspec

from tandem.common.config import Config
from tandem.common.config.checks.data import BUILT_IN_ENVIRONMENTS
from tandem.common.config.schema import Environment as Settings
from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.common.tokenizer import Messages


class Score(msgspec.Struct, frozen=True, tag=True):
    """What a response is worth."""

    reward: float
    """What training maximises; any finite number."""
    correct: bool
    """Whether it counts as solved, for the accuracy."""
    components: Mapping[str, float] = {}
    """What the reward is made of, by name, for an estimator that takes it apart (``grpo.adv_estimator.name: gdpo``);
    finite numbers."""


class Turn(msgspec.Struct, frozen=True, tag=True):
    """What the environment says to a response that does not end the sample."""

    messages: Messages
    """What comes between this response and the next, such as ``[{"role": "user", "content": "84"}]``."""
    reward: float = 0.0
    """Added to the sample's reward; any finite number."""


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


def runs_in(config: Config) -> RunsIn:
    """Import what ``data.environment`` names; return where it runs. Raises `ConfigError` if it cannot be imported."""
    name = str(config.data.environment)
    where: object = getattr(_factory(name, config.env[name], config), "runs_in", "processes")
    try:
        known: RunsIn = msgspec.convert(where, RunsIn)
    except msgspec.ValidationError:
        choices = " or ".join(map(repr, get_args(RunsIn)))
        path = config.env[name].class_path
        raise ConfigError(f"env.{name}.class: {path}.runs_in is {where!r}, not {choices}") from None
    return known


def make_environment(config: Config) -> Environment | ConversingEnvironment:
    """Build the environment that ``data.environment`` names. Raises `ConfigError` if it cannot be built."""
    name = config.data.environment
    assert name is not None, "the configuration is checked before anything starts"
    settings = config.env[name]
    arguments = dict(settings.kwargs) | ({"cfg": settings.cfg} if settings.cfg else {})
    make = _factory(name, settings, config)
    try:
        environment = make(**arguments)
    except Exception as error:  # the class may be anyone's
        raise ConfigError(f"env.{name}: {type(error).__name__}: {error}") from error
    if not any(callable(getattr(environment, method, None)) for method in ("score", "step")):
        raise ConfigError(
            f"env.{name}.class: {settings.class_path} has no method score(problem, response) and none "
            "step(problem, conversation)"
        )
    return environment


def _factory(name: str, settings: Settings, config: Config) -> Callable[..., Environment | ConversingEnvironment]:
    if settings.class_path is not None:
        return _import(f"env.{name}.class", settings.class_path)
    match name:
        case "reasoning_gym":
            from tandem.rollout.environments.reasoning_gym import ReasoningGym

            return partial(ReasoningGym, str(config.data.task))
        case "math":
            from tandem.rollout.environments.math import MathVerify

            return MathVerify
        case "exact_match":
            from tandem.rollout.environments.exact_match import ExactMatch

            return ExactMatch
        case "calculator":
            from tandem.rollout.environments.calculator import Calculator

            return Calculator
        case "sliding_puzzle_game":
            from tandem.rollout.environments.sliding_puzzle import SlidingPuzzle

            return SlidingPuzzle
        case _:
            built_in = ", ".join(BUILT_IN_ENVIRONMENTS)
            raise ConfigError(f"env.{name}: no such environment; built in are {built_in}, others need a class")


def _import(key: str, path: str) -> Callable[..., Environment | ConversingEnvironment]:
    module, _, attribute = path.rpartition(".")
    try:
        made: Callable[..., Environment | ConversingEnvironment] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: cannot import {path!r}: {error}") from error
    except (Exception, SystemExit) as error:  # the module may be anyone's
        raise ConfigError(f"{key}: cannot import {path!r}: {type(error).__name__}: {error}") from error
    return made
