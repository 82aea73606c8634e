"""The sizes of a smoke test: with ``TANDEM_BENCHMARK_SMOKE=1`` every benchmark runs once, tiny, and claims no speed."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_SMOKE = os.environ.get("TANDEM_BENCHMARK_SMOKE", "") not in ("", "0")
"""Whether benchmarks are only to show that they still run."""


def sized(full: T, tiny: T) -> T:
    """Return the size to measure with, or the tiny one of a smoke test."""
    return tiny if IS_SMOKE else full
