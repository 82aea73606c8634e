"""Asynchronous runs that are stopped, and whose processes are killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.processes.held_processes import at_file, hold_file
from tests.harness.runs.asynchronous_runs import ASYNCHRONOUS, TALKING, as_ppo, check_steps, held_run
from tests.harness.runs.by_hand import MEGATRON_TP2
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    BIN,
    Awake,
    Command,
    all_gone,
    coordinator,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)


@pytest.mark.parametrize(
    ("over", "algorithm"), [({}, "grpo"), (MEGATRON_TP2, "grpo"), ({}, "ppo")], ids=["dtensor", "megatron", "ppo"]
)
def test_an_engine_that_is_killed_is_replaced_and_the_run_does_every_step(over: dict[str, Any], algorithm: str) -> None:
    """Engines finish what they have before they take weights; the environment scores at once."""
    before = leaks.segments()
    config = merged(merged(ASYNCHRONOUS, over), {"grpo": {"max_num_steps": 40}, "checkpointing": {"save_period": 5}})
    if algorithm == "ppo":
        config = as_ppo(config)
    for score in (81, 201):  # beside so many steps, of what engines may do by then, and do again
        hold(score)
    with Command("coordinator", "up", write_config(config)) as run:
        for step in (2, 5):
            await_hold(run, f"step {step}/40")
            children = run.children()
            process_of(run, "rollout", step % 2).kill()
            go_on()
            wait_until(lambda: run.output().count("another is launched") == 1 + (step > 2), run.output)  # noqa: B023
        assert run.wait() == 0, run.output()
        assert all_gone(children, 30.0) == []
    check_steps("run", age=1, num_steps=40)
    assert leaks.segments_left(before) == set()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_kill_9_of_who_may_not_be_replaced_ends_the_run_and_it_goes_on_from_its_checkpoint(algorithm: str) -> None:
    before, over = leaks.segments(), {"grpo": {"max_num_steps": 1000}, "checkpointing": {"save_period": 2}}
    settings = merged(merged(ASYNCHRONOUS, over), {"cluster": {"max_replacements": 0}})
    config = write_config(as_ppo(settings) if algorithm == "ppo" else settings)
    done = 0
    for kind in ("trainer", "refit", "coordinator"):
        with Command("coordinator", "up", config, *(["--resume"] if done else [])) as run:
            run.wait_for(f"step {done + 4}/1000")
            children = run.children()
            time.sleep(random.Random(kind).uniform(0.0, 0.5))
            since_killed = Awake()
            if kind == "coordinator":
                run.signal(signal.SIGKILL)
                run.wait()
            else:
                process_of(run, kind).kill()
                assert run.wait() == 1
                assert re.search(rf"error: {kind}-0 failed while .*: killed by SIGKILL", run.output()), run.output()
            assert all_gone(children, 30.0) == []
            assert since_killed.seconds() < 30.0
        assert leaks.segments_left(before) == set()
        done = steps_of()[-1].step
        assert [step.step for step in steps_of()] == list(range(1, done + 1))
    resumed = coordinator("up", config, "--resume", f"{algorithm}.max_num_steps={done + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert [step.step for step in steps_of()] == list(range(1, done + 2))


def test_all_processes_are_asked_to_end_while_engines_generate_beside_a_step() -> None:
    before, setsid = leaks.segments(), shutil.which("setsid")
    assert setsid is not None
    config = write_config(
        merged(ASYNCHRONOUS, {"grpo": {"max_num_steps": 1000}, "checkpointing": {"save_period": 1000}})
    )
    with Command(setsid, BIN / "coordinator", "up", config) as run:
        run.wait_for("step 3/1000")
        children = run.children()
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait() == 130, run.output()
        assert all_gone(children, 30.0) == []
    done = steps_of()[-1].step
    assert Path(f"run/checkpoints/step_{done}").exists(), run.output()
    assert leaks.segments_left(before) == set()


def test_an_interrupt_in_any_phase_saves_and_the_run_goes_on_from_there() -> None:
    before = leaks.segments()
    grpo = {"max_num_steps": 12, "async_grpo": {"in_flight_weight_updates": True}}
    in_flight = {"grpo": grpo, "checkpointing": {"save_period": 4}}
    config = write_config(merged(merged(ASYNCHRONOUS, in_flight), TALKING))
    done = 0
    for point in ("train", "refit", "validate", "save"):
        hold_file(point).touch()
        at_file(point).unlink(missing_ok=True)
        with held_run(config, *(["--resume"] if done else [])) as run:
            wait_until(at_file(point).exists, run.output, died=lambda: run.process.poll() is not None)
            children = run.children()
            run.signal(signal.SIGINT)
            run.wait_for("interrupted: finishing or abandoning the step")
            hold_file(point).unlink()
            assert run.wait() == 130, run.output()
            assert all_gone(children, 30.0) == []
        steps = [step.step for step in steps_of()]
        assert steps == list(range(1, len(steps) + 1)), point
        assert Path(f"run/checkpoints/step_{steps[-1]}").exists(), point
        done = len(steps)
        assert leaks.segments_left(before) == set()
    with held_run(config, "--resume") as run:
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == list(range(1, 13))
