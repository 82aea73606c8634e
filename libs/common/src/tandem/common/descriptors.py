"""The descriptors of a process, which connections, files and shared memory take: a limit and a reserve."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

LEAST = 4096
"""Descriptors that a process of a run may need; a lower limit is worth a warning."""
_IN_RESERVE = 6
"""Descriptors of a reserve: a file, the one beside it, its folder, and a few for those that other threads snatch."""


class Reserve:
    """Descriptors held for files that must be opened even when the process has no other descriptor left.

    Use it from one thread. Descriptors that other threads snatch while they are lent are taken back later, after any
    further use.
    """

    def __init__(self, num: int = _IN_RESERVE) -> None:
        """Open the descriptors, as many as there are."""
        self._num = num
        self._held: list[int] = []
        self._fill()

    @property
    def num_held(self) -> int:
        """Number of descriptors in the reserve now."""
        return len(self._held)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the descriptors up for what the block opens, and take them back afterwards."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give the descriptors up."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # none is free now
            while len(self._held) < self._num:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no privilege; return it.

    Child processes inherit it. `select` still works as before: a descriptor beyond its range appears only where the
    old limit would have been an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def notice() -> str | None:
    """Return a warning about this host's hard limit; None where it is high enough."""
    most = could_be_raised_to()
    if most >= LEAST:
        return None
    return (
        f"a process may have {most} files and connections open on this host (hard limit), which large runs or "
        f"outside connections can exhaust: ulimit -Hn {LEAST}, or LimitNOFILE={LEAST} of the unit"
    )


def limit() -> int:
    """Return how many descriptors this process may open now; a very large number if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def could_be_raised_to() -> int:
    """Return the hard limit, to which processes of a run raise their soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard
