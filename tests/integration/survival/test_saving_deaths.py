"""Runs that end while a checkpoint is being written: only what is whole ever counts."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.harness.processes.slow_trainer import busy_file
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.running import coordinator, merged, process_of, write_config
from tests.harness.runs.slow_disks import BY_HAND, NOBODY_REPLACED, SIX, checkpoints, run_with_slow_disk


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose disk is quick."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), SIX)


@pytest.mark.parametrize("victim", ["coordinator", "trainer"])
def test_kill_9_while_a_checkpoint_is_written_loses_only_that_one(victim: str, undisturbed: Path) -> None:
    config = write_config(merged(merged(SIX, BY_HAND), NOBODY_REPLACED))
    busy_file(4).touch()
    with run_with_slow_disk(config) as (run, trainer):
        run.wait_for("step 5/6")
        (run if victim == "coordinator" else trainer).signal(signal.SIGKILL)
        run.wait()
        trainer.wait()
        if victim == "trainer":
            assert re.search(r"error: trainer-0 failed while .*: no heartbeat for \d+ s", run.output()), run.output()
    assert checkpoints() == {"step_2", ".writing_step_4"}
    assert list(Path("run/checkpoints").glob(".writing_step_4.*/policy/*.safetensors")), "half of it"
    resumed = coordinator("up", write_config(SIX), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 3 " in resumed.stdout
    assert_same_results("run", undisturbed)
    assert checkpoints() == {"step_2", "step_4", "step_6"}


def test_ctrl_c_waits_until_the_checkpoint_is_written() -> None:
    busy_file(2).touch()
    with run_with_slow_disk(write_config(merged(SIX, BY_HAND))) as (run, trainer):
        run.wait_for("step 3/6")
        run.signal(signal.SIGINT)
        run.wait_for("interrupted: finishing")
        assert checkpoints() == {".writing_step_2"}
        busy_file(2).unlink()
        assert run.wait() == 130, run.output()
        assert trainer.wait() == 0
    assert {"step_2"} <= checkpoints() <= {"step_2", "step_3", "step_4"}


def test_a_run_that_fails_waits_until_the_checkpoint_is_written() -> None:
    busy_file(2).touch()
    with run_with_slow_disk(write_config(merged(merged(SIX, BY_HAND), NOBODY_REPLACED))) as (run, _):
        run.wait_for("step 3/6")
        process_of(run, "refit").kill()
        run.wait_for("refit-0 failed while .*; the run ends as soon as its last checkpoint is written")
        assert checkpoints() == {".writing_step_2"}
        busy_file(2).unlink()
        assert run.wait() == 1
        assert re.search(r"^error: refit-0 failed while .*: killed by SIGKILL", run.output(), re.MULTILINE)
    assert checkpoints() == {"step_2"}


def test_a_disk_that_never_comes_back_has_a_deadline() -> None:
    over = merged({"cluster": {"deadlines": {"save_s": 2.0}}}, NOBODY_REPLACED)
    busy_file(2).touch()
    with run_with_slow_disk(write_config(merged(merged(SIX, BY_HAND), over))) as (run, _):
        assert run.wait() == 1
        (line,) = [line for line in run.output().splitlines() if line.startswith("error: ")]
    assert line == "error: trainer-0 failed while writing a checkpoint: no answer within 2 s"
    assert checkpoints() == {".writing_step_2"}
