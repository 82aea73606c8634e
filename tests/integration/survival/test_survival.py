"""Processes that are lost while a run goes on by itself: trainers are started again, engines stay."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.common.wire import EXIT_AWAITED_ANEW
from tandem.observe.run_folder.journal import read_journal
from tests.harness.processes.killing_rollout import kill_file
from tests.harness.runs.by_hand import MEGATRON_TP2, assert_same_results, undisturbed_run
from tests.harness.runs.harried import LAUNCHED, RUN, harried
from tests.harness.runs.record_harness import assert_recorded
from tests.harness.runs.running import (
    SOON_MISSED,
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    write_config,
)

SHORT: dict[str, Any] = {"grpo": {"max_num_steps": 4, "val_period": 0}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(RUN, LAUNCHED))


def test_trainers_that_were_started_by_hand_are_awaited_and_one_that_wakes_up_is_told_to_go(undisturbed: Path) -> None:
    over = {"cluster": {"launch": {"trainers": 0, "refit": True}}}
    config = write_config(merged(merged(RUN, over), SOON_MISSED))
    kill_file("give", 2).write_text("trainer 1 SIGKILL")
    kill_file("give", 5).write_text("trainer 0 SIGSTOP")
    with harried(config) as cluster, contextlib.ExitStack() as started:

        def start(count: int) -> list[Command]:
            trainers = []
            for _ in range(count):
                trainers.append(started.enter_context(Command("trainer", *joins(cluster.address))))
                trainers[-1].wait_for("joined")
            return trainers

        survivor, _ = start(2)
        cluster.run.wait_for(
            r"trainer-1 is lost: .*started again; 2 to be started by hand: trainer .* goes on at step 1 "
        )
        assert survivor.wait() == EXIT_AWAITED_ANEW
        assert "leaves: a trainer is lost, and all of them are started again" in survivor.output()
        stopped, _ = start(2)
        cluster.run.wait_for(
            r"trainer-0 is lost: no heartbeat .*; 2 to be started by hand: trainer .* goes on at step 4 "
        )
        start(2)
        cluster.run.wait_for("step 5/8")
        stopped.signal(signal.SIGCONT)
        stopped.wait()
        cluster.end()
    assert_same_results("run", undisturbed)
    assert_recorded("run", config)


def test_ranks_of_megatron_that_die_or_hang_are_started_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    megatron = merged(merged(merged(RUN, MEGATRON_TP2), SHORT), SOON_MISSED)
    undisturbed = undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(megatron, LAUNCHED))
    kill_file("give", 2).write_text("trainer 1 SIGKILL")
    kill_file("record", 3).write_text("trainer 0 SIGSTOP")
    with harried(write_config(megatron)) as cluster:
        said = cluster.end()
    assert "trainer-1 is lost: killed by SIGKILL" in said
    assert re.search(r"trainer-0 is lost: no heartbeat for \d+ s", said)
    assert_same_results("run", undisturbed)


def test_an_asynchronous_run_goes_on_without_the_trainer_that_is_lost() -> None:
    over = {
        "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True}},
        "policy": {"generation": {"colocated": {"enabled": False}, "async_engine": True}},
        "loss_fn": {"use_importance_sampling_correction": True},
    }
    config = write_config(merged(RUN, over))
    kill_file("give", 2).write_text("trainer 0 SIGKILL")
    kill_file("refit", 5).write_text("trainer 1 SIGKILL")
    with harried(config) as cluster:
        said = cluster.end()
    assert len(re.findall("all trainers are started again", said)) == 2
    assert [step.step for step in steps_of()] == list(range(1, 9))
    assert_recorded("run", config)


def test_supervised_training_goes_on_without_the_trainer_that_is_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    supervised = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 200, "max_num_epochs": 100, "val_period": 0, "seed": 1},
        "checkpointing": {"metric_name": "loss", "save_period": 4},
    }
    undisturbed = undisturbed_run(tmp_path_factory.mktemp("undisturbed"), supervised)
    with Command("coordinator", "up", write_config(supervised)) as run:
        run.wait_for("step 6/200")
        process_of(run, "trainer").kill()
        run.wait_for("trainer-0 is lost: killed by SIGKILL.* from the checkpoint ")
        assert run.wait() == 0, run.output()
    assert_same_results("run", undisturbed)
    with read_journal(Path("run")) as journal:
        assert {step.step for step in journal.superseded_steps()} <= set(range(5, 201))
        assert any(text.startswith("trainer-0 is lost: ") for _, _, text in journal.events())


def test_the_last_loss_ends_the_run_which_can_be_resumed() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "cluster": {"max_replacements": 1}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 2/1000")
        process_of(run, "trainer").kill()
        run.wait_for(r"trainer-0 is lost(.|\n)*step \d+/1000")
        process_of(run, "trainer").kill()
        assert run.wait() == 1
        assert re.search(r"error: trainer-0 failed while .*: killed by SIGKILL", run.output()), run.output()
    resumed = coordinator("up", config, "--resume", f"grpo.max_num_steps={steps_of()[-1].step + 1}")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_ends_the_supervisor_ends_the_run(number: signal.Signals) -> None:
    with Command("coordinator", "up", write_config({"grpo": {"max_num_steps": 1000}}), "--supervise") as run:
        run.wait_for("step 2/1000")
        everybody = run.children()
        run.signal(number)
        assert run.wait() == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert all_gone(everybody, 20.0) == []
    assert ("interrupted; continue with: " in run.output()) == (number == signal.SIGINT)
