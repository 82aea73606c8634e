"""A trainer process whose machine becomes slow: a module that tests start. Later forward passes take longer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from tandem.trainer import cli
from tandem.trainer.scorers.scorer import TokenScorer

SLOW_S = 0.3
"""Longer for each micro-batch."""
NUM_PASSES = 7
"""Passes that take no longer, of one a step."""
_real_call = TokenScorer.__call__
_passes = itertools.count(1)


def _call(scorer: TokenScorer, *arguments: Any) -> Any:
    """Score a micro-batch for real, late once there have been enough."""
    if next(_passes) > NUM_PASSES:
        time.sleep(SLOW_S)
    return _real_call(scorer, *arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    TokenScorer.__call__ = _call  # type: ignore[method-assign]
    return cli.main(arguments)
