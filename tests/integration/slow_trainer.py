"""A trainer process whose disk takes as long over a checkpoint as a test wants: a script that tests start.

A checkpoint of step N is not synced while the working directory has a file ``busy_N``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tandem.trainer import checkpoints, cli

_real_sync = checkpoints.sync


def busy_file(step: int) -> Path:
    """Return the file that keeps the checkpoint of a step from the disk."""
    return Path(f"busy_{step}")


def _sync(paths: Iterable[Path]) -> int:
    """Sync for real, once the disk has time."""
    paths = list(paths)
    step = int(paths[0].parents[1].name.rpartition("_")[2].partition(".")[0])
    while busy_file(step).exists():
        time.sleep(0.02)
    return _real_sync(paths)


if __name__ == "__main__":
    checkpoints.sync = _sync
    sys.exit(cli.main())
