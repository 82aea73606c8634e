"""A trainer process whose copy for engines is not what it holds: a module that tests start.

From version 2 on one tensor of the copy stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.refit.weights import Weights
from tandem.trainer import cli

STALE = "model.layers.1.mlp.down_proj.weight"
_real_refresh = Weights.refresh
_num_copies = 0


def _refresh(weights: Weights) -> None:
    """Copy for real, but for one tensor; versions begin with 0."""
    global _num_copies
    before = weights.storages[STALE].clone()
    _real_refresh(weights)
    if _num_copies >= 2:
        weights.storages[STALE].copy_(before)
    _num_copies += 1


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    Weights.refresh = _refresh  # type: ignore[method-assign]
    return cli.main(arguments)
