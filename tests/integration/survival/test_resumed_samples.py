"""A resumed run trains on what had been generated, and generates none of it again: to the bit, while it is there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.observe.run_folder.journal import StepRecord
from tandem.samples.sample_files import files
from tandem.samples.sample_record import RecordedSample
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.record_harness import TWO, assert_recorded, kill_after, record_of
from tests.harness.runs.running import coordinator, deterministic, merged, steps_of, write_config

LONG = merged(TWO, {"grpo": {"max_num_steps": 11}, "checkpointing": {"save_period": 5, "keep_top_k": None}})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), LONG)


def tokens_of(rows: list[RecordedSample]) -> dict[tuple[int, int], list[int]]:
    return {(row.scored.group, row.scored.sample): row.arrays.token_ids_T.tolist() for row in rows}


def assert_not_generated(step: StepRecord, since: float, rows: list[RecordedSample]) -> None:
    """Assert that a step was trained on samples that were made before some time."""
    assert "tokens_per_s" not in step.metrics
    assert_made_before(step, since, rows)


def assert_made_before(step: StepRecord, since: float, rows: list[RecordedSample]) -> None:
    """Assert the same where engines generate for later steps meanwhile."""
    assert max(row.finished_at for row in rows) < since < step.committed_at


def test_a_killed_run_does_again_what_it_did_without_generating(undisturbed: Path) -> None:
    config = write_config(LONG)
    done = kill_after(config, 7)
    last, since = done[-1].step, time.time()
    assert 7 <= last < 10
    before = record_of()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "had been generated, and are not generated again" in resumed.stdout
    assert_same_results("run", undisturbed)
    record = assert_recorded("run", config)
    for step in steps_of():
        if 5 < step.step <= last:
            assert_not_generated(step, since, record[step.step])
            if step.step in before:
                # A kill may come between two rollouts' shards of a step: what was there stays as it was.
                assert tokens_of(before[step.step]).items() <= tokens_of(record[step.step]).items()
    assert "tokens_per_s" in steps_of()[-1].metrics, "what was not there was generated"
    for step, rows in record_of(undisturbed).items():
        assert tokens_of(record[step]) == tokens_of(rows)


def test_a_run_that_is_killed_twice_and_resumed_with_fewer_rollouts_is_the_same(undisturbed: Path) -> None:
    config = write_config(LONG)
    kill_after(config, 6)
    done = kill_after(config, 7, "--resume", num_scored=1)
    since = time.time()
    resumed = coordinator("up", config, "--resume", "cluster.rollouts=1")
    assert resumed.returncode == 0, resumed.stderr
    # One engine generates what two would have: in larger batches, which some processors round otherwise.
    assert_same_results("run", undisturbed)
    record = assert_recorded("run", config)
    for step in steps_of():
        if 5 < step.step <= done[-1].step:
            assert_not_generated(step, since, record[step.step])


def test_a_step_whose_samples_are_damaged_is_generated_again(undisturbed: Path) -> None:
    config = write_config(LONG)
    shard = Path("run/samples/step-00000007.rollout-1.parquet")
    kill_after(config, 8, recorded=str(shard))
    shard.write_bytes(shard.read_bytes()[:-100])
    since = time.time()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000007.rollout-1.parquet cannot be read as part of the rollout log" in resumed.stdout
    assert "generated again: a group of step 7 is, so that its weights may differ" in resumed.stdout
    assert_same_results("run", undisturbed)
    record = assert_recorded("run", config)
    assert_not_generated(steps_of()[5], since, record[6])
    assert {row.finished_at > since for row in record[7]} == {True, False}
    assert min(row.finished_at for row in record[8]) > since


def test_samples_of_another_run_are_never_used(undisturbed: Path) -> None:
    config = write_config(LONG)
    kill_after(config, 7)
    for file in files(Path("run/samples")):
        if file.step > 5:
            file.path.write_bytes((undisturbed / "samples" / file.path.name).read_bytes())
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "is of the run" in resumed.stdout
    assert all("tokens_per_s" in step.metrics for step in steps_of())
    assert_same_results("run", undisturbed)


def test_a_restarted_run_begins_without_what_was_recorded() -> None:
    config = write_config(merged(LONG, {"grpo": {"max_num_steps": 3}}))
    kill_after(config, 2)
    ended = coordinator("up", config, "--restart")
    assert ended.returncode == 0, ended.stderr
    assert "had been generated" not in ended.stdout
    assert all("tokens_per_s" in step.metrics for step in steps_of())
    assert_recorded("run", config)


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_asynchronous_run_that_is_killed_trains_on_the_same_again(in_flight: bool) -> None:
    asynchronous = {
        "grpo": {
            "max_num_steps": 11,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": in_flight},
        },
        "policy": {"generation": {"colocated": {"enabled": False}, "async_engine": True}},
        "loss_fn": {"use_importance_sampling_correction": True},
    }
    config = write_config(merged(LONG, asynchronous))
    done = {step.step: step for step in kill_after(config, 7, num_scored=9)}
    since = time.time()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    record = assert_recorded("run", config)
    again = steps_of()
    assert [step.step for step in again] == [*range(1, 12)]
    for step in again:
        if 5 < step.step <= max(done):
            first, second = deterministic(done[step.step].metrics), deterministic(step.metrics)
            timed = {name for name in first | second if "idle" in name or name in ("buffer_size", "groups_too_old")}
            for name in first.keys() - timed:
                assert first[name] == second[name], f"step {step.step}, {name}"
            assert_made_before(step, since, record[step.step])
