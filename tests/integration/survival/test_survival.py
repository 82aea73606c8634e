"""Processes that are lost while a run goes on by itself: trainers are started again, engines stay."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.wire import EXIT_AWAITED_ANEW
from tandem.observe.run_folder.journal import read_journal
from tests.harness import leaks
from tests.harness.processes import killing_rollout
from tests.harness.processes.killing_rollout import kill_file, processes_at
from tests.harness.runs import consoles
from tests.harness.runs.by_hand import MEGATRON_TP2, assert_same_results, refits_of, undisturbed_run
from tests.harness.runs.record_harness import TWO, assert_recorded, record_of
from tests.harness.runs.running import (
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

RUN: dict[str, Any] = merged(
    TWO,
    {
        "grpo": {"max_num_steps": 8, "val_period": 4},
        "checkpointing": {"save_period": 3, "metric_name": None, "keep_top_k": None},
        "cluster": {"trainers": 2, "launch": {"trainers": 2, "refit": True}, "max_replacements": 9},
    },
)
SHORT: dict[str, Any] = {"grpo": {"max_num_steps": 4, "val_period": 0}}
LAUNCHED: dict[str, Any] = {"cluster": {"launch": "all"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(RUN, LAUNCHED))


class Harried:
    """A run whose two rollouts kill others."""

    def __init__(self, run: Command, address: str) -> None:
        self.run = run
        self.address = address

    def end(self) -> str:
        """Wait for the run's end; return what it has said. Its rollouts were the same from its beginning to its end."""
        services = self.run.children()
        assert self.run.wait() == 0, self.run.output()
        assert not list(Path().glob("kill_*")), "everybody was killed who was to be"
        assert all_gone(services, 20.0) == []

        def lines() -> list[str]:
            return [path.read_text() for path in Path().glob("rollout-*.txt")]

        wait_until(lambda: all("leaves: the run finished" in line for line in lines()), lambda: f"an end of {lines()}")
        assert [line.count("joined") for line in lines()] == [1, 1]
        return self.run.output()


@contextlib.contextmanager
def harried(config: Path) -> Iterator[Harried]:
    """Start a run, and by hand the two rollouts that kill others."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as started:
        patch.setenv("PYTHONPATH", str(Path.cwd()))
        run = started.enter_context(Command("coordinator", "up", config))
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        for _ in range(2):
            out = started.enter_context(Path(f"rollout-{time.monotonic_ns()}.txt").open("wb"))
            words = joins(address)
            process = consoles.fork_server().start(killing_rollout.__name__, words, out)
            started.callback(process.wait, 20.0)
            started.callback(process.kill)
        yield Harried(run, address)


def test_a_refit_service_that_dies_or_hangs_is_replaced_and_nobody_else(undisturbed: Path) -> None:
    """The second loss of two: it is stopped, and is not heard any more when it would go on."""
    config = write_config(RUN)
    kill_file("attest", 2).write_text("refit 0 SIGKILL")
    kill_file("give", 5).write_text("refit 0 SIGSTOP")
    with harried(config) as cluster:
        cluster.run.wait_for("step 1/8")
        trainers = {process.pid for process in processes_at(cluster.address, "trainer")}
        assert len(trainers) == 2
        cluster.run.wait_for(r"refit-0 is lost: no heartbeat for \d+ s.*; another is launched in its place")
        assert {process.pid for process in processes_at(cluster.address, "trainer")} == trainers
        said = cluster.end()
    assert "refit-0 is lost: killed by SIGKILL" in said
    assert "trainers are started again" not in said
    assert_same_results("run", undisturbed)
    assert {refit.version for refit in refits_of()} == set(range(9))


def test_trainers_may_die_at_any_moment(undisturbed: Path) -> None:
    """While the model is that of the beginning, while they fetch, train, are read and digest: all comes out equal."""
    before, config = leaks.segments(), write_config(RUN)
    kill_file("generate", 2).write_text("trainer 0 SIGKILL")
    kill_file("give", 5).write_text("trainer 1 SIGKILL")
    kill_file("refit", 6).write_text("trainer 0 SIGKILL")
    kill_file("attest", 7).write_text("trainer 1 SIGKILL")
    with harried(config) as cluster:
        said = cluster.end()
    assert len(re.findall(r"trainer-\d is lost: killed by SIGKILL.*all trainers are started again", said)) == 4, said
    assert re.search(r"the run goes on at step 1 from the model that the run began with", said)
    assert len(re.findall(r"the run goes on at step 4 from the checkpoint \S+step_3$", said, re.MULTILINE)) == 2
    assert len(re.findall(r"groups of steps? .* had been generated, and are not generated again", said)) == 4
    assert_same_results("run", undisturbed)
    assert_recorded("run", config)
    for step, rows in record_of(undisturbed).items():
        ours = {(row.scored.group, row.scored.sample): row.arrays.token_ids_T.tolist() for row in record_of()[step]}
        assert ours == {(row.scored.group, row.scored.sample): row.arrays.token_ids_T.tolist() for row in rows}
    assert "tokens_per_s" not in steps_of()[3].metrics, "step 4 was trained again on what had been generated"
    assert leaks.segments_left(before) == set()


def test_trainers_that_were_started_by_hand_are_awaited_and_one_that_wakes_up_is_told_to_go(undisturbed: Path) -> None:
    over = {"cluster": {"launch": {"trainers": 0, "refit": True}}}
    config = write_config(merged(RUN, over))
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
    megatron = merged(merged(RUN, MEGATRON_TP2), SHORT)
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
        "sft": {"max_num_steps": 40, "max_num_epochs": 100, "val_period": 0, "seed": 1},
        "checkpointing": {"metric_name": "loss", "save_period": 4},
    }
    undisturbed = undisturbed_run(tmp_path_factory.mktemp("undisturbed"), supervised)
    with Command("coordinator", "up", write_config(supervised)) as run:
        run.wait_for("step 6/40")
        process_of(run, "trainer").kill()
        run.wait_for("trainer-0 is lost: killed by SIGKILL.* from the checkpoint ")
        assert run.wait() == 0, run.output()
    assert_same_results("run", undisturbed)
    with read_journal(Path("run")) as journal:
        assert {step.step for step in journal.superseded_steps()} <= set(range(5, 41))
        assert any(text.startswith("trainer-0 is lost: ") for _, _, text in journal.events())


def test_the_last_loss_ends_the_run_which_can_be_resumed() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "cluster": {"max_replacements": 1}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 2/1000")
        process_of(run, "trainer").kill()
        run.wait_for(r"trainer-0 is lost(.|\n)*step 3/1000")
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
