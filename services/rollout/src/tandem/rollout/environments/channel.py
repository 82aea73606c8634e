"""Messages between a rollout process and its reward workers: msgpack behind its length."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.common.errors import RewardError
from tandem.common.messages import GuestServer
from tandem.rollout.environments.environment import RunsIn
from tandem.rollout.environments.outcomes import Outcome

_LENGTH = 8
_LONGEST = 1 << 32
"""Of a message, in bytes: what says that it is longer is none of ours."""
_encoder = msgspec.msgpack.Encoder()


class Imported(msgspec.Struct, frozen=True):
    """The process that forks workers has imported the environment's class."""

    runs_in: RunsIn = "processes"
    error: str = ""
    """Why it has not."""


class Begin(msgspec.Struct, frozen=True):
    """The first that a worker is told."""

    engine: GuestServer | None = None
    """Where the rollout's own engine can be asked."""


class Ready(msgspec.Struct, frozen=True):
    """A worker has its environment."""

    converses: bool = False
    is_async: bool = False
    batch_size: int = 0
    """How many calls it scores at once; 0: each by itself."""
    error: str = ""
    """Why it has none."""


class Answer(msgspec.Struct, frozen=True):
    """What came of a call."""

    number: int
    outcome: Outcome


def packed(message: Any) -> bytes:
    """Return a message as it travels."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    """Return bytes behind their length."""
    return len(body).to_bytes(_LENGTH, "little") + body


class Reader:
    """Puts together messages that come in pieces."""

    def __init__(self) -> None:
        self._came = bytearray()

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Take what has come; yield each message that is complete. Raises `RewardError` for what is none."""
        self._came += data
        while len(self._came) >= _LENGTH:
            end = _LENGTH + (length := int.from_bytes(self._came[:_LENGTH], "little"))
            if length > _LONGEST:
                raise RewardError("something else was written to the socket of a worker process")
            if len(self._came) < end:
                return
            message = bytes(self._came[_LENGTH:end])
            del self._came[:end]
            yield message


def receive(sender: socket.socket) -> bytes | None:
    """Wait for one message, after which nothing comes unasked; None if the other end is closed."""
    reader = Reader()
    while data := sender.recv(1 << 16):
        for message in reader.messages(data):
            return message
    return None
