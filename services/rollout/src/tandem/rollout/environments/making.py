"""Make an environment from its configured name: a built-in one, or the user's custom class.

A built-in environment that compares with one right answer is asked about each of several;
`tandem.config.checks.data.COMPARING_ENVIRONMENTS` names these. Others read the answer as it stood in the row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import get_args

import msgspec

from tandem.common.errors import ConfigError, TandemError
from tandem.common.messages import EngineServer, Problem
from tandem.common.user_code import named
from tandem.common.values import answer_texts
from tandem.config import Config
from tandem.config.checks.data import BUILT_IN_ENVIRONMENTS, compares_answers, reads_boxes
from tandem.config.models.families import is_text_only
from tandem.config.schema import EnvironmentConfig as Settings
from tandem.config.schema.environments import FUNCTION_ENVIRONMENTS
from tandem.config.threads import count_threads
from tandem.rollout.environments.environment import (
    BatchEnvironment,
    ConversingEnvironment,
    Environment,
    Reads,
    RunsIn,
    Score,
    Turn,
    is_multi_turn,
)
from tandem.samples.chat_templates import Messages


class AnyAnswer:
    """An environment whose score is the best of those for each of the right answers, which it sees as texts."""

    def __init__(self, environment: Environment, *, reads_boxes: bool) -> None:
        self._environment = environment
        self.reads = getattr(environment, "reads", "answer")
        self._reads_boxes = reads_boxes

    def score(self, problem: Problem, response: str) -> Score:
        """Score the response against each right answer until one makes it correct."""
        best = _best(problem, self._reads_boxes, lambda variant: self._environment.score(variant, response))
        assert isinstance(best, Score), "an environment that scores has no turns"
        return best


class AnyAnswerInTurns:
    """A multi-turn environment whose last score is the best of those for each of the right answers."""

    def __init__(self, environment: ConversingEnvironment) -> None:
        self._environment = environment

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Answer the last response, or score it against each right answer until one makes it correct."""
        return _best(problem, False, lambda variant: self._environment.step(variant, conversation))


def _best(problem: Problem, reads_boxes: bool, call: Callable[[Problem], Score | Turn]) -> Score | Turn:
    best: Score | None = None
    # Without any, the environment says that there is no answer.
    for text in answer_texts(problem.answer, boxes=reads_boxes) or ("",):
        result = call(msgspec.structs.replace(problem, answer=text))
        if isinstance(result, Turn) or result.correct:
            return result
        if best is None or result.reward > best.reward:
            best = result
    assert best is not None, "there is at least one text"
    return best


def runs_in(config: Config) -> RunsIn:
    """Import what ``data.environment`` names; return where it runs. Raises `ConfigError` if the import fails."""
    name = str(config.data.environment)
    declared: object = getattr(_factory(name, config.env[name], config), "runs_in", "processes")
    try:
        place: RunsIn = msgspec.convert(declared, RunsIn)
    except msgspec.ValidationError:
        choices = " or ".join(map(repr, get_args(RunsIn)))
        path = config.env[name].class_path
        raise ConfigError(f"env.{name}.class: {path}.runs_in is {declared!r}, not {choices}") from None
    return place


