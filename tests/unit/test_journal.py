"""The journal: a step is in it whole or not at all, and nothing in it is lost."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tandem.common.errors import RunFolderError
from tandem.observe.page.reader import RunReader
from tandem.observe.run_folder.calls import CallRecord, calls_of, record_calls
from tandem.observe.run_folder.journal import RefitRecord, StepRecord, read_journal
from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.descriptors import descriptors_left


def record(step: int, **metrics: float) -> StepRecord:
    return StepRecord(step=step, version=step, metrics=metrics, seconds={"total": 1.5, "generation": 0.5})


def refit(version: int) -> RefitRecord:
    return RefitRecord(
        version=version,
        engines=("rollout-0",),
        num_bytes={"trainer-0>rollout-0": 7_000_000},
        seconds={"transfer": 0.012, "copy": 0.01, "verify": 0.2, "digest": 0.05, "commit": 0.001},
        predicted_s=0.008,
        bound_s=0.005,
        digest=2**64 - 1,
        quarantined={"rollout-0": "q_proj differs"},
    )


def test_what_is_committed_is_read_back() -> None:
    with Journal.create(Path("run"), b'{"a": 1}', "grpo") as journal:
        first = journal.commit_step(record(1, reward=0.25, kl=math.nan))
        journal.record_refit(refit(1))
        journal.record_event("trainer-0", "joined")
    with read_journal(Path("run")) as reader:
        (step,) = reader.steps()
        assert (step.step, step.seconds, step.metrics["reward"]) == (1, first.seconds, 0.25)
        assert math.isnan(step.metrics["kl"])
        assert reader.refits() == [refit(1)]
        assert reader.refits()[0].share_of_bound == 0.5
        assert reader.config_json == b'{"a": 1}'
        assert [(member, text) for _, member, text in reader.events()] == [("trainer-0", "joined")]


def test_the_phase_verify_is_read_by_its_name_of_earlier_versions() -> None:
    now = {"transfer": 0.012, "verify": 0.2, "commit": 0.001}
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        earlier = {"transfer": 0.012, "attest": 0.2, "commit": 0.001}
        journal.record_refit(msgspec.structs.replace(refit(1), seconds=earlier))
        journal.record_refit(msgspec.structs.replace(refit(2), seconds=now))
        assert [each.seconds for each in journal.refits()] == [now, now]
    assert [each.seconds for each in RunReader(Path("run")).refits(2)] == [now, now]


def test_calls_have_a_table_that_other_runs_do_not_have() -> None:
    call = CallRecord(
        ended_at=7.5,
        kind="sample",
        model="session-1:sample:0",
        key="me",
        num_sequences=2,
        num_tokens=30,
        seconds=0.25,
        outcome="done",
    )
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        journal.commit_step(record(1))
        assert calls_of(journal) == []
        record_calls(journal, [call, call])
        record_calls(journal, [msgspec.structs.replace(call, outcome="no engine")])
    with Journal.open(Path("run")) as reader:
        assert [each.outcome for each in calls_of(reader)] == ["done", "done", "no engine"]
        assert calls_of(reader)[0] == call
        assert reader.last_step() == 1


def test_a_step_that_is_done_over_again_is_superseded_not_lost() -> None:
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        for step in (1, 2, 3):
            journal.commit_step(record(step, reward=step))
            journal.record_refit(refit(step))
        assert journal.forget_after(1) == 2
        journal.commit_step(record(2, reward=20.0))
        assert [(s.step, s.metrics["reward"]) for s in journal.steps()] == [(1, 1.0), (2, 20.0)]
        assert [s.metrics["reward"] for s in journal.superseded_steps()] == [2.0, 3.0]
        assert journal.last_step() == 2
        assert [r.version for r in journal.refits()] == [1]


def test_a_checkpoint_may_be_whole_after_later_steps_are_done() -> None:
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        for reward in (1.0, 2.0):
            journal.commit_step(record(1, reward=reward))
            journal.commit_step(record(2))
            if reward == 1.0:
                journal.forget_after(0)
        journal.record_checkpoint(1, "checkpoints/step_1")
        assert journal.step(1).metrics == {"reward": 2.0}
        assert [s.checkpoint for s in journal.steps()] == ["checkpoints/step_1", ""]
        assert [s.checkpoint for s in journal.superseded_steps()] == ["", ""]


def test_a_folder_has_one_coordinator_at_a_time() -> None:
    with Journal.create(Path("run"), b"{}", "grpo"):
        with pytest.raises(RunFolderError, match="run"):
            Journal.open(Path("run"))
        read_journal(Path("run")).close()
    Journal.open(Path("run")).close()


def test_a_writer_that_is_killed_gives_the_folder_back_and_leaves_whole_steps() -> None:
    code = """
import os, signal
from pathlib import Path
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
journal = Journal.create(Path("run"), b"{}", "grpo")
for step in range(1, 10_000):
    journal.commit_step(StepRecord(step=step, version=step, metrics={"a": 1.0, "b": 2.0}, seconds={"total": 1.0}))
    if step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == -9
    with Journal.open(Path("run")) as journal:
        steps = journal.steps()
    assert [s.step for s in steps] == list(range(1, 21))
    assert all(s.metrics == {"a": 1.0, "b": 2.0} for s in steps)


def test_errors_are_one_line() -> None:
    with pytest.raises(RunFolderError, match="nowhere") as missing:
        Journal.open(Path("nowhere"))
    Path("bad").mkdir()
    Path("bad/journal.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(RunFolderError, match="bad") as corrupt:
        Journal.open(Path("bad"))
    Path("other").mkdir()
    sqlite3.connect("other/journal.sqlite").close()
    with pytest.raises(RunFolderError, match="other") as empty:
        read_journal(Path("other"))
    for error in (missing, corrupt, empty):
        assert "\n" not in str(error.value)


def test_a_step_is_written_once_there_are_descriptors_again(tmp_path: Path) -> None:
    """Other threads have taken the reserve's, too."""
    with Journal.create(tmp_path, b"{}", "grpo") as journal:
        journal.reserve.close()
        with descriptors_left(0) as end:
            threading.Timer(0.5, end).start()
            journal.record_event("rollout-0", "is there")
        assert [text for _, _, text in journal.events()] == ["is there"]
        assert journal.reserve.num_held > 0


def test_a_journal_that_gets_no_descriptor_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.observe.run_folder.journal_writer._SHORTAGE_S", 0.2)
    with Journal.create(tmp_path, b"{}", "grpo") as journal:
        journal.reserve.close()
        with descriptors_left(0), pytest.raises(RunFolderError, match="unable to open database file"):
            journal.record_event("rollout-0", "is there")
        journal.record_event("rollout-1", "is there")
        assert [member for _, member, _ in journal.events()] == ["rollout-1"]
