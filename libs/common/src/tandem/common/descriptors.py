"""The descriptors of a process, which connections, files and shared memory take: their limit."""

from __future__ import annotations

import resource

LEAST = 4096
"""Descriptors that a process of a run may need; a lower limit is worth a warning."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no privilege; return it.

    Child processes inherit it. `select` still works as before: a descriptor beyond its range appears only where the
    old limit would have been an error.
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
