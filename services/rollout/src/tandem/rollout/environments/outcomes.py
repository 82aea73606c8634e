"""Outcomes of a call to an environment, checked strictly, and the treatment of samples that failed.

Of a failure, the rollout's log gets the whole story, the coordinator one line.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import msgspec

from tandem.common.errors import RewardError, TandemError
from tandem.common.messages import MAX_COMPONENTS, MAX_NAME, Problem
from tandem.common.texts import visible
from tandem.common.user_code import line, locate_raise, sayable, shown
from tandem.common.values import beyond, check_finite_number
from tandem.config import Config
from tandem.config.checks.data import decide_on_error
from tandem.rollout.environments.environment import (
    ConversingEnvironment,
    Environment,
    Score,
    Step,
    Turn,
    read_whole_text,
)
from tandem.rollout.environments.printing import bounded
from tandem.samples.chat_templates import Messages

_LONGEST_TRACE = 20_000


KILLED_FROM_OUTSIDE = tuple(f"killed by {number.name}" for number in (signal.SIGKILL, signal.SIGTERM))
"""Descriptions of processes killed by the system or by a user, for example for want of memory."""
MOST_RETRIES = 2
"""Retries of the job that such a process worked on: the job need not be the cause."""
_IN_VAIN = 32
"""Episodes of an agent in one rollout process that end the run if all have failed, whatever ``on_error`` says."""
_MISSING = re.compile(r"No module named '(\w+)")


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The outcome of an environment that gave no score."""

    what: str
    """One line: the exception, or what is wrong with the result."""
    trace: str = ""
    """The traceback, if there is one."""
    timed_out: bool = False
    on_purpose: bool = False
    """Whether the environment itself reported, by a `TandemError`, that the problem cannot be scored."""
    was_killed: bool = False
    """Whether the process was killed from outside, so that another may succeed."""


Outcome = Score | Turn | Failure


class ScoringCall(msgspec.Struct, frozen=True):
    """A conversation with a last response to score or answer."""

    number: int
    problem: Problem
    conversation: Sequence[Mapping[str, Any]]
    step: int | None = None
    """Step of the run, if it is known."""


class EnvironmentCall(msgspec.Struct, eq=False):
    """A call and its progress."""

    key: int
    call: ScoringCall
    is_wanted: bool = True
    """Whether the outcome is still awaited."""
    alone: bool = False
    """Whether it must run by itself, because a job of its batch ended its worker."""
    num_losses: int = 0
    """Workers that ended, or were too slow, while they worked on it."""
    started: float | None = None


def outcome_of(
    call: ScoringCall, step: Callable[[Problem, Messages], object], *, is_multi_turn: bool, module: str
) -> Outcome:
    """Call an environment; any result or exception becomes an outcome. `module` has its class, if that is custom."""
    try:
        with bounded(call.step):
            result = step(call.problem, call.conversation)
    except BaseException as error:  # sys.exit(), for example
        return failure_of(error, module)
    try:
        return checked(result, is_multi_turn=is_multi_turn)
    except RewardError as error:
        return Failure(line(str(error)))
    except Exception as error:  # the result may have methods of its own
        return failure_of(error, module)


def step_of(environment: Environment | ConversingEnvironment) -> Step:
    """Return how an environment takes a step; one that only scores does so at once."""
    step: Step | None = getattr(environment, "step", None)
    if step is not None:
        return step
    score: Callable[[Problem, str], Score] = environment.score  # type: ignore[union-attr]
    if getattr(environment, "reads", "answer") == "text":
        return lambda problem, conversation: score(problem, read_whole_text(conversation[-1]))
    return lambda problem, conversation: score(problem, conversation[-1]["content"])


def checked(result: object, *, is_multi_turn: bool) -> Score | Turn:
    """Return an environment's result as plain numbers and text; it may come from anyone.

    Raises `RewardError`.
    """
    if is_multi_turn and isinstance(result, Turn):
        return Turn(_messages(result.messages), check_finite_number(result.reward, "the reward"))
    if isinstance(result, Score):
        return Score(
            check_finite_number(result.reward, "the reward"),
            result.correct if isinstance(result.correct, bool) else _truth(result.correct),
            _check_numbers(result.components, "component"),
            None if result.answer is None else _answer(result.answer),
            _check_numbers(result.spent, "cost"),
        )
    returned = type(result).__name__
    raise RewardError(
        f"step() returned {returned}, not a Score or a Turn"
        if is_multi_turn
        else f"score() returned {returned}, not a Score"
    )


def beyond_in_sum(so_far: float, outcome: object) -> str:
    """Return what is wrong with the sum of rewards of all turns, each being within bounds; empty if nothing is."""
    if not isinstance(outcome, Score | Turn):
        return ""
    wrong = beyond(so_far + outcome.reward)
    return f"the sum of the rewards is {wrong}" if wrong else ""


def failure_of(error: BaseException, module: str) -> Failure:
    """Describe an exception, and where the code of `module`, or code beside it, raised it."""
    if isinstance(error, TandemError):
        return Failure(line(str(error)), on_purpose=True)
    folder = os.path.dirname(getattr(sys.modules.get(module), "__file__", None) or "")
    location = locate_raise(error.__traceback__, folder)
    try:
        description = f"{type(error).__name__}: {error}"
    except Exception:  # the exception's class may be anyone's, too
        description = type(error).__name__
    trace = "".join(traceback.format_exception(error))
    return Failure(line(f"{description}{location}"), visible(sayable(trace[-_LONGEST_TRACE:])))


