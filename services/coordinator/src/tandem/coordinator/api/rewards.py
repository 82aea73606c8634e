"""Reward functions of a program: the columns that they take, their two forms, and their return values.

A function has one of two forms. It scores one response, ``f(prompt, response, **columns) -> float``, or it has the
signature of TRL's ``reward_funcs``, ``f(prompts, completions, **columns) -> list[float]``. A parameter named `prompts`
or `completions` marks the second. Arguments are passed by name, and only those that the function takes.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, RewardError, nearest
from tandem.common.messages import MAX_NAME, ResponseToScore
from tandem.common.user_code import shown
from tandem.common.values import beyond, check_finite_number

_OF_A_BATCH = ("prompts", "completions")
_OF_ONE = ("prompt", "response")
_WITHOUT_NAMES = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


class RewardFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A reward function, and how it is called."""

    name: str
    """Name of its component of the reward."""
    call: Callable[..., Any]
    weight: float
    takes_batches: bool
    is_async: bool
    accepts: frozenset[str]
    """Names of its parameters."""
    requires: tuple[str, ...]
    """Names of parameters without a default."""
    accepts_all: bool
    """Whether it has ``**columns``."""

    def arguments(self, responses: Sequence[ResponseToScore], keys: tuple[str, str] | None) -> dict[str, Any]:
        """Return the arguments of a call: for one response, or, if the function takes batches, for several.

        `keys` are the names of the question and the reference answer, for rows that do not have both.
        """
        rows = [_row(response, keys) for response in responses]
        if self.takes_batches:
            names = dict.fromkeys(name for row in rows for name in row if name not in _OF_ONE)
            arguments: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
            arguments |= {
                "prompts": [row["prompt"] for row in rows],
                "completions": [*map(_completion, rows, responses)],
            }
        else:
            (arguments,) = rows
        missing = [name for name in self.requires if name not in arguments]
        if missing:
            raise RewardError(_lacks(missing[0], arguments))
        return arguments if self.accepts_all else {name: arguments[name] for name in self.accepts if name in arguments}

    def values(self, returned: Any, count: int) -> list[float | None]:
        """Return the values for `count` responses, None where the function returned None. Raise `RewardError`."""
        if not self.takes_batches:
            return [_value(returned)]
        plain = returned.tolist() if callable(getattr(returned, "tolist", None)) else returned
        if not isinstance(plain, list | tuple):
            raise RewardError(f"returned {type(returned).__name__}, not a list of rewards, one for each completion")
        if len(plain) != count:
            raise RewardError(f"returned {len(plain)} rewards for {count} completions")
        return [_value(value) for value in plain]


def reward_functions(rewards: object, weights: Sequence[float] | None) -> tuple[RewardFunction, ...]:
    """Check functions and their weights. Raise `ConfigError` that names the one that cannot be used."""
    functions = [rewards] if callable(rewards) else rewards
    if not isinstance(functions, list | tuple) or not functions:
        raise ConfigError(f"rewards: expected a function or a list of functions, got {shown(rewards)}")
    if weights is None:
        weights = [1.0] * len(functions)
    if not isinstance(weights, list | tuple) or len(weights) != len(functions):
        raise ConfigError(
            f"reward_weights: expected a number for each of {len(functions)} rewards, got {shown(weights)}"
        )
    names = Counter[str]()
    checked_functions = []
    for index, (function, weight) in enumerate(zip(functions, weights, strict=True)):
        if not callable(function):
            raise ConfigError(f"rewards[{index}]: {shown(function)} is not a function")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"reward_weights[{index}]: {shown(weight)} is not a finite number")
        if wrong := beyond(weight):
            raise ConfigError(f"reward_weights[{index}]: {wrong}")
        name = _name(function)
        names[name] += 1
        name = name if names[name] == 1 else f"{name}_{names[name]}"
        checked_functions.append(_inspect(f"rewards[{index}] ({name})", function, name, float(weight)))
    return tuple(checked_functions)


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """Raise `ConfigError` for a parameter that is not among the columns of the rows."""
    for index, function in enumerate(functions):
        available = [*columns, *(_OF_A_BATCH if function.takes_batches else _OF_ONE)]
        for name in function.requires:
            if name not in available:
                raise ConfigError(f"rewards[{index}] ({function.name}): {_lacks(name, available)}")


def total(functions: Sequence[RewardFunction], values: Sequence[float | None]) -> float:
    """Return the weighted sum of the functions' values. Raise `RewardError` if all are None."""
    weighted_values = [
        function.weight * value for function, value in zip(functions, values, strict=True) if value is not None
    ]
    if not weighted_values:
        raise RewardError("every reward function returned None")
    return check_finite_number(math.fsum(weighted_values), "the sum of the rewards")


def _inspect(label: str, function: Callable[..., Any], name: str, weight: float) -> RewardFunction:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{label}: its parameters cannot be read: wrap it in a function of your own") from None
    named = {key: each for key, each in parameters.items() if each.kind not in _WITHOUT_NAMES}
    nameless = [key for key, each in parameters.items() if each.kind is inspect.Parameter.POSITIONAL_ONLY]
    if nameless:
        raise ConfigError(f"{label}: its parameter {nameless[0]!r} cannot be given by name")
    keywords = {key for key, each in named.items() if each.kind is inspect.Parameter.VAR_KEYWORD}
    takes_batches = any(key in named for key in _OF_A_BATCH)
    if takes_batches and any(key in named for key in _OF_ONE):
        raise ConfigError(
            f"{label}: takes either one response (prompt, response) or several (prompts, completions), and has "
            f"parameters {', '.join(parameters)}"
        )
    if not named:
        raise ConfigError(f"{label}: has no parameter (prompt, response, or a column of the data) to be called with")
    return RewardFunction(
        name=name,
        call=function,
        weight=weight,
        takes_batches=takes_batches,
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        accepts=frozenset(named.keys() - keywords),
        requires=tuple(
            key for key, each in named.items() if key not in keywords and each.default is inspect.Parameter.empty
        ),
        accepts_all=bool(keywords),
    )


def _name(function: Callable[..., Any]) -> str:
    """Return a name for a function's component: the function's name, or that of its class."""
    inner = getattr(function, "func", function)  # of a functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    return "reward" if name == "<lambda>" else str(name)[:MAX_NAME]


def _lacks(name: str, available: Collection[str]) -> str:
    return f"its parameter {name!r} is none of {', '.join(available)}{nearest(name, available)}"


def _row(response: ResponseToScore, keys: tuple[str, str] | None) -> dict[str, Any]:
    """Return the arguments that a response offers, by name: the row's columns, then prompt and response.

    A prompt that is a list of messages stays one, as in TRL.
    """
    problem = response.problem
    named = {} if keys is None else {keys[0]: problem.question, keys[1]: problem.answer}
    columns = {**named, **problem.metadata}
    messages = columns.get("prompt")
    prompt = messages if isinstance(messages, list) else problem.question
    return {**columns, "prompt": prompt, "response": response.response}


def _completion(row: Mapping[str, Any], response: ResponseToScore) -> Any:
    """Return a whole response as TRL does: text, or a list of one message if the prompt is a list of messages."""
    text = response.response if response.text is None else response.text
    return [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text


def _value(value: Any) -> float | None:
    """Return a reward as a number; tensors of one element and booleans are accepted."""
    if value is None:
        return None
    if callable(getattr(value, "item", None)):
        value = value.item()
    return check_finite_number(float(value) if isinstance(value, bool) else value, "what it returned")
