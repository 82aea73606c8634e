"""A process that has used up its descriptors still writes its run's record, at once and whole."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_writer import DescriptorReserve
from tests.harness.descriptors import descriptors_left, said_by_limited

RECORDING = textwrap.dedent(
    """
    import contextlib, os, sys
    from pathlib import Path
    from tandem.observe.run_folder import journal_writer as module
    from tandem.observe.run_folder.journal import StepRecord
    from tandem.observe.run_folder.journal_writer import Journal

    def wait(_):
        raise AssertionError("it waits for a descriptor")

    def take_all():
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))

    taken = []
    module.time.sleep = wait
    folder = Path(sys.argv[1])
    with Journal.create(folder, b"{}", "grpo") as journal:
        full = journal.reserve.num_held
        take_all()
        for step in range(1, 51):
            journal.commit_step(StepRecord(step=step, version=step, metrics={"a": 1.0}, seconds={"total": 1.0}))
            journal.record_event("trainer-0", f"step {step}")
            assert journal.reserve.num_held == full, "they are taken back, though no other is free"
        with journal.reserve.lend_descriptors():
            take_all()  # as another thread might
        assert journal.reserve.num_held == 0
        for descriptor in taken:
            os.close(descriptor)
        journal.record_event("trainer-0", "there are descriptors again")
        assert journal.reserve.num_held == full
        print(full)
    """
)


def test_a_journal_writes_at_once_where_no_descriptor_is_left(tmp_path: Path) -> None:
    assert int(said_by_limited(64, RECORDING, str(tmp_path / "run"))) > 2
    with read_journal(tmp_path / "run") as journal:
        assert [step.step for step in journal.steps()] == [*range(1, 51)]
        assert len(journal.events()) == 51


PUBLISHING = textwrap.dedent(
    """
    import contextlib, os, sys
    from pathlib import Path
    from tandem.observe.run_folder.journal_writer import DescriptorReserve
    from tandem.common.errors import CheckpointError
    from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord

    folder = CheckpointFolder(Path(sys.argv[1]), keep_top_k=1, higher_is_better=True)
    folder.prepare()
    for step in (1, 2, 3):
        policy = Path(folder.temporary_pattern.format(step=step)) / "policy" / "tokenizer"
        policy.mkdir(parents=True)
        (policy / "weights").write_bytes(b"weights")

    def publish(step):
        folder.publish(CheckpointRecord(step=step, version=step, metric_name="", metric=None, config_json="{}"))

    publish(1)
    reserve = DescriptorReserve()
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
    with reserve.lend_descriptors():
        publish(2)
    try:
        publish(3)
    except CheckpointError:
        with reserve.lend_descriptors():
            print(*folder.steps())
    """
)


def test_a_checkpoint_is_published_from_the_reserve(tmp_path: Path) -> None:
    """It writes and syncs files, and deletes a folder of folders."""
    assert said_by_limited(64, PUBLISHING, str(tmp_path / "checkpoints")) == "2\n"


def test_what_is_lent_can_be_opened_and_comes_back(tmp_path: Path) -> None:
    reserve = DescriptorReserve(2)
    try:
        with descriptors_left(0):
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            with reserve.lend_descriptors():
                os.close(os.open(tmp_path, os.O_RDONLY))
            assert reserve.num_held == 2
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
    finally:
        reserve.close()
    assert reserve.num_held == 0
