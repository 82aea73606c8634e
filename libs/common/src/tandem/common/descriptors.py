"""The limit on descriptors of a process: connections, files and shared memory each take one."""

from __future__ import annotations

import resource

LEAST = 4096
"""What a process of a run may need: fewer is worth a warning."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no privilege; return it.

    What this process starts inherits it. Nothing here, or in a process that starts with its three standard streams,
    gets a descriptor that `select` cannot take unless as many are open as would have been an error before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def notice() -> str | None:
    """Return what to say of the limit of this host's processes; None where it is high enough."""
    most = could_be_raised_to()
    if most >= LEAST:
        return None
    return (
        f"a process may have {most} files and connections open on this host (hard limit), which large runs or "
        f"strangers' connections use up: ulimit -Hn {LEAST}, or LimitNOFILE={LEAST} of the unit"
    )


def limit() -> int:
    """Return how many descriptors this process may have now; a very large number where there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def could_be_raised_to() -> int:
    """Return the hard limit, which processes of a run raise theirs to."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard
