"""Batches from a record: those that the run had, two steps in memory, and tokens that trainers can fetch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from data_harness import character_tokenizer
from run_harness import Run, make_config, record, samples_of_step
from samples_harness import fetch

from tandem.common.curve import AdmittedKeys
from tandem.common.errors import SamplesError
from tandem.config import Config
from tandem.config.schema import ReplayConfig
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.algorithms.recorded import SOURCE, RecordedAlgorithm, is_whole
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples import recorded_shards
from tandem.samples.model_files import load_tokenizer
from tandem.samples.sample_record import RecordedSample
from tests.harness.members import MEMBER

RUN_ID = "the replay"
TRAINERS = AdmittedKeys([MEMBER.public])


def config_of(run: Run, to_step: int = 4, **grpo: Any) -> Config:
    config = make_config()
    replay = ReplayConfig(run="run", run_id=run.journal.run_id, from_step=0, to_step=to_step)
    return msgspec.structs.replace(config, replay=replay, grpo=msgspec.structs.replace(config.grpo, **grpo))


def algorithm_of(config: Config) -> RecordedAlgorithm:
    tokenizer = load_tokenizer(config) if Path("model").exists() else character_tokenizer(config)
    algorithm = make_algorithm(config, tokenizer)
    assert isinstance(algorithm, RecordedAlgorithm)
    return algorithm


@pytest.fixture
def run() -> Run:
    """A run whose steps have two groups of two samples."""
    run = Run("run")
    for step in range(1, 5):
        record(run, samples_of_step(step))
    return run


@pytest.fixture
def algorithm(run: Run) -> Iterator[RecordedAlgorithm]:
    algorithm = algorithm_of(config_of(run))
    yield algorithm
    algorithm.close()


def records_of(samples: list[RecordedSample]) -> list[SampleRecord]:
    return [SampleRecord(sample.scored, sample.rollout, sample.command_id) for sample in samples]


def test_a_batch_is_that_of_the_run_but_for_where_its_tokens_are(run: Run, algorithm: RecordedAlgorithm) -> None:
    algorithm.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)
    for step in range(1, 5):
        samples = samples_of_step(step)
        prompts = {sample.scored.group: tuple(sample.arrays.token_ids_T[:2].tolist()) for sample in samples}
        theirs, metrics = training_batch(run.config, step, records_of(samples), prompts)
        ours, ours_metrics = algorithm.batch(step, "train")
        assert ours_metrics == metrics
        assert theirs.sources == ("rollout-0", "rollout-1")
        assert ours.sources == (SOURCE,)
        elsewhere = ("source_S", "command_S")
        for name, array in theirs.columns.items():
            if name not in elsewhere:
                np.testing.assert_array_equal(ours.columns[name], array, err_msg=name)
        assert ours.prompt_S.tolist() == [0, 0, 0, 0], "two groups have the same prompt"


def test_advantages_are_those_of_the_configuration_of_now(run: Run) -> None:
    algorithm = algorithm_of(config_of(run, overlong_filtering=True))
    plain = msgspec.structs.replace(run.config.grpo.adv_estimator, normalize_rewards=False)
    other = algorithm_of(config_of(run, adv_estimator=plain))
    try:
        found = []
        for each in (algorithm, other):
            each.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)
            found.append(each.batch(1, "train")[0].advantages_S.tolist())
    finally:
        algorithm.close()
        other.close()
    assert found[1] == [1.0, -1.0, 1.0, -1.0]
    assert found[0] == pytest.approx(found[1]), "the others of two have no spread"


def test_trainers_fetch_the_tokens_of_the_step_and_of_no_other(algorithm: RecordedAlgorithm) -> None:
    address = algorithm.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)[SOURCE]
    for step in (1, 2):
        table = algorithm.batch(step, "train")[0]
        keys = [*zip(table.command_S.tolist(), table.group_S.tolist(), table.sample_S.tolist(), strict=True)]
        found = fetch(address, keys, RUN_ID)
        assert not isinstance(found, str), found
        for place, sample in enumerate(samples_of_step(step)):
            one = found.take([place])
            for name, array in sample.arrays.columns.items():
                assert getattr(one, name).tolist() == array.tolist()
        algorithm.batch(step, "train")  # asked again, as where some had not come
        assert fetch(address, keys, RUN_ID) is not None
    assert fetch(address, [(1, 0, 0)], RUN_ID) == "it does not have sample 0 of group 0 of command 1"
    assert "the request is from run another" in str(fetch(address, keys, "another"))


def test_one_step_is_read_ahead_and_no_more(
    run: Run, algorithm: RecordedAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, str]] = []
    is_read = threading.Semaphore(0)

    def reading(folder: Path, step: int, run_id: str | None = None) -> list[RecordedSample]:
        found = read_step(folder, step, run_id)
        read.append((step, threading.current_thread().name))
        is_read.release()
        return found

    read_step = recorded_shards.read_step
    monkeypatch.setattr(recorded_shards, "read_step", reading)
    algorithm.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)
    assert is_read.acquire(timeout=120)
    assert [step for step, _ in read] == [1], "before anybody asks"
    for step in (1, 2, 3):
        algorithm.batch(step, "train")
        assert is_read.acquire(timeout=120)
        assert [step for step, _ in read] == list(range(1, step + 2))
    algorithm.batch(4, "train")
    assert len(read) == 4, "the last one has no next"
    assert all(thread.startswith("record") for _, thread in read), "never in the loop's"


def test_samples_that_are_deleted_meanwhile_are_named(run: Run, algorithm: RecordedAlgorithm) -> None:
    algorithm.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)
    algorithm.batch(1, "train")
    for path in Path("run/samples").glob("step-00000003.*"):
        path.unlink()
    algorithm.batch(2, "train")
    with pytest.raises(SamplesError, match=r"^the samples of step 3 are not in run/samples any more: the run keeps"):
        algorithm.batch(3, "train")


def test_groups_beyond_a_step_are_filtered_as_dynamic_sampling_did(run: Run) -> None:
    """The first group of each step has no spread; of the others the first two count."""
    for step in range(1, 3):
        samples = samples_of_step(step, num_groups=4)
        equal = [
            msgspec.structs.replace(each, scored=msgspec.structs.replace(each.scored, reward=0.5))
            if each.scored.group == 0
            else each
            for each in samples
        ]
        record(run, equal)
    algorithm = algorithm_of(config_of(run, use_dynamic_sampling=True))
    scaling = msgspec.structs.replace(run.config.grpo.reward_scaling, enabled=True, source_min=1.0, source_max=2.0)
    other = algorithm_of(config_of(run, use_dynamic_sampling=True, reward_scaling=scaling))
    try:
        for each in (algorithm, other):
            each.serve("tcp://127.0.0.1:1234", RUN_ID, 1, TRAINERS)
        batch, metrics = algorithm.batch(1, "train")
        assert batch.group_S.tolist() == [1, 1, 2, 2]
        assert metrics["dynamic_sampling_num_dropped_groups"] == 1
        with pytest.raises(SamplesError) as raised:
            other.batch(1, "train")
    finally:
        algorithm.close()
        other.close()
    assert str(raised.value) == (
        "step 1 needs 2 groups whose rewards differ, and of the 4 that are recorded, 0 do: grpo.adv_estimator and "
        "grpo.reward_scaling say which"
    )


@pytest.mark.parametrize(
    ("keys", "fixed", "dynamic"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], True, True),
        ([(1, 1), (0, 1), (1, 0), (0, 0)], True, True),
        ([(0, 0), (0, 1), (1, 0)], False, False),
        ([(0, 0), (0, 1)], False, False),
        ([(0, 0), (0, 1), (2, 0), (2, 1)], False, False),
        ([(0, 0), (0, 1), (0, 0), (0, 1)], False, False),
        ([*itertools.product(range(3), range(2))], False, True),
        ([], False, False),
    ],
)
def test_a_step_is_whole_with_all_samples_of_all_groups(
    keys: list[tuple[int, int]], fixed: bool, dynamic: bool
) -> None:
    config = make_config()
    assert is_whole(config, keys) == fixed
    sampling = msgspec.structs.replace(config.grpo, use_dynamic_sampling=True)
    assert is_whole(msgspec.structs.replace(config, grpo=sampling), keys) == dynamic
