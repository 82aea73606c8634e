"""The descriptors of a process, which connections, files and memory take: their limit, and waits."""

from __future__ import annotations

import math
import resource
import select
from typing import Protocol


class HasDescriptor(Protocol):
    """A file, a socket or a connection."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


LEAST = 4096
"""Descriptors that a process of a run may need; a lower limit is worth a warning."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no privilege; return it.

    Child processes inherit it. `select.select` takes no descriptor beyond 1023: see `wait_to_read`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def describe_low_limit() -> str | None:
    """Return a warning about this host's hard limit; None where it is high enough."""
    hard_limit = read_hard_limit()
    if hard_limit >= LEAST:
        return None
    return (
        f"a process may have {hard_limit} files and connections open on this host (hard limit), which large runs or "
        f"outside connections can exhaust: ulimit -Hn {LEAST}, or LimitNOFILE={LEAST} of the unit"
    )


def limit() -> int:
    """Return how many descriptors this process may open now; a very large number if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def read_hard_limit() -> int:
    """Return the hard limit, to which processes of a run raise their soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def wait_to_read(descriptor: int | HasDescriptor, timeout_s: float | None) -> bool:
    """Wait until reading would not block, because there is data or the other end is closed; return whether it came.

    None waits for as long as it takes. Unlike `select.select`, it takes descriptors of any number.
    """
    return _wait(descriptor, select.POLLIN, timeout_s)


def wait_to_write(descriptor: int | HasDescriptor, timeout_s: float | None) -> bool:
    """Wait until writing would not block; return whether that came."""
    return _wait(descriptor, select.POLLOUT, timeout_s)


def _wait(descriptor: int | HasDescriptor, event: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)))
