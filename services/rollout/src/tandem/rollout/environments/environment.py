"""The protocol of environments, and how the configuration names one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from tandem.common.config import Config
from tandem.common.config.schema import Environment as Settings
from tandem.common.errors import ConfigError
from tandem.common.messages import Problem


class Score(msgspec.Struct, frozen=True):
    """What a response is worth."""

    reward: float
    """What training maximises; any finite number."""
    correct: bool
    """Whether it counts as solved, for the accuracy."""


class Environment(Protocol):
    """Scores responses. Called from several threads at once."""

    def score(self, problem: Problem, response: str) -> Score:
        """Score one response to one problem."""
        ...


def make_environment(config: Config) -> Environment:
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
    if not callable(getattr(environment, "score", None)):
        raise ConfigError(f"env.{name}.class: {settings.class_path} has no method score(problem, response)")
    return environment


def _factory(name: str, settings: Settings, config: Config) -> Callable[..., Environment]:
    if settings.class_path is not None:
        return _import(f"env.{name}.class", settings.class_path)
    match name:
        case "reasoning_gym":
            from tandem.rollout.environments.reasoning_gym import ReasoningGym

            return lambda **arguments: ReasoningGym(str(config.data.task), **arguments)
        case "math":
            from tandem.rollout.environments.math import MathVerify

            return MathVerify
        case "exact_match":
            from tandem.rollout.environments.exact_match import ExactMatch

            return ExactMatch
        case _:
            raise ConfigError(
                f"env.{name}: no such environment; built in are reasoning_gym, math and exact_match, "
                "others need a class"
            )


def _import(key: str, path: str) -> Callable[..., Environment]:
    module, _, attribute = path.rpartition(".")
    try:
        made: Callable[..., Environment] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: cannot import {path!r}: {error}") from error
    return made
