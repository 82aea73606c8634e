"""A reward model in a worker process: calls that have come are scored together, a batch in one pass.

One thread takes calls off the socket, scores the oldest with those of its shape, and answers: so it goes on until the
other end is closed. It waits for calls, and between two passes only looks whether more have come.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tandem.common.errors import DataError
from tandem.common.returned import line
from tandem.rollout.environments.channel import Answer, Reader, packed
from tandem.rollout.environments.environment import BatchEnvironment
from tandem.rollout.environments.outcomes import Call, Failure, Outcome, failure_of, outcome_of

_TOGETHER_S = 0.002
"""How long those that come one after another are waited for, where nothing else is to be done."""
_calls = msgspec.msgpack.Decoder(Call)


class _Waiting(NamedTuple):
    """A call that is to be scored."""

    call: Call
    token_ids: Sequence[int]
    shape: int


def answer_in_batches(calls: socket.socket, environment: BatchEnvironment) -> None:
    """Answer calls as they come, until the other end is closed."""
    reader, waiting = Reader(), list[_Waiting]()
    while _take(calls, reader, environment, waiting):
        shape = waiting[0].shape
        batch = [each for each in waiting if each.shape == shape][: environment.batch_size]
        taken = {each.call.number for each in batch}
        waiting = [each for each in waiting if each.call.number not in taken]
        outcomes = _outcomes(environment, batch)
        for each, outcome in zip(batch, outcomes, strict=True):
            calls.sendall(packed(Answer(each.call.number, outcome)))


def _take(calls: socket.socket, reader: Reader, environment: BatchEnvironment, waiting: list[_Waiting]) -> bool:
    """Add to those that wait what has come; wait where there is none. False if the other end is closed."""
    patience = 0.0 if waiting else None
    while not waiting or select.select([calls], [], [], patience)[0]:
        if not (data := calls.recv(1 << 18)):
            return False
        for message in reader.messages(data):
            call = _calls.decode(message)
            try:
                token_ids = environment.encode(call.problem, call.conversation)
                waiting.append(_Waiting(call, token_ids, environment.shape_of(len(token_ids))))
            except DataError as error:  # the response's doing
                calls.sendall(packed(Answer(call.number, Failure(line(str(error))))))
            except Exception as error:
                calls.sendall(packed(Answer(call.number, failure_of(error, ""))))
        if patience is None:
            patience = _TOGETHER_S
    return True


def _outcomes(environment: BatchEnvironment, batch: Sequence[_Waiting]) -> list[Outcome]:
    try:
        scores = environment.score_together([each.token_ids for each in batch])
    except Exception as error:  # no memory, for example
        return [failure_of(error, "") for _ in batch]
    return [
        outcome_of(each.call, lambda *_, score=score: score, converses=False, module="")
        for each, score in zip(batch, scores, strict=True)
    ]