def make_environment(config: Config, engine: EngineServer | None = None) -> Environment | ConversingEnvironment:
    """Build the environment that ``data.environment`` names. Raises `ConfigError` if that fails.

    `engine` is the rollout's own, for a judge.
    """
    name = config.data.environment
    assert name is not None, "the configuration is checked before anything starts"
    settings = config.env[name]
    if settings.judge is not None:
        from tandem.rollout.environments.judge import JudgeEnvironment

        return JudgeEnvironment(name, settings.judge, engine)  # type: ignore[return-value]  # it is asynchronous
    arguments = dict(settings.kwargs) | ({"cfg": settings.cfg} if settings.cfg else {})
    make = _factory(name, settings, config)
    try:
        environment = make(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # the class may be anyone's
        raise ConfigError(f"env.{name}: {type(error).__name__}: {error}") from error
    if not any(callable(getattr(environment, method, None)) for method in ("score", "step")):
        raise ConfigError(
            f"env.{name}.class: {settings.class_path} has no method score(problem, response) and none "
            "step(problem, conversation)"
        )
    if (reads := getattr(environment, "reads", "answer")) not in get_args(Reads):
        choices = " or ".join(map(repr, get_args(Reads)))
        raise ConfigError(f"env.{name}.class: {settings.class_path}.reads is {reads!r}, not {choices}")
    if compares_answers(config, name):
        environment = (
            AnyAnswerInTurns(environment)  # type: ignore[arg-type]
            if is_multi_turn(environment)
            else AnyAnswer(environment, reads_boxes=reads_boxes(config, name))  # type: ignore[arg-type]
        )
    if is_multi_turn(environment) and not is_text_only(config.policy):
        from tandem.rollout.environments.vision import Showing

        return Showing(environment, config)  # type: ignore[arg-type, return-value]
    return environment


def make_reward_model(config: Config) -> BatchEnvironment:
    """Load the reward model that ``data.environment`` names. Raises `TandemError` if that fails."""
    from tandem.rollout.environments.reward_model import RewardModel

    name = str(config.data.environment)
    try:
        return RewardModel(name, config.env[name], count_threads(config, "rollouts", len(os.sched_getaffinity(0))))
    except TandemError:
        raise
    except Exception as error:  # for example out of memory
        raise ConfigError(f"env.{name}: {type(error).__name__}: {error}") from error


def _factory(name: str, settings: Settings, config: Config) -> Callable[..., Environment | ConversingEnvironment]:
    if settings.judge is not None:
        from tandem.rollout.environments.judge import JudgeEnvironment

        return JudgeEnvironment  # type: ignore[return-value]
    if settings.is_reward_model:
        from tandem.rollout.environments.reward_model import RewardModel

        return RewardModel  # type: ignore[return-value]  # it has a worker process to itself
    if settings.class_path is not None:
        environment_class: Callable[..., Environment | ConversingEnvironment] = named(
            settings.class_path, f"env.{name}.class"
        )
        return environment_class
    return _built_in_factory(name, settings, config)


def _built_in_factory(
    name: str, settings: Settings, config: Config
) -> Callable[..., Environment | ConversingEnvironment]:
    match name:
        case "reasoning_gym":
            from tandem.rollout.environments.reasoning_gym import ReasoningGym

            return partial(ReasoningGym, str(config.data.task), config.data.task_params)
        case "math" if settings.verifier_type == "english_multichoice":
            from tandem.rollout.environments.answers import ChoiceLine

            return ChoiceLine
        case "math" if settings.verifier_type == "multilingual_multichoice":
            from tandem.rollout.environments.answers import ChoiceLineOfAnyLanguage

            return ChoiceLineOfAnyLanguage
        case "math" if settings.math_verify_impl == "dapo_math_verify":
            from tandem.rollout.environments.answers import AnswerLine

            return AnswerLine
        case "math":
            from tandem.rollout.environments.math import MathVerify

            return MathVerify
        case "math_multi_reward":
            from tandem.rollout.environments.answers import MathMultiReward

            return MathMultiReward
        case "python_code":
            from tandem.rollout.environments.python_code import PythonCode

            return PythonCode
        case "exact_match":
            from tandem.rollout.environments.answers import ExactMatch

            return ExactMatch
        case "calculator":
            from tandem.rollout.environments.several_turns import Calculator

            return Calculator
        case "sliding_puzzle_game":
            from tandem.rollout.environments.several_turns import SlidingPuzzle

            return SlidingPuzzle
        case _ if name in FUNCTION_ENVIRONMENTS:
            from tandem.config.checks.vision import read_reward_functions
            from tandem.rollout.environments.vision import ImageRewards

            return partial(ImageRewards, read_reward_functions(name, settings.reward_functions))
        case _:
            built_in = ", ".join(BUILT_IN_ENVIRONMENTS)
            raise ConfigError(f"env.{name}: no such environment; built in are {built_in}, others need a class")
