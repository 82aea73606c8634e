"""A coordinator whose disk does not answer for a while, as it commits step 2: a module that tests start."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.coordinator import cli
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.disk_waits import wait_as_for_disk

DISK_S = 8.0
_real_commit_step = Journal.commit_step


def _commit_step(journal: Journal, record: StepRecord, committed_at: float | None = None) -> StepRecord:
    """Commit for real, once the disk answers."""
    if record.step == 2:
        wait_as_for_disk(DISK_S)
    return _real_commit_step(journal, record, committed_at)


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    Journal.commit_step = _commit_step  # type: ignore[method-assign]
    return cli.main(arguments)
