"""Runs that are interrupted, and processes that are killed or stopped while they work."""

from __future__ import annotations

import math
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.keys import write_run_keys
from tests.harness import leaks
from tests.harness.members import RUN
from tests.harness.runs.by_hand import MEGATRON_TP2, assert_same_results, refits_of, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    BIN,
    SOON_MISSED,
    TIMEOUT_S,
    Awake,
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    process_of,
    processes_of,
    steps_of,
    wait_until,
    write_config,
)

NOBODY_REPLACED: dict[str, Any] = {"cluster": {"max_replacements": 0}}
LONG = {"grpo": {"max_num_steps": 1000, "val_period": 500}, "checkpointing": {"save_period": 1000}}


def setsid(*words: str | Path) -> Command:
    """Start a command that leads a session, and so a group, of its own."""
    return Command(program("setsid"), BIN / words[0], *words[1:])


def program(name: str) -> str:
    """Return the path of a program that every Linux has."""
    found = shutil.which(name)
    assert found is not None
    return found


@pytest.mark.parametrize("who", ["a process group", "timeout"])
def test_who_asks_all_processes_to_end_has_the_run_saved_and_it_goes_on_from_there(who: str, undisturbed: Path) -> None:
    before, config = leaks.segments(), write_config(FORTY)
    hold(at=65)
    words = ["coordinator", "up", config]
    with (
        setsid(*words)
        if who == "a process group"
        else Command(program("timeout"), "--preserve-status", "600", BIN / words[0], *words[1:]) as run
    ):
        await_hold(run, "step 3/40")
        everyone = [psutil.Process(run.process.pid), *run.children()]
        services = [each for kind in ("trainer", "rollout", "refit") for each in processes_of(run, kind)]
        assert len(services) == 4
        assert {os.getpgid(each.pid) for each in services} == {os.getpgid(run.process.pid)}, "all of them are asked"
        if who == "timeout":
            run.signal(signal.SIGTERM)  # which it passes on to all, twice to the one that it started
        else:
            os.killpg(run.process.pid, signal.SIGTERM)
        run.wait_for("interrupted: finishing")
        go_on()
        assert run.wait() == 130, run.output()
        assert all_gone(everyone, 30.0) == []
    done = steps_of()[-1].step
    assert done < 40
    assert f"interrupted; continue with: coordinator up {config} --resume" in run.output()
    assert Path(f"run/checkpoints/step_{done}").exists(), run.output()
    assert leaks.segments_left(before) == set()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming at step {done + 1}" in resumed.stdout
    assert_same_results("run", undisturbed, interrupted_at=done)


def _hear_of_terminals() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_terminal_that_closes_has_the_run_saved() -> None:
    ours, theirs = pty.openpty()
    words = [program("setsid"), "--ctty", BIN / "coordinator", "up", write_config(LONG)]
    # Tests that were started by `nohup` would have it go on.
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_hear_of_terminals) as run:
        os.close(theirs)
        seen = b""
        while not re.search(rb"step \d{2,}/1000", seen):  # it shows a few moments a second
            seen += os.read(ours, 1 << 16)
        children = psutil.Process(run.pid).children(recursive=True)
        os.close(ours)
        assert run.wait(TIMEOUT_S) == 130
        assert all_gone(children, 30.0) == []
    assert Path(f"run/checkpoints/step_{steps_of()[-1].step}").exists()


