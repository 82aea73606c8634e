"""A trainer process that takes as long over steps and checkpoints as a test wants: a module that tests start.

Step N does not train while the working directory has a file ``training_N``. A checkpoint of step N is not synced while
it has a file ``busy_N``. With a file ``no_memory`` there, the process believes that its host has none left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.common.messages import Train
from tandem.common.wire import Arrays
from tandem.samples.batch import SampleBatch
from tandem.trainer import cli
from tandem.trainer.files import checkpoints
from tandem.trainer.service import TrainerService

NO_MEMORY = Path("no_memory")

_WRITING = re.compile(r"\.writing_step_(\d+)")
_real_sync = checkpoints.sync
_real_available = checkpoints.available_bytes
_real_train = TrainerService._train


def busy_file(step: int) -> Path:
    """Return the file that keeps the checkpoint of a step from the disk."""
    return Path(f"busy_{step}")


def training_file(step: int) -> Path:
    """Return the file that keeps a step from training."""
    return Path(f"training_{step}")


def _train(service: TrainerService, command: Train, table: SampleBatch, arrays: Arrays) -> None:
    """Train for real, once nothing keeps the step from it."""
    while training_file(command.step).exists():
        time.sleep(0.02)
    _real_train(service, command, table, arrays)


def _sync(paths: Iterable[Path]) -> int:
    """Sync for real, once the disk has time."""
    paths = list(paths)
    step = next(int(found[1]) for parent in paths[0].parents if (found := _WRITING.match(parent.name)))
    while busy_file(step).exists():
        time.sleep(0.02)
    return _real_sync(paths)


def _available() -> int:
    return 0 if NO_MEMORY.exists() else _real_available()


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    checkpoints.sync = _sync
    checkpoints.available_bytes = _available
    TrainerService._train = _train  # type: ignore[method-assign]
    return cli.main(arguments)
