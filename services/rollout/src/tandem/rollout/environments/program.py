"""A rollout's connection to the program that began the run and scores samples with its functions.

One thread (`ProgramPool._run`) owns the connection. It consumes jobs and the program's messages, and produces an
outcome for each job. The program itself gives up calls that take too long (`tandem.coordinator.api.reward_server`). It
sends a sign of life every second; if it falls silent, the run ends.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from tandem.common import messages
from tandem.common.errors import RewardError, WireError
from tandem.common.keys import KeyPair
from tandem.common.user_code import line
from tandem.common.wire import CallerConnections, MessageCodec, encode
from tandem.config import Config
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.outcomes import EnvironmentCall, Failure, Outcome

_NAME = "the program that called tandem.train()"
_IDLE_S, _BUSY_S = 0.2, 0.005
_TOGETHER_S = 0.002
"""How long jobs are collected, so that functions that take batches get some."""
_MAX_REPLY_BYTES = 1 << 28
_UNREACHABLE_S = 10.0
"""How long the connection may be down."""


class RewardProgram(NamedTuple):
    """The program's address and keys."""

    at: messages.Listener
    key_pair: KeyPair
    """Key pair by which the program recognises rollouts."""


class ProgramPool:
    """A pool that asks a program to score responses."""

    is_multi_turn = False

    def __init__(self, program: RewardProgram, config: Config) -> None:
        """Begin to connect."""
        self._program = program
        self._silence_s = config.cluster.heartbeat_timeout_s
        self._waiting: queue.SimpleQueue[EnvironmentCall | None] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[EnvironmentCall, Outcome]] = queue.SimpleQueue()
        self._asked: dict[int, EnvironmentCall] = {}
        """Pending jobs by the numbers of their calls."""
        self._heard_at = 0.0
        """When the program last gave a sign of life, or was given work while idle."""
        self._error: Exception | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="reward-program", daemon=True)
        self._thread.start()

    def submit(self, job: EnvironmentCall) -> None:
        """Queue a job."""
        self._waiting.put(job)

    def check(self) -> None:
        """Raise whatever keeps the pool from going on."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the connection."""
        self._is_closing = True
        self._waiting.put(None)
        self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            callers = CallerConnections({_NAME: self._program.at}, self._program.key_pair, max_bytes=_MAX_REPLY_BYTES)
            with contextlib.closing(callers):
                codec: MessageCodec[messages.ResponsesScored | messages.StillScoring] = MessageCodec(
                    messages.FromRewardServer
                )
                while not self._is_closing:
                    new = self._collected()
                    if callers.down_for(_NAME) == 0.0:
                        self._ask(callers, new)
                    for _, frames in callers.receive(_BUSY_S if self._asked else 0.0):
                        if frames is None:  # a first connection or a new one: what was asked over another is lost
                            self._ask(callers, self._asked.values())
                        else:
                            self._hear(codec.decode(frames).message)
                    self._refuse_silence(callers)
        except WireError as error:
            self._error = RewardError(f"{_NAME} sent a message that was not asked for: {error}")
        except Exception as error:
            self._error = error

    def _collected(self) -> list[EnvironmentCall]:
        """Take the submitted jobs; wait for some if there is nothing else to do."""
        new: list[EnvironmentCall | None] = []
        with contextlib.suppress(queue.Empty):
            if not self._asked:
                new.append(self._waiting.get(timeout=_IDLE_S))
                time.sleep(_TOGETHER_S)
                self._heard_at = time.monotonic()
            while True:
                new.append(self._waiting.get_nowait())
        jobs = [job for job in new if job is not None and job.is_wanted]
        self._asked |= {job.call.number: job for job in jobs}
        return jobs

    def _ask(self, callers: CallerConnections, jobs: Iterable[EnvironmentCall]) -> None:
        responses = tuple(
            messages.ResponseToScore(
                number=job.call.number,
                problem=job.call.problem,
                response=job.call.conversation[-1]["content"],
                text=job.call.conversation[-1].get("text"),
            )
            for job in jobs
            if job.is_wanted
        )
        if not responses:
            return
        try:
            frames = encode(messages.ScoreResponses(responses=responses))
        except Exception as error:  # a problem may hold anything
            reason = f"problems cannot be sent to {_NAME}: {type(error).__name__}: {error}"
            raise RewardError(line(reason)) from error
        callers.send(_NAME, frames)

    def _hear(self, message: messages.ResponsesScored | messages.StillScoring) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, messages.StillScoring):
            return
        for scored in message.scored:
            job = self._asked.pop(scored.number, None)
            if job is None:
                continue  # scored twice, because it was asked for over two connections
            if scored.failure:
                failure = Failure(line(scored.failure), scored.traceback, timed_out=scored.timed_out)
                self.outcomes.put((job, failure))
            else:
                self.outcomes.put((job, Score(scored.reward, scored.correct, scored.components)))

    def _refuse_silence(self, callers: CallerConnections) -> None:
        """Raise `RewardError` if the program neither answers nor says why."""
        if not self._asked:
            return
        if callers.down_for(_NAME) > _UNREACHABLE_S:
            raise RewardError(
                f"{_NAME}, which scores samples with its functions, cannot be reached at {self._program.at.address}"
            )
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._silence_s:
            raise RewardError(
                f"{_NAME}, which scores samples with its functions, has been silent for {silent_s:.0f} s: it is "
                "stopped, or runs something that no other thread can run beside (cluster.heartbeat_timeout_s)"
            )