def test_a_service_started_by_hand_leaves_when_it_is_asked_to_and_the_run_notices() -> None:
    over = {"cluster": {"launch": {"trainers": 1, "refit": True}}, "grpo": {"max_num_steps": 20, "val_period": 20}}
    hold(at=33)
    with Command("coordinator", "up", write_config(over)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("rollout", *joins(address)) as first:
            await_hold(run, "step 2/20")
            process_of(run, "trainer").send_signal(signal.SIGTERM)  # which was launched, and leaves it to the run
            first.signal(signal.SIGTERM)
            run.wait_for("rollout-0 was told to leave")
            go_on()
            assert first.wait() == 0, first.output()
            assert "rollout-0 leaves: it was told to" in first.output()
            run.wait_for("rollout-0 leaves the run: it was told to; the run waits for another: rollout --coordinator")
        with Command("rollout", *joins(address)) as second:
            assert run.wait() == 0, run.output()
            assert second.wait() == 0
    assert [s.step for s in steps_of()] == list(range(1, 21))


def test_a_service_is_asked_to_end_before_there_is_a_coordinator() -> None:
    write_run_keys(Path("run"), RUN)
    with Command("refit", *joins("tcp://127.0.0.1:9"), "--join-timeout", "60") as refit:
        process = psutil.Process(refit.process.pid)
        wait_until(lambda: process.num_threads() > 1, lambda: "it to begin")  # the first watches for signals
        refit.signal(signal.SIGTERM)
        assert refit.wait() == 130, refit.output()
        waiting = "refit: waiting for a coordinator at tcp://127.0.0.1:9, up to 60 s\n"  # said after a moment
        interrupted = "refit: interrupted before it had joined\n"
        assert refit.output() in (interrupted, waiting + interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_before_the_first_step_is_no_error_either(number: signal.Signals) -> None:
    Path("slow.py").write_text("import time\n\ntime.sleep(300)\n")
    with Command("coordinator", "up", write_config({"env": {"slow": {"class": "slow.Never"}}})) as run:
        wait_until(lambda: bool(run.children()), lambda: "it to begin")
        time.sleep(0.5)  # and to wait for the class to be imported
        run.signal(number)
        assert run.wait() == 130
        assert run.output() == "interrupted before the run had begun\n"
    assert not Path("run").exists()
    assert not Path("model").exists()
    config = write_config({"grpo": {"max_num_steps": 1}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("listens on")  # what it launches has not joined yet
        run.signal(number)
        assert run.wait() == 130, run.output()
        words = shlex.split(run.wait_for(r"continue with: coordinator (.*)")[1])
    assert coordinator(*words).returncode == 0
    assert [step.step for step in steps_of()][-1] == 1


def test_what_it_says_after_ctrl_c_goes_on_also_from_within_the_prerequisite() -> None:
    first = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 500, "max_num_epochs": 1000, "val_period": 0, "seed": 1},
        "checkpointing": {"metric_name": "loss"},
        "logger": {"log_dir": "sft_run"},
    }
    write_config(first, "sft.yaml")
    then = {
        "prerequisite": "sft.yaml",
        "policy": {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None},
    }
    with Command("coordinator", "up", write_config(then), "grpo.max_num_steps=1") as run:
        run.wait_for("step 3/500")
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
        _, _, said = run.output().strip().rpartition("continue with: coordinator ")
    done = steps_of("sft_run")[-1].step
    assert done < 500
    resumed = coordinator(*shlex.split(said))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming at step {done + 1}" in resumed.stdout
    assert steps_of("sft_run")[-1].step == 500
    assert [step.step for step in steps_of()] == [1]


def test_services_started_by_hand_notice_that_the_coordinator_was_killed() -> None:
    over = {"cluster": {"launch": "none", "heartbeat_timeout_s": 5.0}}
    with Command("coordinator", "up", write_config(over)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("refit", *joins(address)) as refit:
            refit.wait_for("joined")
            run.signal(signal.SIGKILL)
            run.wait()
            assert refit.wait() == 70
            assert "the coordinator was silent" in refit.output()


@pytest.mark.parametrize(
    ("kind", "index", "over"),
    [("trainer", 0, {}), ("trainer", 1, MEGATRON_TP2), ("refit", 0, {})],
    ids=["trainer", "megatron", "refit"],
)
def test_kill_9_of_a_service_that_may_not_be_replaced_ends_the_run_with_its_name(
    kind: str, index: int, over: dict[str, Any]
) -> None:
    with Command("coordinator", "up", write_config(merged(merged(LONG, NOBODY_REPLACED), over))) as run:
        run.wait_for("step 2/1000")
        children = run.children()
        victim = process_of(run, kind, index)
        since_killed = Awake()
        victim.kill()
        assert run.wait() == 1
        assert since_killed.seconds() < 30.0
        assert re.search(rf"error: {kind}-\d failed while .*: killed by SIGKILL", run.output()), run.output()
        assert all_gone([c for c in children if c != victim], 30.0) == []


FORTY = {
    "grpo": {"max_num_steps": 40, "val_period": 20},
    "checkpointing": {"save_period": 40},
    "cluster": {"rollouts": 2},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two engines that nothing happens to."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), FORTY)


@pytest.mark.parametrize("alias", ["auto", "never"])
def test_kill_9_of_an_engine_changes_nothing_but_the_time_it_takes(alias: str, undisturbed: Path) -> None:
    hold(at=33)
    with Command("coordinator", "up", write_config(FORTY | {"refit": {"alias": alias}})) as run:
        await_hold(run, "step 2/40")
        process_of(run, "rollout").kill()
        go_on()
        run.wait_for(r"rollout-\d is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    assert_same_results("run", undisturbed)
    assert {refit.version for refit in refits_of()} == set(range(41))


def test_an_engine_that_dies_again_and_again_ends_the_run() -> None:
    with Command("coordinator", "up", write_config(LONG | {"cluster": {"max_replacements": 1}})) as run:
        run.wait_for("step 2/1000")
        process_of(run, "rollout").kill()
        run.wait_for("another is launched")
        wait_until(lambda: bool(processes_of(run, "rollout")), lambda: "the replacement")
        process_of(run, "rollout").kill()
        assert run.wait() == 1
        assert re.search(r"error: rollout-0 failed while .*replaced 1 times before", run.output()), run.output()


def test_an_engine_started_by_hand_is_replaced_by_hand() -> None:
    over = {"cluster": {"launch": {"trainers": 1, "refit": True}}, "grpo": {"max_num_steps": 40}}
    hold(at=49)  # three steps, or two and a validation
    with Command("coordinator", "up", write_config(over)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("rollout", *joins(address)) as first:
            await_hold(run, "step 2/40")
            first.signal(signal.SIGKILL)
            first.wait()
            run.wait_for("start another: rollout --coordinator")
            go_on()
            with Command("rollout", *joins(address)) as second:
                assert run.wait() == 0, run.output()
                assert second.wait() == 0
    assert [s.step for s in steps_of()] == list(range(1, 41))


def test_a_killed_run_resumes_from_its_last_checkpoint() -> None:
    config = write_config(LONG | {"checkpointing": {"save_period": 2}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 5/1000")
        run.signal(signal.SIGKILL)
        run.wait()
    last = steps_of()[-1].step + 2
    resumed = coordinator("up", config, "--resume", f"grpo.max_num_steps={last}")
    assert resumed.returncode == 0, resumed.stderr
    steps = steps_of()
    assert [s.step for s in steps] == list(range(1, last + 1))
    assert all(math.isfinite(s.metrics["loss"]) for s in steps)


def test_a_stopped_engine_is_noticed_by_its_silence_and_replaced() -> None:
    hold(at=49)
    with Command("coordinator", "up", write_config({"grpo": {"max_num_steps": 40}, **SOON_MISSED})) as run:
        await_hold(run, "step 2/40")
        victim = process_of(run, "rollout")
        victim.send_signal(signal.SIGSTOP)
        go_on()
        run.wait_for(r"rollout-0 is lost: no heartbeat for \d+ s")
        assert run.wait() == 0, run.output()
        assert not psutil.pid_exists(victim.pid)
    assert [s.step for s in steps_of()] == list(range(1, 41))


def test_a_stopped_trainer_is_noticed_by_its_silence() -> None:
    with Command("coordinator", "up", write_config(merged(merged(LONG, NOBODY_REPLACED), SOON_MISSED))) as run:
        run.wait_for("step 2/1000")
        victim = process_of(run, "trainer")
        victim.send_signal(signal.SIGSTOP)
        assert run.wait() == 1
        assert re.search(r"error: trainer-0 failed while .*: no heartbeat for \d+ s", run.output()), run.output()
        assert not psutil.pid_exists(victim.pid)


def test_a_run_outlasts_the_reader_of_its_output() -> None:
    words = [BIN / "coordinator", "up", write_config({"grpo": {"max_num_steps": 3, "val_period": 3}})]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        while b"coordinator listens" not in run.stdout.readline():
            pass
        run.stdout.close()
        assert run.wait(TIMEOUT_S) == 0
    assert [s.step for s in steps_of()] == [1, 2, 3]
    look = subprocess.Popen([BIN / "coordinator", "runs", "."], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert look.stdout is not None
    assert look.stderr is not None
    with look:
        look.stdout.close()
        assert look.stderr.read() == b""
