"""Make the memory of a process that others are forked from one of large pages: a fork takes a third of the time then.

A fork copies the table of a process's pages. After all that tests import, that is 110,000 pages of 4 kB, 20 ms of the
processor for each of the fourteen processes of a small run. What a fork writes to is still copied by 4 kB.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_LARGE = 1 << 21
_COLLAPSE = 25
"""Linux's `MADV_COLLAPSE`, since 6.1. An older kernel, or one without large pages, refuses, and forks take longer."""


def collapse() -> None:
    """Collapse what this process has written to into large pages; what cannot be stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access.startswith("rw") and access.endswith("p") and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for place in range(-(-begin // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
                madvise(place, _LARGE, _COLLAPSE)
