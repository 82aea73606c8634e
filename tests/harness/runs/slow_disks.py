"""Runs whose checkpoints take as long to write as a test wants."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.processes import slow_trainer
from tests.harness.runs.running import Command, joins

SIX = {"grpo": {"max_num_steps": 6, "val_period": 0}, "checkpointing": {"metric_name": "reward"}}
BY_HAND = {"cluster": {"launch": {"rollouts": 1, "refit": True}}}
NOBODY_REPLACED: dict[str, Any] = {"cluster": {"max_replacements": 0}}


@contextlib.contextmanager
def run_with_slow_disk(config: Path) -> Iterator[tuple[Command, Command]]:
    """Start a run whose trainer is started by hand; yield both."""
    with Command("coordinator", "up", config) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(slow_trainer.__name__, *joins(address)) as trainer:
            yield run, trainer


def checkpoints() -> set[str]:
    """Return the names of folders, without what makes a temporary one unique."""
    folders = (path for path in Path("run/checkpoints").iterdir() if not path.is_symlink())
    return {re.sub(r"(step_\d+)\.\w+", r"\1", path.name) for path in folders}
