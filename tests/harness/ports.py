"""Ports for what a test starts, which nothing else takes meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(in_a_row: int = 1) -> int:
    """Return a port of this machine at which nothing listens; or the first of several in a row.

    The kernel gives none of them to a connection, as it may do with a port that was its own choice and is closed again.
    """
    given_to_connections, numbers = int(_RANGE.read_text().split()[0]), random.SystemRandom()
    while True:
        first = numbers.randrange(_LOWEST, given_to_connections - in_a_row)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + in_a_row):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """Hold a port of this machine that refuses connections within the block."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
