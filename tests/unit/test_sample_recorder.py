"""A rollout records what it makes, and takes it from disk again: a real service, a real engine, real files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_environments import WAIT_S
from rollout_harness import Rollout, tokens_of
from samples_harness import RUN_ID, fetch

from tandem.common.errors import SamplesError
from tandem.common.messages import Generated, RecordedGroup, SampleScored, SamplesFinished
from tandem.samples.batch import SampleBatch
from tandem.samples.recorded_shards import read_step, steps
from tandem.samples.sample_files import STREAM, UNFINISHED, files, shard_path
from tandem.samples.sample_writing import keys_of, read_unfinished, table_of, write_shard

Samples = dict[tuple[int, int], tuple[SampleScored, SampleBatch]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rollout]]:
    """Start rollouts that share a folder of samples, as those of one run do."""
    started: list[Rollout] = []

    def make(environment: str = "Talks", **settings: Any) -> Rollout:
        folder = tmp_path / str(len(started))
        where = {"samples_folder": tmp_path / "samples"} | settings
        started.append(Rollout(folder, f"own_environments.{environment}", **where))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()


def unfinished(folder: Path) -> list[Path]:
    return [file.path for file in files(folder / UNFINISHED, STREAM)]


def written(folder: Path, count: int) -> list[tuple[int, int, int]]:
    """Wait until so many samples are in unfinished files; return their keys."""
    deadline = time.monotonic() + WAIT_S
    while len(keys := [key for path in unfinished(folder) for key in keys_of(read_unfinished(path))]) < count:
        assert time.monotonic() < deadline, f"{len(keys)} of {count}"
        time.sleep(0.01)
    return keys


def all_of(command_id: int, samples: Samples, advantage: float | None = 0.5) -> list[RecordedGroup]:
    """Return what records all samples of a command."""
    numbers = sorted({group for group, _ in samples})
    sizes = {number: sum(group == number for group, _ in samples) for number in numbers}
    return [
        RecordedGroup(command_id=command_id, group=number, advantages=(advantage,) * sizes[number])
        for number in numbers
    ]


def test_what_finishes_is_on_disk_at_once_and_recorded_when_its_step_has_trained(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout, folder = start(kwargs={"turns": 2}), tmp_path / "samples"
    groups = [rollout.group(number, [10 * number, 10 * number + 1]) for number in range(3)]
    began = time.time()
    samples = rollout.run(*groups)
    texts = rollout.texts(*groups)
    assert sorted((group, sample) for _, group, sample in written(folder, 6)) == sorted(samples)
    assert steps(folder) == []
    (first, *_), command_id = unfinished(folder), rollout._generated[0]
    filtered = RecordedGroup(command_id=command_id, group=0, advantages=(None, None))
    recorded = rollout.record("rollout-0", filtered, *all_of(command_id, samples)[1:])
    (shard,) = folder.glob("*.parquet")
    assert (recorded.num_samples, recorded.num_missing, recorded.num_bytes) == (6, 0, shard.stat().st_size)
    assert not first.exists()
    found = read_step(folder, 1, RUN_ID)
    assert [(row.scored.group, row.scored.sample) for row in found] == sorted(samples)
    for row in found:
        key = row.scored.group, row.scored.sample
        known, arrays = samples[key]
        assert row.scored.response == texts[key], "the record has the text, which the coordinator does not get"
        plain = {name: getattr(row.scored, name) for name in SampleScored.__struct_fields__ if name != "response"}
        assert plain == {name: getattr(known, name) for name in plain}
        for name, array in arrays.columns.items():
            assert row.arrays.columns[name].tolist() == array.tolist()
        assert row.advantage == (None if row.scored.group == 0 else 0.5)
        problem = groups[row.scored.group].problem
        assert (row.step, row.rollout, row.command_id, row.problem_id) == (
            1,
            "rollout-0",
            command_id,
            problem.problem_id,
        )
        assert row.prompt == rollout.tokenizer.decode(groups[row.scored.group].prompt_ids, skip_special_tokens=False)
        assert began <= row.started_at <= row.finished_at <= time.time()


def test_what_trainers_have_fetched_is_on_disk(start: Callable[..., Rollout], tmp_path: Path) -> None:
    rollout, folder = start("Scores"), tmp_path / "samples"
    for count in range(1, 16):
        rollout.run(rollout.group(count, [count]))  # and fetch
        keys = [key for path in unfinished(folder) for key in keys_of(read_unfinished(path))]
        assert len(keys) == count, "who is killed now takes nothing along"


def test_an_engine_that_begins_anew_stays_and_has_nothing_to_do_with_what_it_made_before(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout, folder = start("Scores"), tmp_path / "samples"
    samples = rollout.run(rollout.group(0, [1, 2]))
    rollout.record("rollout-0", *all_of(rollout._generated[0], samples))
    engine, address = rollout.service.parts.engine, rollout.samples_at
    rollout.start(rollout.group(1, [3]), ends=False, max_new_tokens=50)
    assert rollout.service.work()
    rollout.build()
    assert rollout.service.parts.engine is engine
    assert rollout.samples_at == address
    assert not rollout.service.work(), "it has given up what it was at"
    assert "does not have sample" in str(fetch(address, [(rollout._generated[0], 0, 0)]))
    shard = next(folder.glob("*.parquet")).rename(tmp_path / "aside.parquet")
    before = shard.read_bytes()
    again = rollout.run(rollout.group(0, [1, 2]))
    assert {key: arrays.token_ids_T.tolist() for key, (_, arrays) in again.items()} == {
        key: arrays.token_ids_T.tolist() for key, (_, arrays) in samples.items()
    }
    recorded = rollout.record("rollout-0", *all_of(rollout._generated[-1], again))
    assert (recorded.num_samples, recorded.num_missing) == (2, 0), "of a step that it had recorded before"
    assert shard.read_bytes() == before


def test_the_command_sent_again_is_answered_as_before(start: Callable[..., Rollout], tmp_path: Path) -> None:
    rollout = start()
    samples = rollout.run(rollout.group(0, [1, 2]))
    groups = all_of(rollout._generated[0], samples)
    first, again = rollout.record("rollout-0", *groups), rollout.record("rollout-0", *groups)
    assert (first.num_samples, first.num_missing) == (again.num_samples, again.num_missing) == (2, 0)
    assert len(read_step(tmp_path / "samples", 1)) == 2


def test_only_what_was_trained_on_is_recorded_and_the_rest_is_gone(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout, folder = start(), tmp_path / "samples"
    rollout.run(rollout.group(0, [1, 2]))  # given up later
    samples = rollout.run(rollout.group(0, [1, 2]))
    written(folder, 4)
    rollout.record("rollout-0", *all_of(rollout._generated[1], samples))
    assert {row.command_id for row in read_step(folder, 1)} == {rollout._generated[1]}
    assert unfinished(folder) == []
    rollout.run(rollout.group(1, [1, 2]))  # of the same step, which has trained
    rollout.record("rollout-0", *all_of(rollout._generated[1], samples))
    assert unfinished(folder) == [], "nobody trains on what comes so late"


def test_another_rollout_records_for_one_that_is_lost(start: Callable[..., Rollout], tmp_path: Path) -> None:
    lost, other = start(), start()
    other.context.name = "rollout-1"
    samples = lost.run(lost.group(0, [1, 2]), lost.group(1, [3, 4]))
    written(tmp_path / "samples", 4)
    assert other.record("rollout-0", *all_of(lost._generated[0], samples)).num_samples == 4
    found = read_step(tmp_path / "samples", 1)
    assert {row.rollout for row in found} == {"rollout-0"}
    assert {path.name for path in (tmp_path / "samples").glob("*.parquet")} == {"step-00000001.rollout-0.parquet"}


def test_samples_that_were_never_written_are_counted(start: Callable[..., Rollout]) -> None:
    rollout = start()
    samples = rollout.run(rollout.group(0, [1, 2]))
    group = RecordedGroup(command_id=999, group=7, advantages=(0.5, 0.5, 0.5))
    recorded = rollout.record("rollout-0", *all_of(rollout._generated[0], samples), group)
    assert (recorded.num_samples, recorded.num_missing) == (2, 3)


def test_where_nothing_can_be_written_generation_goes_on_and_it_is_said_once(
    start: Callable[..., Rollout], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").write_text("no folder")
    rollout = start()
    for number in range(3):
        samples = rollout.run(rollout.group(number, [1, 2]))
        assert len(samples) == 2
    rollout.context.sent.clear()
    with pytest.raises(ValueError, match="not enough values"):  # it fails
        rollout.record("rollout-0", *all_of(rollout._generated[2], samples))
    (error,) = rollout.context.errors
    assert isinstance(error, SamplesError)
    assert "\n" not in str(error)
    said = [line for line in capfd.readouterr().err.splitlines() if "samples are missing in the record" in line]
    assert said == [f"rollout-0: samples are missing in the record {tmp_path / 'samples'}: Not a directory"]


def test_what_a_step_is_validated_by_is_recorded_apart_from_what_it_was_trained_on(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout, folder = start(), tmp_path / "samples"
    group = rollout.group(0, [1, 2])
    samples = rollout.run(group)
    texts = rollout.texts(group)  # of a validation
    trained, validated = rollout._generated
    rollout.record("rollout-0", *all_of(trained, samples))
    assert steps(folder, "validate") == []
    recorded = rollout.record("rollout-0", *all_of(validated, samples, None), purpose="validate")
    assert (recorded.num_samples, recorded.num_missing) == (2, 0)
    assert {path.name for path in folder.glob("*.parquet")} == {
        "step-00000001.rollout-0.parquet",
        "validation-00000001.rollout-0.parquet",
    }
    assert {row.command_id for row in read_step(folder, 1)} == {trained}
    found = read_step(folder, 1, RUN_ID, "validate")
    assert {(row.scored.group, row.scored.sample): row.scored.response for row in found} == texts
    assert {(row.command_id, row.advantage) for row in found} == {(validated, None)}
    assert not [*(folder / UNFINISHED).iterdir()]


def test_nothing_is_written_where_no_record_is_kept(start: Callable[..., Rollout], tmp_path: Path) -> None:
    rollout = start(samples_folder=None)
    rollout.run(rollout.group(0, [1, 2]))
    assert not (tmp_path / "samples").exists()


# --- from disk again -------------------------------------------------------------------------------------------------


def kept_by(rollout: Rollout, folder: Path) -> tuple[Samples, dict[str, tuple[tuple[int, int], ...]]]:
    """Make three groups; return them, and where two of them lie."""
    samples = rollout.run(*(rollout.group(number, [number, 9]) for number in range(3)))
    written(folder, 6)
    (path,) = unfinished(folder)
    command_id = rollout._generated[0]
    return samples, {str(path.relative_to(folder)): ((command_id, 2), (command_id, 0))}


@pytest.mark.parametrize("kind", ["unfinished", "shard"])
def test_groups_are_taken_from_disk_as_if_they_had_been_made_now(
    start: Callable[..., Rollout], tmp_path: Path, kind: str
) -> None:
    first, second, folder = start(), start(), tmp_path / "samples"
    second.context.name = "rollout-1"
    samples, where = kept_by(first, folder)
    if kind == "shard":
        first.record("rollout-0", *all_of(first._generated[0], samples))
        (keys,) = where.values()
        where = {"step-00000001.rollout-0.parquet": keys}
    finished, done = second.restore(where, num_samples=2)
    assert isinstance(finished, SamplesFinished)
    assert isinstance(done, Generated)
    assert (done.num_samples, done.num_tokens, done.purpose) == (4, 0, "train")
    assert {(sample.group, sample.sample): sample for sample in finished.samples} == {
        key: known for key, (known, _) in samples.items() if key[0] != 1
    }
    places = [(finished.command_id, sample.group, sample.sample) for sample in finished.samples]
    found = fetch(second.samples_at, places)
    assert isinstance(found, SampleBatch)
    restored = {key[1:]: (samples[key[1:]][0], found.take([row])) for row, key in enumerate(places)}
    assert tokens_of(restored) == {key: tokens for key, tokens in tokens_of(samples).items() if key[0] != 1}
    groups = all_of(finished.command_id, restored)
    assert second.record("rollout-1", *groups).num_samples == 4, "and they are recorded as such"
    assert sum(row.rollout == "rollout-1" for row in read_step(folder, 1)) == 4


def test_a_sample_whose_reward_float32_does_not_carry_is_taken_from_disk_as_dropped(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout, folder = start(), tmp_path / "samples"
    samples, where = kept_by(rollout, folder)
    rollout.record("rollout-0", *all_of(rollout._generated[0], samples))
    (keys,) = where.values()
    rows = read_step(folder, 1)
    wrong = msgspec.structs.replace(rows[1], scored=msgspec.structs.replace(rows[1].scored, reward=1e39))
    write_shard(shard_path(folder, 1, "rollout-0"), rollout.context.run_id, table_of([rows[0], wrong, *rows[2:]]))
    finished, _ = rollout.restore({"step-00000001.rollout-0.parquet": keys}, num_samples=2)
    assert isinstance(finished, SamplesFinished)
    assert [(each.reward, each.dropped) for each in finished.samples if (each.group, each.sample) == (0, 1)] == [
        (0.0, True)
    ]
    assert sum(each.dropped for each in finished.samples) == 1


def test_the_engine_gives_way_to_training_before_samples_from_disk_are_there(
    start: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout = start()
    _, where = kept_by(rollout, tmp_path / "samples")
    rollout.refit(1)
    assert rollout.config.is_colocated
    rollout.restore(where, num_samples=2)
    with pytest.raises(Exception, match="while the engine sleeps"):
        rollout.service.parts.engine.step()


def test_groups_that_are_not_there_any_more_are_an_error(start: Callable[..., Rollout], tmp_path: Path) -> None:
    rollout, folder = start(), tmp_path / "samples"
    _, where = kept_by(rollout, folder)
    ((name, keys),) = where.items()
    stored = rollout.store.num_tokens
    gone = rollout.restore({name: (*keys, (keys[0][0], 7))}, num_samples=2)
    assert gone == []
    (error,) = rollout.context.errors
    assert isinstance(error, SamplesError)
    assert str(error) == f"{name} in {folder} no longer have the 6 samples"
    rollout.context.errors.clear()
    assert rollout.restore({"other.arrows": keys}, num_samples=2) == []
    assert str(rollout.context.errors[0]).startswith(
        f"{folder / 'other.arrows'} cannot be read as part of the rollout log"
    )
    assert rollout.store.num_tokens == stored, "and nothing of them is kept"
