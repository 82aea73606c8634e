"""The treatment of samples on which an environment has failed, by ``env.NAME.on_error``.

The rollout's log gets the whole story, the coordinator one line.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Mapping

import msgspec

from tandem.common.errors import RewardError
from tandem.common.messages import Problem
from tandem.common.returned import sayable
from tandem.common.texts import visible
from tandem.config import Config
from tandem.config.checks.data import decide_on_error
from tandem.rollout.environments.environment import read_whole_text
from tandem.rollout.environments.outcomes import Failure
from tandem.samples.chat_templates import Messages

_IN_VAIN = 32
"""Episodes of an agent in one rollout process that end the run if all have failed, whatever ``on_error`` says."""
_MISSING = re.compile(r"No module named '(\w+)")


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
