"""Whole runs on what counts as two hosts, in which what changed is streamed: equal to the bit to whole weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import damaged_rollout
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, in_folder, last_weights, refits_of, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.hosts_harness import CONFIG, on_two_hosts
from tests.harness.runs.running import Command, merged, process_of

other_host = hosts_harness.other_host

NUM_STEPS = 16
FLIPPED, PARTIAL, WRONG = 2, 3, 5
"""Versions that come to harm: behind the transfer, half-way, and in what travels."""
SETTINGS: dict[str, Any] = {
    # Of so little a change, most is lost when weights are rounded for the engine.
    "policy": {"precision": "bfloat16", "optimizer": {"kwargs": {"lr": 1e-5}}},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 8},
    "checkpointing": {"save_period": 8},
}
SLOW = {"links": {"network": 0.1}}
"""Rates over which differences of any size are sent."""
DIFFERENCES: dict[str, Any] = merged(SETTINGS, {"refit": {"differences": "auto"}, "cluster": SLOW})
TCP: dict[str, Any] = {"refit": {"stream": "tcp"}}


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one trainer and one engine that share memory."""
    return undisturbed_run(tmp_path_factory.mktemp("one"), merged(CONFIG, SETTINGS))


@pytest.fixture(scope="module")
def streamed(other_host: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that streams whole weights."""
    folder = tmp_path_factory.mktemp("streamed")
    with in_folder(folder), on_two_hosts(SETTINGS, other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    return folder / "run"


def whole(folder: Path) -> int:
    """Return the bytes of all weights, which are the first version's."""
    return sum(refits_of(folder)[0].num_bytes.values())


def test_a_run_with_differences_is_equal_to_the_bit(other_host: tuple[str, ...], streamed: Path) -> None:
    with on_two_hosts(DIFFERENCES, other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    assert_same_results("run", streamed, same_batches=True)
    refits = refits_of()
    assert [refit.digest for refit in refits] == [refit.digest for refit in refits_of(streamed)]
    assert not any(refit.quarantined for refit in refits)
    assert sum(refits[0].num_bytes.values()) == whole(streamed)
    for refit in refits[1:]:
        assert 0 < sum(refit.num_bytes.values()) < whole(streamed) / 2, refit.num_bytes
    assert {sum(refit.num_bytes.values()) for refit in refits_of(streamed)} == {whole(streamed)}


def test_harm_is_caught_and_costs_a_whole_version(other_host: tuple[str, ...], streamed: Path) -> None:
    """An engine's weights are damaged behind a transfer, left partial, and damaged by a bit that flips on its way."""
    damages = [f"{FLIPPED}:flip,{PARTIAL}:partial,{WRONG}:payload"]
    with on_two_hosts(DIFFERENCES, other_host, damages=damages) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    assert_same_results("run", streamed)
    refits = {refit.version: refit for refit in refits_of()}
    assert {version for version, refit in refits.items() if refit.quarantined} == {FLIPPED, PARTIAL, WRONG}
    assert refits[PARTIAL].quarantined == {"rollout-0": damaged_rollout.PARTIAL_BECAUSE}
    for version in (FLIPPED, WRONG):
        assert re.match(rf"it does not hold version {version}: ", refits[version].quarantined["rollout-0"])
    for version, refit in refits.items():
        is_whole = sum(refit.num_bytes.values()) == whole(streamed)
        assert is_whole == (version in (0, FLIPPED, PARTIAL, WRONG)), f"version {version}: {refit.num_bytes}"
    assert [refits[v].digest for v in sorted(refits)] == [refit.digest for refit in refits_of(streamed)]


@pytest.mark.parametrize("settings", [SETTINGS, DIFFERENCES], ids=["whole", "differences"])
def test_a_run_over_tcp_is_equal_to_the_bit(
    settings: dict[str, Any], other_host: tuple[str, ...], streamed: Path
) -> None:
    with on_two_hosts(merged(settings, TCP), other_host) as (run, engines, _):
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
    assert_same_results("run", streamed, same_batches=True)
    refits = refits_of()
    assert [refit.digest for refit in refits] == [refit.digest for refit in refits_of(streamed)]
    assert not any(refit.quarantined for refit in refits)
    sizes = [sum(refit.num_bytes.values()) for refit in refits]
    assert sizes[0] == whole(streamed)
    assert all((size == sizes[0]) == (settings is SETTINGS) for size in sizes[1:])


@pytest.mark.parametrize("over", [{}, TCP], ids=["group", "tcp"])
def test_trainers_and_engines_that_are_killed_are_replaced(
    over: dict[str, Any], other_host: tuple[str, ...], streamed: Path
) -> None:
    """The engine dies in a refit; the trainer, later, is started again from a checkpoint."""
    hold(at=81)  # beside four steps, of what the engine may have had
    with on_two_hosts(merged(DIFFERENCES, over), other_host, damages=["2:dies"]) as (run, engines, words):
        run.wait_for(r"rollout-0 is lost: .*; start another: rollout --coordinator")
        with Command(*words) as another:
            await_hold(run, f"step 4/{NUM_STEPS}")
            process_of(run, "trainer").kill()
            go_on()
            assert run.wait() == 0, run.output()
            assert another.wait() == 0
        assert engines[0].wait() != 0
    assert last_weights(Path("run")) == last_weights(streamed)


def test_nothing_differs_from_a_run_on_one_host(streamed: Path, one_host: Path) -> None:
    assert_same_results(streamed, one_host)


def test_differences_are_for_streams_only(one_host: Path) -> None:
    """On one host nothing is streamed, and the setting changes nothing."""
    folder = one_host.parent / "again"
    folder.mkdir()
    again = undisturbed_run(folder, merged(CONFIG, DIFFERENCES))
    assert_same_results(again, one_host, same_batches=True)
    assert [refit.num_bytes for refit in refits_of(again)] == [refit.num_bytes for refit in refits_of(one_host)]
