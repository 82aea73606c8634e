"""Runs whose checkpoints take long to write: later steps go on."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.harness.processes import slow_disk_coordinator
from tests.harness.processes.slow_disk_coordinator import DISK_S
from tests.harness.processes.slow_trainer import NO_MEMORY, busy_file
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.running import (
    Command,
    merged,
    steps_of,
    weights_of,
    write_config,
)
from tests.harness.runs.slow_disks import BY_HAND, SIX, checkpoints, run_with_slow_disk


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose disk is quick."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), SIX)


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


def test_a_journal_whose_disk_does_not_answer_costs_no_process() -> None:
    """Longer than what counts as lost: others would end, or be replaced."""
    config = write_config({"grpo": {"max_num_steps": 4}, "cluster": {"heartbeat_timeout_s": DISK_S / 2}})
    with Command(slow_disk_coordinator.__name__, "up", config) as run:
        assert run.wait() == 0, run.output()
    assert " is lost" not in run.output()
    assert [step.step for step in steps_of()] == [1, 2, 3, 4]
