"""Messages between a rollout process and its reward workers, msgpack after its length; their start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.common.errors import RewardError
from tandem.common.messages import EngineServer
from tandem.common.values import decode_number, encode_number
from tandem.rollout.environments.environment import RunsIn
from tandem.rollout.environments.outcomes import Outcome, ScoringCall

_LENGTH = 8
_LONGEST = 1 << 32
"""Longest message in bytes. A longer one does not come from our code."""
_encoder = msgspec.msgpack.Encoder(enc_hook=encode_number)
call_decoder = msgspec.msgpack.Decoder(ScoringCall, ext_hook=decode_number)


class ClassImported(msgspec.Struct, frozen=True):
    """The report that the forking process has imported the environment's class."""

    runs_in: RunsIn = "processes"
    error: str = ""
    """Why the import failed."""


class WorkerStart(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    engine: EngineServer | None = None
    """Address of the rollout's own engine."""


class WorkerForked(msgspec.Struct, frozen=True):
    """The first report of a worker: it is there."""

    pid: int
    guardian: int
    """Process id of its guardian."""


class WorkerReady(msgspec.Struct, frozen=True):
    """The report that a worker has its environment."""

    is_multi_turn: bool = False
    is_async: bool = False
    batch_size: int = 0
    """Calls that it scores at once; 0 if it scores each by itself."""
    error: str = ""
    """Why it has no environment."""


class CallOutcome(msgspec.Struct, frozen=True):
    """The outcome of a call."""

    number: int
    outcome: Outcome


def packed(message: Any) -> bytes:
    """Return a message as bytes with their length in front; a `msgspec.Raw` is encoded already."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


class MessageReader:
    """An assembler of messages that arrive in pieces."""

    def __init__(self) -> None:
        self._came = bytearray()

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Take new data; yield each complete message. Raises `RewardError` if it is no message."""
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
    """Wait for one message, after which nothing comes unasked; return None if the other end is closed."""
    reader = MessageReader()
    while data := sender.recv(1 << 16):
        for message in reader.messages(data):
            return message
    return None
