"""The folder of the record of samples: what is kept, what is put aside when a run is resumed, and what is deleted."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from samples_harness import RUN_ID, recorded, sample_of, scored

from tandem.common.messages import Purpose
from tandem.config.schema import LoggerConfig
from tandem.samples import sample_files, sample_writing
from tandem.samples.batch import Float32s
from tandem.samples.recorded_shards import steps
from tandem.samples.sample_files import (
    LOGPROBS,
    UNFINISHED,
    RestoreLimits,
    SampleFolder,
    files,
    read_limits,
    shard_path,
    temporary_path,
    unfinished_path,
)
from tandem.samples.sample_writing import UnfinishedFile, table_of, write_shard

LIMITS = RestoreLimits(newest_proven=4, quarantined={"rollout-0": (3,)})


def write(folder: Path, step: int, rollout: str = "rollout-0", purpose: Purpose = "train") -> int:
    """Write a shard; return its size."""
    folder.mkdir(parents=True, exist_ok=True)
    table = table_of([recorded(scored(0, 0), sample_of(2), step=step)])
    return write_shard(shard_path(folder, step, rollout, purpose), RUN_ID, table)


def write_logprobs(folder: Path, step: int, trainer: str = "trainer-0") -> int:
    """Write what looks like a file of log-probabilities; return its size."""
    return write(folder / LOGPROBS, step, trainer)


def begin(folder: Path, step: int, purpose: Purpose = "train") -> Path:
    """Write an unfinished file."""
    path = unfinished_path(folder, step, "rollout-0", purpose)
    UnfinishedFile(path, RUN_ID).close()
    return path


def settings(run: Path, samples: str | float = "all") -> LoggerConfig:
    return LoggerConfig(log_dir=str(run), samples=samples)  # type: ignore[arg-type]


def test_the_oldest_steps_are_deleted_whole_and_never_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    sizes = {step: write(folder, step) + write(folder, step, "rollout-1") for step in (1, 2, 3)}
    samples = SampleFolder(settings(tmp_path, (sizes[2] + sizes[3] + 10) / 1e9))
    size = write(folder, 4) + write(folder, 4, "rollout-1")
    samples.take_recorded(4, ["rollout-0", "rollout-1"], size)
    assert steps(folder) == [3, 4]
    assert len(files(folder)) == 4
    small = SampleFolder(settings(tmp_path, 1e-9))
    small.take_recorded(5, ["rollout-0"], write(folder, 5))
    assert steps(folder) == [5]


@pytest.mark.parametrize("limit", ["all", 1.0])
def test_a_long_run_needs_no_more_memory_for_its_log(limit: str | float, tmp_path: Path) -> None:
    samples = SampleFolder(settings(tmp_path, limit), ["trainer-0"])
    tracemalloc.start(6)  # frames: other threads of this process allocate, too
    of_log = tracemalloc.Filter(True, sample_files.__file__, all_frames=True)
    try:
        sizes = []
        for step in range(1, 2001):
            samples.take_recorded(step, ["rollout-0", "rollout-1"], 1000)
            samples.take_recorded(step, ["rollout-0"], 1000, "validate")
            if step % 500 == 0:
                gc.collect()
                traces = tracemalloc.take_snapshot().filter_traces([of_log]).statistics("filename")
                sizes.append(sum(trace.size for trace in traces))
    finally:
        tracemalloc.stop()
    assert sizes[0] > 0
    # What grows with the steps grows in each five hundred of them. The interpreter's table of interned strings, which
    # parts of paths are, may double in one: 15 MB in a process that has run thousands of tests.
    assert min(later - earlier for earlier, later in pairwise(sizes)) < 500 * 8, "not a number a step"


def test_at_its_limit_the_oldest_steps_are_deleted_as_new_ones_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_files, "_MOST_LISTED", 2)
    folder = tmp_path / "samples"
    size = write(folder, 1)
    samples = SampleFolder(settings(tmp_path, 3.5 * size / 1e9))
    for step in range(2, 12):
        samples.take_recorded(step, ["rollout-0"], write(folder, step))
        assert steps(folder) == [*range(max(1, step - 2), step + 1)]


def test_what_is_to_come_is_put_aside_and_gone_once_its_steps_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for step in (3, 4, 5):
        write(folder, step)
    done, coming = begin(folder, 4), begin(folder, 6)
    half = temporary_path(shard_path(folder, 5, "rollout-1"))
    half.write_bytes(b"half")
    other = temporary_path(shard_path(folder, 9, "rollout-0"))
    samples = SampleFolder(settings(tmp_path))
    samples.put_aside_after(4, LIMITS)
    (aside,) = samples.aside()
    assert steps(folder) == [3, 4]
    assert sorted(file.step for file in files(aside)) == [5, 6]
    assert read_limits(aside) == LIMITS
    assert not done.exists(), "step 4 is not going to be trained on again"
    assert not coming.exists()
    assert not half.exists()
    samples.drop_from(5)
    samples.drop_from(7)
    assert read_limits(aside).below == 5
    begin(folder, 7)
    again = SampleFolder(settings(tmp_path))
    again.put_aside_after(4, RestoreLimits(newest_proven=None))
    newest, oldest = again.aside()
    assert (newest.name, oldest) == ("before-resume-2", aside)
    assert read_limits(newest).below is None, "what was made since the drop counts"
    for step in (5, 6):
        again.take_recorded(step, ["rollout-0"], write(folder, step))
    assert again.aside() == [newest]
    half = temporary_path(shard_path(folder, 7, "rollout-1"))
    for path in (half, other):
        path.write_bytes(b"its writer was killed")
    again.take_recorded(7, ["rollout-0"], write(folder, 7))
    assert not half.exists()
    assert other.exists(), "it may be being written"
    assert again.aside() == []
    assert files(folder / UNFINISHED) == []
    assert steps(folder) == [3, 4, 5, 6, 7]


def test_what_belongs_to_a_step_is_counted_and_deleted_with_it(tmp_path: Path) -> None:
    folder, trainers = tmp_path / "samples", ["trainer-0", "trainer-1"]
    sizes = {}
    for step in (1, 2, 3):
        sizes[step] = write(folder, step) + write(folder, step, purpose="validate")
        sizes[step] += sum(write_logprobs(folder, step, trainer) for trainer in trainers)

    def there() -> list[int]:
        kinds = [files(folder), files(folder, purpose="validate"), files(folder / LOGPROBS)]
        steps_of = [{file.step for file in kind} for kind in kinds]
        assert steps_of[0] == steps_of[2]
        assert steps_of[1] <= steps_of[0]
        return sorted(steps_of[0])

    samples = SampleFolder(settings(tmp_path, (sizes[2] + sizes[3]) * 1.05 / 1e9), trainers)
    for step in (4, 5, 6):
        size = write(folder, step)
        if step == 4:  # before the coordinator hears that the step is recorded
            for trainer in trainers:
                write_logprobs(folder, step, trainer)
        samples.take_recorded(step, ["rollout-0"], size)
        if step > 4:  # after
            for trainer in trainers:
                write_logprobs(folder, step, trainer)
        samples.take_recorded(step, ["rollout-0"], write(folder, step, purpose="validate"), "validate")
    assert there() == [5, 6]
    again = SampleFolder(settings(tmp_path, 1e-9), trainers)
    again.take_recorded(6, ["rollout-0"], write(folder, 6))
    assert there() == [6], "what is found is counted as well"


def test_validation_samples_and_log_probabilities_are_never_kept_to_be_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for step in (3, 4, 5):
        write(folder, step)
        write(folder, step, purpose="validate")
        write_logprobs(folder, step)
    in_progress = begin(folder, 4, "validate"), begin(folder, 6, "validate")
    half = temporary_path(shard_path(folder / LOGPROBS, 5, "trainer-0"))
    half.write_bytes(b"half")
    samples = SampleFolder(settings(tmp_path))
    samples.put_aside_after(4, LIMITS)
    (aside,) = samples.aside()
    assert sorted(path.name for path in aside.iterdir()) == ["limits.json", "step-00000005.rollout-0.parquet"]
    assert steps(folder) == steps(folder, "validate") == steps(folder / LOGPROBS) == [3, 4]
    assert not any(path.exists() for path in (*in_progress, half))


def test_a_validation_in_progress_is_no_leftover_of_the_training_of_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    samples = SampleFolder(settings(tmp_path))
    validating, trained = begin(folder, 2, "validate"), begin(folder, 2)
    samples.take_recorded(2, ["rollout-0"], write(folder, 2))
    assert validating.exists()
    assert not trained.exists()
    samples.take_recorded(2, ["rollout-0"], write(folder, 2, purpose="validate"), "validate")
    assert not validating.exists()


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    SampleFolder(settings(tmp_path, "off")).put_aside_after(0, LIMITS)
    assert [*tmp_path.iterdir()] == []


def test_log_probabilities_that_take_too_long_at_the_end_are_reported_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sample_writing, "_CLOSE_S", 0.01)
    samples = sample_of(2)
    zero_S = np.zeros_like(samples.lengths_S)
    samples = samples.replace(group_S=zero_S, sample_S=zero_S, branch_S=zero_S)
    num_tokens, may_end = int(samples.lengths_S.sum()), threading.Event()

    def compute() -> Float32s:
        assert may_end.wait(60.0)
        return np.zeros(num_tokens, dtype=np.float32)

    recorder = sample_writing.LogprobRecorder(tmp_path, RUN_ID, "trainer-0")
    recorder.add(7, samples, compute)
    recorder.close()
    missing = (
        f"trainer-0: log-probabilities are missing in the record {tmp_path}: writing the last steps takes over 0.01 s"
    )
    assert capsys.readouterr().err == f"{missing}\n"
    may_end.set()
