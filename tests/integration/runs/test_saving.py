"""Runs whose checkpoints take long to write: later steps go on, and only what is whole ever counts."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import slow_trainer
from tests.harness.processes.slow_trainer import NO_MEMORY, busy_file
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.running import (
    Command,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    weights_of,
    write_config,
)

SIX = {"grpo": {"max_num_steps": 6, "val_period": 0}, "checkpointing": {"metric_name": "reward"}}
BY_HAND = {"cluster": {"launch": {"rollouts": 1, "refit": True}}}


NOBODY_REPLACED: dict[str, Any] = {"cluster": {"max_replacements": 0}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose disk is quick."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), SIX)


@contextlib.contextmanager
def run_with_slow_disk(config: Path) -> Iterator[tuple[Command, Command]]:
    """Start a run whose trainer is started by hand; yield both."""
    with Command("coordinator", "up", config) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(sys.executable, slow_trainer.__file__, *joins(address)) as trainer:
            yield run, trainer


def checkpoints() -> set[str]:
    """Return the names of folders, without what makes a temporary one unique."""
    folders = (path for path in Path("run/checkpoints").iterdir() if not path.is_symlink())
    return {re.sub(r"(step_\d+)\.\w+", r"\1", path.name) for path in folders}


def test_a_step_is_done_while_the_one_before_is_written_and_the_next_to_be_saved_waits(undisturbed: Path) -> None:
    busy_file(2).touch()
    with run_with_slow_disk(write_config(merged(SIX, BY_HAND))) as (run, trainer):
        run.wait_for("step 3/6")
        assert checkpoints() == {".writing_step_2"}
        assert [bool(step.checkpoint) for step in steps_of()] == [False] * 3
        time.sleep(2.0)
        assert "step 4/6" not in run.output(), "it is to be saved as well"
        assert checkpoints() == {".writing_step_2"}
        busy_file(2).unlink()
        assert run.wait() == 0, run.output()
        assert trainer.wait() == 0
    assert_same_results("run", undisturbed)
    assert checkpoints() == {"step_2", "step_4", "step_6"}
    for name in checkpoints():
        assert weights_of(Path("run/checkpoints") / name) == weights_of(undisturbed / "checkpoints" / name), name
    assert [Path(step.checkpoint).name for step in steps_of()] == ["", "step_2", "", "step_4", "", "step_6"]


def test_without_memory_for_a_copy_the_run_says_so_and_waits(undisturbed: Path) -> None:
    NO_MEMORY.touch()
    busy_file(2).touch()
    with run_with_slow_disk(write_config(merged(SIX, BY_HAND))) as (run, _):
        run.wait_for("step 1/6")
        time.sleep(2.0)
        assert "step 2/6" not in run.output()
        busy_file(2).unlink()
        assert run.wait() == 0, run.output()
        said = re.findall(r"^training has waited for a checkpoint to be written: .* only if 2 fit", run.output(), re.M)
    assert len(said) == 3
    assert_same_results("run", undisturbed)


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
