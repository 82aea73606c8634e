"""Messages between a check and the process that scores reference answers for it."""

from __future__ import annotations

import msgspec

from tandem.common.messages import Problem
from tandem.common.values import decode_number, encode_number

MODULE = "tandem.rollout.environments.reference_answers"
"""Module that scores them, as ``python -m MODULE ORDER ANSWER``."""


class ReferenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A problem whose reference answer is to be scored."""

    problem: Problem
    environment: str
    """Entry of ``env`` that scores it."""


class ScoringOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Reference answers to score, and the run's configuration as JSON."""

    config: bytes
    answers: tuple[ReferenceAnswer, ...]


class ReferenceScore(msgspec.Struct, frozen=True, kw_only=True):
    """The best score of a reference answer over the ways to write it; one for each answer, in order, as a line."""

    reward: float = 0.0
    correct: bool = False
    response: str = ""
    """Response that got it."""
    part: str = ""
    """Part of the answer that this is, in words; empty if it is the whole."""
    failure: str = ""
    """Reason why it has no score, on one line; empty if it has one."""
    is_environment_made: bool = True
    """Whether the environment exists; its constructor may have raised what `failure` says."""


def encode_order(order: ScoringOrder) -> bytes:
    """Return an order as bytes."""
    return msgspec.msgpack.encode(order, enc_hook=encode_number)


def decode_order(data: bytes) -> ScoringOrder:
    """Return the order of `encode_order`."""
    return msgspec.msgpack.decode(data, type=ScoringOrder, ext_hook=decode_number)
