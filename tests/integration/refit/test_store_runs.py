"""Runs whose engines take their weights through a store end as those do that stream them, bit by bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of, undisturbed_run
from tests.harness.runs.held_runs import ENVIRONMENT, HELD, await_hold, go_on, hold
from tests.harness.runs.hosts_harness import CONFIG, NUM_STEPS, command, on_two_hosts
from tests.harness.runs.pages_harness import DOCS, quoted
from tests.harness.runs.running import Command, coordinator, joins, merged, wait_until, write_config
from tests.harness.stores import failing, linked_folder

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


def test_a_command_starts_engines_that_share_nothing_with_the_trainers(tmp_path: Path) -> None:
    """Not even memory of the machine that both are on here; and the store has another address for them."""
    config = merged(CONFIG, {"grpo": {"max_num_steps": 4}})
    expected = undisturbed_run(tmp_path, merged(config, {"cluster": {"rollouts": 2}})).rename(tmp_path / "expected")
    store, link = tmp_path / "store", tmp_path / "link"
    store.mkdir()
    link.symlink_to(store)
    up, rollout_words = [words for words, _ in quoted((DOCS / "store.md").read_text())]
    config = merged(config, {"cluster": {"rollouts": 2, "launch": {"trainers": 1, "refit": True}}})
    with in_folder(tmp_path):
        here = {"config.yaml": write_config(config), "refit.store=s3://weights/runs": f"refit.store=file://{store}"}
        here |= {"cluster.address=tcp://10.0.0.1:5555": "cluster.address=tcp://127.0.0.1:*"}
        with Command(*(here.get(word, word) for word in up)) as run:
            address = run.wait_for(r"listens on (tcp://\S+)")[1]
            here |= {"tcp://10.0.0.1:5555": address, "members.json": "run/keys/members.json"}
            here |= {"s3://weights/runs": f"file://{link}"}
            words = [here.get(word, word) for word in rollout_words]
            words[3:3] = ["logger.log_dir=elsewhere", "--num", "2"]
            with Command(*words) as rollouts:
                assert run.wait() == 0, run.output()
                assert rollouts.wait() == 0, rollouts.output()
        assert_same_results("run", expected)
        links = {"trainer-0>rollout-0", "trainer-0>rollout-1"}
        assert [refit.num_bytes.keys() for refit in refits_of()] == [links] * 5
        assert log_of("trainer-0").count("refit.store: version ") == 5
    assert_empty(store)
    with in_folder(tmp_path):
        refused = coordinator("rollouts", write_config(CONFIG), "--coordinator", address)
        assert refused.returncode == 2
        assert "refit.store: null, and no --store" in refused.stderr


def test_engines_come_and_go_by_a_store_that_fails_for_a_while(other_host: tuple[str, ...], tmp_path: Path) -> None:
    """One joins the run, which it could not where trainers have to stream to it; the other is killed and replaced."""
    config = merged(CONFIG, {"grpo": {"max_num_steps": 16}, **ENVIRONMENT})
    for name in ("alone", "elastic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(HELD)
    alone = undisturbed_run(tmp_path / "alone", config)
    store = linked_folder(tmp_path / "store")
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
                with failing(store):
                    go_on()
                    wait_until(lambda: log_of("trainer-0").count("tried again") > 2, lambda: log_of("trainer-0"))
                run.wait_for("step 6/")
                first.signal(signal.SIGKILL)
                run.wait_for("rollout-0 is lost")
                with Command(*rollout, *address) as third:
                    assert run.wait() == 0, run.output()
                    assert second.wait() == third.wait() == 0
        assert_same_results("run", alone)
    assert_empty(store)
