"""Engines that are added to a run while it goes on, and told to leave it: its weights are those of a run left alone."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.harness.runs.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.harness.runs.held_runs import ENVIRONMENT, HELD, engines, go_on, hold, version_of
from tests.harness.runs.running import (
    TIMEOUT_S,
    Command,
    all_gone,
    joins,
    merged,
    process_of,
    processes_of,
    steps_of,
    wait_until,
    write_config,
)

NUM_STEPS = 24
HELD_S = 8.0
"""How soon an engine has something that waits, if it has anything."""
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 6},
    **ENVIRONMENT,
    "checkpointing": {"save_period": 4},
}
ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 1}},
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {"generation": {"colocated": {"enabled": False}}},
    "cluster": {"rollouts": 2, "max_rollouts": 3, "deadlines": {"leave_s": 3.0}},
}


class Engine(Protocol):
    """The process of one."""

    @property
    def pid(self) -> int: ...


def generates(name: str) -> bool:
    """Tell whether an engine has groups in flight."""
    return name in engines() and engines()[name].in_flight > 0


def is_held(engine: Engine) -> bool:
    """Tell whether an engine has a sample that waits, so that its group cannot be done."""
    return Path("hold", str(engine.pid)).exists()


def await_engine(name: str) -> None:
    """Wait until an engine generates, as the run has last said."""
    wait_until(lambda: generates(name), lambda: f"{name} to generate: {engines()}")


def await_samples(engine: Engine) -> None:
    """Wait until an engine has generated something, however soon the run goes on after that."""
    wait_until(Path("seen", str(engine.pid)).exists, lambda: f"{engine.pid} to score: {engines()}")


def hold_with(engine: Engine) -> None:
    """Hold everything while an engine generates: of a step it may be done with its groups when others are not."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        hold()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: is_held(engine), lambda: "it to have something", timeout_s=HELD_S)
            return
        go_on()
        time.sleep(0.1)
    raise AssertionError(f"{engine.pid} never has anything to score: {engines()}")


def synchronous(run: Command) -> None:
    """Add an engine, take the first one away, lose a trainer, take the last one away and bring another."""
    address = run.wait_for(r"listens on (tcp://\S+)")[1]
    run.wait_for(r"step 1/")
    hold()
    with Command("rollout", *joins(address)) as second:
        run.wait_for("rollout-1 joins the run")
        wait_until(lambda: version_of("rollout-1", "rollout-0") >= 1, lambda: "it to be refitted")
        go_on()
        await_samples(second.process)
        first = process_of(run, "rollout")
        hold_with(first)
        first.send_signal(signal.SIGTERM)
        run.wait_for(r"rollout-0 was told to leave: it gets nothing more, and goes when \d+ rollout groups")
        wait_until(lambda: engines()["rollout-0"].status == "leaving", lambda: "it to be shown")
        go_on()
        run.wait_for("rollout-0 leaves the run: it was told to\n")
        hold()  # until the other, too, is told to leave: a fast machine would end the run before
        assert all_gone([first], 30.0) == []
        process_of(run, "trainer").kill()
        run.wait_for("all trainers are started again")
        await_engine("rollout-1")
        assert [*engines()] == ["rollout-1"]
        second.signal(signal.SIGTERM)
        run.wait_for("rollout-1 was told to leave")
        go_on()
        said = run.wait_for(r"rollout-1 leaves the run: it was told to; the run waits for another: rollout (.*)")[1]
        assert second.wait() == 0, second.output()
        assert "rollout-1 was told to leave: it finishes its work; a second signal" in second.output()
    with Command("rollout", *said.split()) as third:
        assert run.wait() == 0, run.output()
        assert third.wait() == 0, third.output()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """Return the folders of a run that is left alone, and of one whose engines come and go, and what that has said."""
    folder = tmp_path_factory.mktemp("elastic")
    for name in ("alone", "elastic"):
        (folder / name).mkdir()
        (folder / name / "held.py").write_text(HELD)
    alone = undisturbed_run(folder / "alone", CONFIG)
    with in_folder(folder / "elastic"), Command("coordinator", "up", write_config(CONFIG)) as run:
        synchronous(run)
        yield alone, folder / "elastic" / "run", run.output()


def test_engines_that_come_and_go_leave_weights_as_they_would_have_been(runs: tuple[Path, Path, str]) -> None:
    alone, elastic, _ = runs
    assert_same_results(elastic, alone)


def test_who_leaves_is_no_loss_and_is_not_replaced(runs: tuple[Path, Path, str]) -> None:
    _, _, said = runs
    assert re.findall(r"(\S+) is lost", said) == ["trainer-0"]
    assert "launched in its place" not in said


@pytest.mark.timeout(900)
def test_asynchronous_runs_go_on_whoever_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held.py").write_text(HELD)
    with Command("coordinator", "up", write_config(merged(CONFIG, ASYNCHRONOUS))) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        run.wait_for(r"step 1/")
        with Command("rollout", *joins(address)) as added:
            await_samples(added.process)
            with Command("rollout", *joins(address), "--join-timeout", "5") as refused:
                assert refused.wait() == 75
                assert "the run has its 3 rollout processes (cluster.max_rollouts) already" in refused.output()
            hold_with(added.process)
            added.signal(signal.SIGTERM)  # and it cannot finish
            run.wait_for(r"rollout-2 leaves the run: it did not leave within 3 s; \d+ rollout groups .* made again")
            assert added.wait() == 0, added.output()
            rollouts = processes_of(run, "rollout")
            wait_until(lambda: any(map(is_held, rollouts)), lambda: f"one to make them: {engines()}")
            leaving = next(filter(is_held, rollouts))
            leaving.send_signal(signal.SIGTERM)
            run.wait_for(r"(rollout-[01]) was told to leave")
            leaving.kill()  # who was told to leave, and is lost, is not replaced either
            run.wait_for(r"rollout-[01] leaves the run: killed by SIGKILL")
            go_on()
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == list(range(1, NUM_STEPS + 1))
    assert "is lost" not in run.output()
