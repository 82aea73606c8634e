"""Weights that come to harm at the receiver, after a transfer that went well: caught, repaired, and without effect."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import damaged_rollout
from tests.harness.processes.damaged_rollout import DOWN, EMBEDDING, GATE, OUT, K, Q
from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of, undisturbed_run
from tests.harness.runs.running import Command, coordinator, joins, merged, steps_of, write_config

NUM_STEPS = 6
HARMED = {
    1: ("swap", {Q, K}),
    2: ("exchange", {DOWN}),
    3: ("shift", {GATE}),
    4: ("stale", {OUT}),
    5: ("flip", {EMBEDDING}),
}
PARTIAL_VERSION = 6
CONFIG: dict[str, Any] = {
    # As many heads of keys as of queries: their projections have the same shape, and could change places.
    "policy": {"new_model": {"config": {"num_key_value_heads": 2}}},
    # Versions are verified beside validation as well as beside generation; the last one before the run may end.
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 3},
    "checkpointing": {"save_period": NUM_STEPS},
    "refit": {"alias": "never"},
}
BY_HAND = {"cluster": {"launch": {"trainers": 1, "refit": True}}}


@contextlib.contextmanager
def run_with(damages: str, over: dict[str, Any]) -> Iterator[Command]:
    """Start a run whose last engine is started by hand, and comes to harm."""
    with Command("coordinator", "up", write_config(merged(CONFIG, over))) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(damaged_rollout.__name__, damages, *joins(address)):
            yield run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two engines to which nothing happens."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(CONFIG, {"cluster": {"rollouts": 2}}))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two engines, one of which comes to harm at every version but the first."""
    folder = tmp_path_factory.mktemp("disturbed")
    damages = ",".join(f"{version}:{harm}" for version, (harm, _) in HARMED.items())
    with in_folder(folder):
        over = {"cluster": {"rollouts": 2, "launch": {"trainers": 1, "rollouts": 1, "refit": True}}}
        with run_with(f"{damages},{PARTIAL_VERSION}:partial", over) as run:
            assert run.wait() == 0, run.output()
    return folder / "run"


@pytest.mark.parametrize("version", HARMED)
def test_harm_is_caught_and_named(version: int, disturbed: Path) -> None:
    (record,) = [record for record in refits_of(disturbed) if record.version == version]
    assert record.engines == ("rollout-0", "rollout-1")
    assert record.quarantined.keys() == {"rollout-1"}
    told = re.fullmatch(rf"it does not hold version {version}: (.*)", record.quarantined["rollout-1"])
    assert told is not None
    assert set(told[1].split(", ")) == HARMED[version][1]


def test_a_partial_transfer_is_repeated(disturbed: Path) -> None:
    (record,) = [record for record in refits_of(disturbed) if record.version == PARTIAL_VERSION]
    assert record.engines == ("rollout-0", "rollout-1")
    assert record.quarantined == {"rollout-1": damaged_rollout.PARTIAL_BECAUSE}


def test_harm_has_no_effect(disturbed: Path, undisturbed: Path) -> None:
    assert_same_results(disturbed, undisturbed)
    assert [record.digest for record in refits_of(disturbed)] == [record.digest for record in refits_of(undisturbed)]
    assert not any(record.quarantined for record in refits_of(undisturbed))


def test_quarantines_are_listed(disturbed: Path) -> None:
    listed = coordinator("refits", disturbed)
    assert listed.returncode == 0, listed.stderr
    for version in (*HARMED, PARTIAL_VERSION):
        assert f"version {version}: rollout-1 was quarantined and refitted: " in listed.stdout


@pytest.mark.parametrize(
    ("damages", "line"),
    [
        ("*:flip", f"rollout-0 failed while verifying a weight version: it does not hold version 0: {EMBEDDING}"),
        ("*:partial", f"rollout-0 failed while refitting to version 0: {damaged_rollout.PARTIAL_BECAUSE}"),
    ],
    ids=["damaged", "partial"],
)
def test_harm_that_comes_back_ends_the_run_with_one_line(damages: str, line: str) -> None:
    with run_with(damages, BY_HAND) as run:
        assert run.wait() == 1
        (told,) = [told for told in run.output().splitlines() if told.startswith("error:")]
        assert told == f"error: {line}"
        assert "Traceback" not in run.output()
    assert steps_of() == []
