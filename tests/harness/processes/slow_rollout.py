"""A rollout process on a machine that is too slow: a module that tests start. Every token waits a little."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem.rollout import cli
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.transformers import TransformersEngine

_WAITS_S = 0.1
_real_step = TransformersEngine.step


def _step(engine: TransformersEngine) -> list[EngineCompletion]:
    """Make a token of each request for real, late."""
    time.sleep(_WAITS_S)
    return _real_step(engine)


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    TransformersEngine.step = _step  # type: ignore[method-assign]
    return cli.main(arguments)
