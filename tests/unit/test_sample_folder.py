"""The folder of the record of samples: what is kept, what is put aside when a run is resumed, and what is deleted."""

from __future__ import annotations

from pathlib import Path

from samples_harness import RUN_ID, recorded, sample_of, scored

from tandem.common.config.schema import Logger
from tandem.common.sample_files import UNFINISHED, files, shard_path, temporary_path, unfinished_path
from tandem.common.sample_record import UnfinishedFile, steps, table_of, write_shard
from tandem.coordinator.run.sample_folder import KeptLimits, SampleFolder, read_limits

LIMITS = KeptLimits(newest_proven=4, quarantined={"rollout-0": (3,)})


def write(folder: Path, step: int, rollout: str = "rollout-0") -> int:
    """Write a shard; return its size."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_shard(folder, RUN_ID, step, rollout, table_of([recorded(scored(0, 0), sample_of(2), step=step)]))


def begin(folder: Path, step: int) -> Path:
    """Write an unfinished file."""
    path = unfinished_path(folder, step, "rollout-0")
    UnfinishedFile(path, RUN_ID).close()
    return path


def settings(run: Path, samples: str | float = "all") -> Logger:
    return Logger(log_dir=str(run), samples=samples)  # type: ignore[arg-type]


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
    again.put_aside_after(4, KeptLimits(newest_proven=None))
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


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    SampleFolder(settings(tmp_path, "off")).put_aside_after(0, LIMITS)
    assert [*tmp_path.iterdir()] == []
