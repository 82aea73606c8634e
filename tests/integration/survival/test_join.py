"""A run over nodes: the coordinator launches the first one's share, and ``coordinator join`` that of each other."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.keys import write_run_keys
from tandem.launch.admission import new_run_keys
from tests.harness.runs.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.hosts_harness import TWO_NODES
from tests.harness.runs.running import (
    Command,
    all_gone,
    coordinator,
    merged,
    process_of,
    processes_of,
    wait_until,
    write_config,
)

NUM_STEPS = 18
CONFIG: dict[str, Any] = {
    "cluster": {"trainers": 2, "rollouts": 2},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": 3},
}
LONG: dict[str, Any] = {"grpo": {"max_num_steps": 1000, "val_period": 1000}, "checkpointing": {"save_period": 1000}}
NOBODY = ("--coordinator", "tcp://127.0.0.1:9")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run on one node."""
    return undisturbed_run(tmp_path_factory.mktemp("one_node"), CONFIG)


@contextlib.contextmanager
def on_two_nodes(over: dict[str, Any] | None = None) -> Iterator[tuple[Command, Command]]:
    """Start the run on the first node, and what the second launches of it."""
    config = write_config(merged(merged(CONFIG, TWO_NODES), over or {}))
    with Command("coordinator", "up", config) as first:
        address = first.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("coordinator", "join", config, "--node", "1", "--coordinator", address) as second:
            yield first, second


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two nodes, the second of which loses its engine, and then its trainer."""
    folder = tmp_path_factory.mktemp("two_nodes")
    for score in (33, 97):  # of what the killed engine had some is scored again
        hold(score, folder)
    with in_folder(folder), on_two_nodes() as (first, second):
        await_hold(first, r"step +2/")
        process_of(second, "rollout").kill()
        go_on()
        await_hold(first, r"step +4/")
        process_of(second, "trainer").kill()
        go_on()
        assert first.wait() == 0, first.output()
        assert second.wait() == 0, second.output()
        assert second.output().count("started again") == 2
        assert "all trainers are started again" in first.output()
    return folder / "run"


def test_nodes_have_the_results_of_one(two_nodes: Path, one_node: Path) -> None:
    """Processes of the second node take their own places again after they were killed."""
    assert_same_results(two_nodes, one_node)
    logs = {path.name for path in (two_nodes / "logs").glob("*.log")}
    assert {"trainer-0.log", "trainer-1.log", "rollout-0.log", "rollout-1.log"} <= logs


def test_services_die_with_the_process_that_launched_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with on_two_nodes({"cluster": {"max_replacements": 0}, **LONG}) as (first, second):
        first.wait_for(r"step +1/")
        services = second.children()
        second.process.kill()
        assert not all_gone(services, 30.0)
        assert first.wait() == 1, first.output()


def test_asked_to_end_it_waits_for_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm asks all processes of a job at once."""
    monkeypatch.chdir(tmp_path)
    with on_two_nodes(LONG) as (first, second):
        first.wait_for(r"step +2/")
        second.signal(signal.SIGTERM)
        first.signal(signal.SIGTERM)
        assert first.wait() == 130, first.output()
        assert second.wait() == 0, second.output()


def test_asked_again_it_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(merged(CONFIG, TWO_NODES))
    write_run_keys(Path("run"), new_run_keys())
    with Command("coordinator", "join", config, "--node", "1", *NOBODY) as node:
        node.wait_for("rollout-1: process")
        services = node.children()
        node.signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="waited"):
            wait_until(lambda: node.process.poll() is not None, lambda: "its end", timeout_s=2.0)
        node.signal(signal.SIGTERM)
        assert node.wait() == 0
        assert not all_gone(services, 30.0)


def test_losses_of_a_node_count_together_and_those_of_trainers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in all of a run."""
    monkeypatch.chdir(tmp_path)
    over = {"cluster": {"trainers": 4, "launch": {"trainers": 2}, "max_replacements": 1}}
    config = write_config(merged(merged(CONFIG, TWO_NODES), over))
    write_run_keys(Path("run"), new_run_keys())
    with Command("coordinator", "join", config, "--node", "1", *NOBODY) as node:
        node.wait_for("rollout-1: process")
        for trainer in processes_of(node, "trainer"):
            trainer.kill()
        for name in ("trainer-2", "trainer-3"):
            node.wait_for(f"{name}: killed by SIGKILL.*; started again")
        process_of(node, "rollout").kill()
        assert node.wait() == 1
        many = "this node has lost more processes than cluster.max_replacements (1)"
        assert re.search(rf"error: rollout-1: killed by SIGKILL.*; {re.escape(many)}", node.output()), node.output()


def test_who_is_not_admitted_in_time_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(merged(CONFIG, TWO_NODES))
    ended = coordinator("join", config, "--node", "1", *NOBODY, "--join-timeout", "1")
    assert ended.returncode == 1
    assert "there is no such file after 1 s; is the run up?" in ended.stderr
    write_run_keys(Path("run"), new_run_keys())
    ended = coordinator("join", config, "--node", "1", *NOBODY, "--join-timeout", "1")
    assert ended.returncode == 1
    assert "no answer from tcp://127.0.0.1:9 within 1 s" in ended.stderr
    assert ended.stderr.count("\n") <= 2, ended.stderr


@pytest.mark.parametrize(
    ("node", "over", "error"),
    [
        ("2", {}, "node 2: beside the first node, which runs the coordinator, cluster.num_nodes gives nodes 1"),
        ("0", {}, "node 0: beside the first node, which runs the coordinator, cluster.num_nodes gives nodes 1"),
        ("1", {"cluster": {"num_nodes": 1, "launch": "all"}}, "cluster.num_nodes gives no other node"),
        ("1", {"cluster": {"num_nodes": 1}}, "cluster.launch: 1 of the 2 trainers are launched"),
        ("1", {"cluster": {"launch": "none"}}, "cluster.launch.refit: false, but the first node"),
    ],
)
def test_a_node_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, over: dict[str, Any], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(merged(merged(CONFIG, TWO_NODES), over))
    ended = coordinator("join", config, "--node", node, *NOBODY)
    assert ended.returncode == 2
    assert error in ended.stderr
    assert ended.stderr.count("\n") == 1
