"""Trainer and engines on what counts as two hosts: no memory is shared, so weights stream, and nothing else changes.

Processes in a UTS namespace have another host name, which is what tells hosts apart; loopback is what connects them.
Processes in two network namespaces reach each other over a virtual cable only.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import damaged_rollout
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, in_folder, last_weights, refits_of, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.hosts_harness import CONFIG, NUM_STEPS, on_two_hosts
from tests.harness.runs.running import Awake, Command, all_gone, coordinator, merged, process_of

namespaces = hosts_harness.hosts
other_host = hosts_harness.other_host

TWO_OF_EACH: dict[str, Any] = {"cluster": {"trainers": 2, "rollouts": 2}}
PARTIAL_VERSION = 2


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one trainer and one engine that share memory."""
    return undisturbed_run(tmp_path_factory.mktemp("one"), CONFIG)


@pytest.fixture(scope="module")
def one_host_two_of_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two trainers and two engines that share memory."""
    return undisturbed_run(tmp_path_factory.mktemp("two"), merged(CONFIG, TWO_OF_EACH))


def model_bytes(folder: Path) -> int:
    return sum(len(tensor) for tensor in last_weights(folder).values())


def test_one_trainer_streams_to_one_engine(other_host: tuple[str, ...], one_host: Path) -> None:
    with on_two_hosts({}, other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    assert_same_results("run", one_host, same_batches=True)
    refits = refits_of()
    assert [refit.version for refit in refits] == list(range(NUM_STEPS + 1))
    for refit in refits:
        assert refit.num_bytes == {"trainer-0>rollout-0": model_bytes(one_host)}
        assert not refit.quarantined
    listed = coordinator("refits", "run")
    assert re.search(r"trainer-0>rollout-0  \d+\.\d MB in all", listed.stdout), listed.stdout


@pytest.fixture(scope="module")
def two_hosts(other_host: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two trainers here and two engines there, which both lose half of a version once."""
    folder = tmp_path_factory.mktemp("two_hosts")
    with (
        in_folder(folder),
        on_two_hosts(TWO_OF_EACH, other_host, damages=[f"{PARTIAL_VERSION}:partial"] * 2) as started,
    ):
        run, engines, _ = started
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0, 0]
    return folder / "run"


def test_two_trainers_stream_to_two_engines(two_hosts: Path, one_host_two_of_each: Path) -> None:
    assert_same_results(two_hosts, one_host_two_of_each, same_batches=True)


def test_engines_on_one_host_share_what_comes_from_another(two_hosts: Path) -> None:
    """Each byte crosses once, from a trainer to one of the engines, which passes it on to the other."""
    num_bytes = model_bytes(two_hosts)
    for refit in refits_of(two_hosts):
        across = {link: n for link, n in refit.num_bytes.items() if link.startswith("trainer")}
        within = {link: n for link, n in refit.num_bytes.items() if link.startswith("rollout")}
        assert sum(across.values()) == sum(within.values()) == num_bytes
        assert within.keys() == {"rollout-0>rollout-1", "rollout-1>rollout-0"}
    listed = coordinator("refits", two_hosts)
    assert all(f"{link}  " in listed.stdout for link in refits_of(two_hosts)[0].num_bytes)


def test_engines_that_are_invalidated_together_are_refitted_together(two_hosts: Path) -> None:
    """Neither passes on what it holds before it holds a whole version again."""
    repeated = {refit.version: refit.quarantined for refit in refits_of(two_hosts) if refit.quarantined}
    why = damaged_rollout.PARTIAL_BECAUSE
    assert repeated == {PARTIAL_VERSION: {"rollout-0": why, "rollout-1": why}}


def test_engines_that_are_killed_are_replaced_over_new_connections(
    other_host: tuple[str, ...], one_host_two_of_each: Path
) -> None:
    """One dies in a refit, where the other was to get half of the version from it; the other while they generate."""
    hold(at=65)  # beside three steps, of what the first may have had
    with on_two_hosts(TWO_OF_EACH, other_host, damages=["2:dies"]) as (run, engines, words):
        assert engines[0].wait() == -signal.SIGKILL
        run.wait_for(r"rollout-\d is lost: .*; start another: rollout --coordinator")
        with Command(*words) as another:
            await_hold(run, f"step 3/{NUM_STEPS}")
            engines[1].signal(signal.SIGKILL)
            run.wait_for(r"is lost: [^$]*rollout-\d is lost: ")
            go_on()
            with Command(*words) as one_more:
                assert run.wait() == 0, run.output()
                assert another.wait() == one_more.wait() == 0
    assert_same_results("run", one_host_two_of_each)


def test_a_trainer_that_is_killed_is_named_within_seconds(other_host: tuple[str, ...]) -> None:
    over = {"grpo": {"max_num_steps": 1000}, "cluster": {"max_replacements": 0}}
    with on_two_hosts(over, other_host) as (run, engines, _):
        run.wait_for("step 2/1000")
        children = run.children()
        since_killed = Awake()
        process_of(run, "trainer").kill()
        assert run.wait() == 1
        assert re.search(r"error: trainer-0 failed while .*: killed by SIGKILL", run.output()), run.output()
        assert engines[0].wait() == 0
        assert since_killed.seconds() < 30.0
        assert all_gone(children, 30.0) == []


def test_a_run_over_a_cable(namespaces: dict[str, str], other_host: tuple[str, ...], one_host: Path) -> None:
    here, there = (hosts_harness.on(namespaces, host) for host in ("trainers", "engines"))
    over = {"cluster": {"address": f"tcp://{hosts_harness.ADDRESSES['trainers']}:*"}}
    with on_two_hosts(over, (*there, *other_host), here) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    assert_same_results("run", one_host)
    assert {link for refit in refits_of() for link in refit.num_bytes} == {"trainer-0>rollout-0"}
