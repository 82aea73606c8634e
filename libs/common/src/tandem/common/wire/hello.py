"""The first message of a process, as every version can read it."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.common.errors import VersionMismatch, WireError
from tandem.common.messages import PROTOCOL_VERSION
from tandem.common.wire.frames import UNDECODABLE


class HelloProbe(msgspec.Struct, tag="Hello"):
    """The fields of a `Hello` that every version can read, whatever the later fields have become."""

    protocol_version: int
    service: Any = "process"
    host: Any = "?"
    pid: Any = 0


def check_version(frame: bytes | memoryview) -> None:
    """Raise `VersionMismatch` if the frame is a `Hello` of another version, `WireError` if it is not a `Hello`."""
    try:
        probe = msgspec.msgpack.decode(frame, type=HelloProbe)
    except UNDECODABLE as error:
        raise WireError(f"expected a Hello: {error}") from error
    if probe.protocol_version != PROTOCOL_VERSION:
        who = f"{probe.service} (pid {probe.pid} on {probe.host})"
        raise VersionMismatch(probe.protocol_version, PROTOCOL_VERSION, who)
