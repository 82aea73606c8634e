"""Runs whose engines take their weights through a store end as those do that stream them, bit by bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of, undisturbed_run
from tests.harness.runs.held_runs import ENVIRONMENT, HELD, await_hold, go_on, hold
from tests.harness.runs.hosts_harness import CONFIG, NUM_STEPS, command, on_two_hosts
from tests.harness.runs.running import Command, joins, merged, wait_until, write_config

other_host = hosts_harness.other_host

ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}},
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {"generation": {"colocated": {"enabled": False}}},
}


def stored(folder: Path) -> dict[str, Any]:
    """Return the configuration of a store in a folder."""
    return {"refit": {"store": f"file://{folder}", "store_whole_every": 4}}


def log_of(process: str) -> str:
    return Path(f"run/logs/{process}.log").read_text()


def assert_empty(store: Path) -> None:
    """Assert that the trainers have taken away what they wrote."""
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_a_run_through_a_store_is_the_run_without(other_host: tuple[str, ...], tmp_path: Path) -> None:
    expected = undisturbed_run(tmp_path, merged(CONFIG, {"logger": {"log_dir": "run"}})).rename(tmp_path / "expected")
    store = tmp_path / "store"
    over = merged(stored(store), {"cluster": {"trainers": 1, "rollouts": 1}})
    with in_folder(tmp_path), on_two_hosts(over, other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
        assert_same_results("run", expected, same_batches=True)
        refits = refits_of()
        assert [refit.version for refit in refits] == list(range(NUM_STEPS + 1))
        assert not any(refit.quarantined for refit in refits)
        assert log_of("trainer-0").count("refit.store: version ") == NUM_STEPS + 1, "each was written once"
    assert_empty(store)


def test_an_asynchronous_run_takes_versions_in_flight(other_host: tuple[str, ...], tmp_path: Path) -> None:
    store = tmp_path / "store"
    with in_folder(tmp_path), on_two_hosts(merged(stored(store), ASYNCHRONOUS), other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
        refits = refits_of()
        assert refits[-1].version == NUM_STEPS, "the last is validated"
        assert not any(refit.quarantined for refit in refits)
    assert_empty(store)


def test_engines_come_and_go_by_a_store_that_fails_for_a_while(other_host: tuple[str, ...], tmp_path: Path) -> None:
    """One joins the run, which it could not where trainers have to stream to it; the other is killed and replaced."""
    config = merged(CONFIG, {"grpo": {"max_num_steps": 16}, **ENVIRONMENT})
    for name in ("alone", "elastic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(HELD)
    alone = undisturbed_run(tmp_path / "alone", config)
    store, aside = tmp_path / "store", tmp_path / "aside"
    rollout = command(other_host, "rollout")
    config = merged(merged(config, stored(store)), {"cluster": {"launch": {"trainers": 1, "refit": True}}})
    hold(17, tmp_path / "elastic")
    with in_folder(tmp_path / "elastic"), Command("coordinator", "up", write_config(config)) as run:
        address = joins(run.wait_for(r"listens on (tcp://\S+)")[1])
        with Command(*rollout, *address) as first:
            await_hold(run, r"step 1/")
            with Command(*rollout, *address) as second:
                run.wait_for("rollout-1 joins the run")
                wait_until(lambda: "rollout-1" in second.output(), second.output)
                store.rename(aside)
                store.write_text("not a folder")
                go_on()
                wait_until(lambda: log_of("trainer-0").count("tried again") > 2, lambda: log_of("trainer-0"))
                store.unlink()
                aside.rename(store)
                run.wait_for("step 6/")
                first.signal(signal.SIGKILL)
                run.wait_for("rollout-0 is lost")
                with Command(*rollout, *address) as third:
                    assert run.wait() == 0, run.output()
                    assert second.wait() == third.wait() == 0
        assert_same_results("run", alone)
    assert_empty(store)
