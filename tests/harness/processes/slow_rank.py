"""A trainer process on a machine that is too slow: a module that tests start. Every forward pass takes a while longer.

The other ranks notice nothing but that they wait, inside the collective operations of their own passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tandem.trainer import cli
from tandem.trainer.scorers.scorer import TokenScorer

SLOW_S = 0.5
"""Longer for each micro-batch."""
_real_call = TokenScorer.__call__


def _call(scorer: TokenScorer, *arguments: Any) -> Any:
    """Score a micro-batch for real, late."""
    time.sleep(SLOW_S)
    return _real_call(scorer, *arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    TokenScorer.__call__ = _call  # type: ignore[method-assign]
    return cli.main(arguments)
