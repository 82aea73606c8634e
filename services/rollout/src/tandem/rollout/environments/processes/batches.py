"""A reward model in a worker process: waiting calls are scored together, one batch in one pass.

One thread takes calls off the socket, scores the oldest together with others of its shape, and answers, until the other
end is closed. It waits for calls; between two passes it only checks for more.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tandem.common.errors import DataError
from tandem.common.returned import line
from tandem.rollout.environments.environment import BatchEnvironment
from tandem.rollout.environments.outcomes import Failure, Outcome, ScoringCall, failure_of, outcome_of
from tandem.rollout.environments.processes.channel import CallOutcome, MessageReader, call_decoder, packed

_TOGETHER_S = 0.002
"""How long to wait for further calls while there is nothing else to do."""


class _Waiting(NamedTuple):
    """A call that waits to be scored."""

    call: ScoringCall
    token_ids: Sequence[int]
    shape: int


def answer_in_batches(calls: socket.socket, environment: BatchEnvironment) -> None:
    """Answer calls as they come, until the other end is closed."""
    reader, waiting = MessageReader(), list[_Waiting]()
    while _take(calls, reader, environment, waiting):
        shape = waiting[0].shape
        batch = [pending for pending in waiting if pending.shape == shape][: environment.batch_size]
        batch_numbers = {pending.call.number for pending in batch}
        waiting = [pending for pending in waiting if pending.call.number not in batch_numbers]
        outcomes = _outcomes(environment, batch)
        for pending, outcome in zip(batch, outcomes, strict=True):
            calls.sendall(packed(CallOutcome(pending.call.number, outcome)))


def _take(calls: socket.socket, reader: MessageReader, environment: BatchEnvironment, waiting: list[_Waiting]) -> bool:
    """Add new calls to the waiting ones; wait if there are none. Return False if the other end is closed."""
    patience = 0.0 if waiting else None
    while not waiting or select.select([calls], [], [], patience)[0]:
        if not (data := calls.recv(1 << 18)):
            return False
        for message in reader.messages(data):
            call = call_decoder.decode(message)
            try:
                token_ids = environment.encode(call.problem, call.conversation)
                waiting.append(_Waiting(call, token_ids, environment.shape_of(len(token_ids))))
            except DataError as error:  # the response's fault
                calls.sendall(packed(CallOutcome(call.number, Failure(line(str(error))))))
            except Exception as error:
                calls.sendall(packed(CallOutcome(call.number, failure_of(error, ""))))
        if patience is None:
            patience = _TOGETHER_S
    return True


def _outcomes(environment: BatchEnvironment, batch: Sequence[_Waiting]) -> list[Outcome]:
    try:
        scores = environment.score_together([each.token_ids for each in batch])
    except Exception as error:  # for example out of memory
        return [failure_of(error, "") for _ in batch]
    return [
        outcome_of(each.call, lambda *_, score=score: score, is_multi_turn=False, module="")
        for each, score in zip(batch, scores, strict=True)
    ]
