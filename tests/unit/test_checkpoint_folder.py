"""Checkpoint folders: a name that is there means a checkpoint that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.errors import CheckpointError
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord


def record(step: int, metric: float | None) -> CheckpointRecord:
    return CheckpointRecord(step=step, version=step, metric_name="val_reward", metric=metric, config_json="{}")


def publish(folder: CheckpointFolder, step: int, metric: float | None) -> Path:
    temporary = Path(folder.temporary_pattern.format(step=step))
    temporary.mkdir(parents=True)
    (temporary / "weights").write_text(f"weights of step {step}")
    return folder.publish(record(step, metric))


def make(keep: int | None = None, *, higher: bool = True) -> CheckpointFolder:
    folder = CheckpointFolder(Path("ck"), keep_top_k=keep, higher_is_better=higher)
    folder.prepare()
    return folder


def test_a_published_checkpoint_is_whole_and_the_latest() -> None:
    folder = make()
    final = publish(folder, 3, 0.5)
    assert (final / "weights").read_text() == "weights of step 3"
    assert Path("ck/latest").resolve() == final.resolve()
    assert folder.all() == {3: record(3, 0.5)}
    publish(folder, 5, 0.4)
    assert Path("ck/latest/weights").read_text() == "weights of step 5"


@pytest.mark.parametrize(
    ("higher", "kept"),
    [(True, {2, 3, 5}), (False, {1, 4, 5})],
)
def test_the_best_are_kept_and_always_the_newest(higher: bool, kept: set[int]) -> None:
    folder = make(2, higher=higher)
    for step, metric in enumerate([0.1, 0.9, 0.8, 0.2, None], start=1):
        publish(folder, step, metric)
    assert set(folder.all()) == kept


def test_what_a_crash_left_half_written_never_counts() -> None:
    folder = make()
    publish(folder, 1, 0.5)
    half = Path(folder.temporary_pattern.format(step=2))
    half.mkdir()
    (half / "weights").write_text("half")
    assert set(folder.all()) == {1}
    again = make()
    assert not half.exists()
    assert again.temporary_pattern != folder.temporary_pattern, "who wrote there may still be writing"
    assert again.newest(up_to=9) == (1, Path("ck/step_1"))
    assert again.newest(up_to=0) is None


def test_a_step_that_is_saved_again_replaces_the_first() -> None:
    folder = make()
    publish(folder, 2, 0.1)
    final = publish(folder, 2, 0.7)
    assert folder.all()[2].metric == 0.7
    assert sorted(p.name for p in Path("ck").iterdir()) == ["latest", "step_2"]
    assert final.exists()


def test_a_folder_that_is_no_checkpoint_is_named() -> None:
    folder = make()
    Path("ck/step_9").mkdir()
    with pytest.raises(CheckpointError, match="step_9 is no Tandem checkpoint"):
        folder.all()