def timed_out(timeout_s: float) -> Failure:
    """Return the failure of a call that took too long."""
    return Failure(f"took longer than {timeout_s:g} s", timed_out=True)


def _check_numbers(numbers: object, kind: Literal["component", "cost"]) -> dict[str, float]:
    """Return numbers by name, if they are few and no name is too long to send."""
    if not isinstance(numbers, Mapping):
        raise RewardError(f"the {kind}s are {shown(numbers)}, not numbers by name")
    if len(numbers) > MAX_COMPONENTS:
        raise RewardError(f"{len(numbers)} {kind}s of a reward, more than {MAX_COMPONENTS}")
    named: dict[str, float] = {}
    for name, value in numbers.items():
        if not isinstance(name, str):
            raise RewardError(f"the {kind}s are {shown(numbers)}, not numbers by name")
        sent = line(name)
        named[sent] = check_finite_number(value, f"the {kind} {sent!r}")
        for spelling in (name, sent):
            if not 1 <= len(spelling) <= MAX_NAME:
                raise RewardError(f"the name of a {kind} has {len(spelling)} characters, not 1 to {MAX_NAME}")
    return named


def _truth(correct: object) -> bool:
    """Return a truth of numpy as Python's."""
    kind = type(correct)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(correct)
    raise RewardError(f"correct is {shown(correct)}, not True or False")


def _answer(answer: object) -> str:
    if isinstance(answer, str):
        return line(answer)
    raise RewardError(f"answer is {shown(answer)}, not a text or None")


def _messages(turn_messages: object) -> Messages:
    """Return messages if each has a role and a content, both text, and none is the policy's own."""
    try:
        messages = msgspec.convert(turn_messages, list[dict[str, str]])
    except msgspec.ValidationError:
        messages = []
    if not messages or not all({"role", "content"} <= message.keys() for message in messages):
        raise RewardError(f"the messages of a Turn are {shown(turn_messages)}, not a list of {{role, content}}")
    if any(message["role"] == "assistant" for message in messages):
        raise RewardError("a Turn holds an assistant message, which only the policy can give")
    for text in (text for message in messages for text in message.values()):
        if sayable(text) != text:
            _refuse_text(text)
    return messages


def _refuse_text(text: str) -> NoReturn:
    raise RewardError(f"a message of a Turn is {shown(text)}, which is not Unicode text")


class UnscoredResponse(msgspec.Struct, frozen=True):
    """A response on which the environment failed without ending the run."""

    failure: str
    """The failure in one line."""
    timed_out: bool
    dropped: bool


class FaultPolicy:
    """The treatment of samples on which an environment has failed."""

    def __init__(self, config: Config) -> None:
        self._name = str(config.data.environment)
        self._settings = config.env[self._name]
        self._on_error = decide_on_error(self._name, self._settings)
        self._num_failures = 0
        self._has_succeeded = False
        """Whether any sample has a score."""

    def succeeded(self) -> None:
        """Note a sample with a score."""
        self._has_succeeded = True

    def judged(self, problem: Problem, conversation: Messages, failure: Failure) -> UnscoredResponse:
        """Return what becomes of a sample, and log the details. Raises `RewardError` if the failure ends the run."""
        self._num_failures += 1
        message = self._describe(problem, failure)
        _log(message, problem, conversation, failure)
        max_failures = self._settings.max_failures
        if self._on_error == "fail" or (failure.on_purpose and self._settings.on_error is None):
            raise RewardError(message)
        if max_failures is not None and self._num_failures > max_failures:
            raise RewardError(
                f"{message}; this is failure {self._num_failures} (env.{self._name}.max_failures: {max_failures})"
            )
        if self._settings.is_agent and not self._has_succeeded and self._num_failures >= _IN_VAIN:
            raise RewardError(
                f"{message}{_advise_install(failure)}; all of the first {self._num_failures} episodes have failed, so "
                "that there is nothing to learn from"
            )
        return UnscoredResponse(message, failure.timed_out, dropped=self._on_error == "drop")

    def _describe(self, problem: Problem, failure: Failure) -> str:
        if failure.timed_out:
            doing = "play an episode of" if self._settings.is_agent else "score a response to"
            return (
                f"environment {self._name!r} {failure.what} to {doing} problem {problem.problem_id!r} "
                f"(env.{self._name}.timeout_s)"
            )
        if failure.on_purpose:
            return f"environment {self._name!r}: {failure.what}"
        return f"environment {self._name!r}, problem {problem.problem_id!r}: {failure.what}"


def _advise_install(failure: Failure) -> str:
    """Return what to install, if a failure says what is missing."""
    match = _MISSING.search(failure.what) or _MISSING.search(failure.trace)
    return "" if match is None else f" (pip install {match[1]}, where the agent's program runs)"


def _log(message: str, problem: Problem, conversation: Iterable[Mapping[str, str]], failure: Failure) -> None:
    """Write all details of a failure to the process's log."""
    lines = [time.strftime("%H:%M:%S ") + message, f"  problem: {problem.problem_id!r}"]
    lines += [f"  {message['role']}: {read_whole_text(message)!r}" for message in conversation]
    text = visible(sayable("\n".join([*lines, failure.trace.rstrip()]).rstrip()))
    with contextlib.suppress(OSError):  # the disk may be full
        print(text, file=sys.stderr, flush=True)
