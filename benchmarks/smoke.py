"""The sizes of benchmarks: those of a smoke test, those that a person waits for, and those of ``--long``.

With ``TANDEM_BENCHMARK_SMOKE=1`` every benchmark runs once, tiny, and claims no speed. All that runs without ``--long``
takes under ten minutes together; what takes longer is marked, or has fewer rounds.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_SMOKE = os.environ.get("TANDEM_BENCHMARK_SMOKE", "") not in ("", "0")
"""Whether benchmarks are only to show that they still run."""


LONG = "TANDEM_BENCHMARK_LONG"
"""Environment variable that ``--long`` sets, for this process and its children."""


def is_long() -> bool:
    """Return whether time is of no concern."""
    return os.environ.get(LONG, "") not in ("", "0") and not IS_SMOKE


def sized(full: T, tiny: T, *, long: T | None = None) -> T:
    """Return the size to measure with, the tiny one of a smoke test, or that of ``--long``, if it is another."""
    if IS_SMOKE:
        return tiny
    return long if long is not None and is_long() else full
