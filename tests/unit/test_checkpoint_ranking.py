"""Checkpoints of steps without the metric that ranks them: below all others, as in NeMo-RL v0.7, and never in silence.

There (`nemo_rl/utils/checkpoint.py`, `remove_old_checkpoints`) a checkpoint without the metric counts as minus
infinity, the later of equal ones first, the newest always stays, and `grpo.py` warns "will not be saved as top-k".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config import Config, build_config, config_to_json, notices
from tandem.coordinator.loop.recorder import ResultRecorder
from tandem.coordinator.observers.observer import Observer, ObserverGroup
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord, LateMetrics
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.sample_files import SampleFolder


class Notes(Observer):
    """The lines that a run notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, text: str) -> None:
        self.lines.append(text)


def config_of(folder: Path, **checkpointing: Any) -> Config:
    return build_config(
        {
            "grpo": {"val_period": 10, "max_num_steps": 60},
            "policy": {"model_name": "m"},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "num_validation": 8},
            "checkpointing": {"checkpoint_dir": str(folder / "ck"), "metric_name": "val:accuracy", **checkpointing},
            "logger": {"log_dir": str(folder)},
        }
    )


def publish_all(folder: Path, metrics: dict[int, float | None], **checkpointing: Any) -> tuple[list[int], list[str]]:
    """Record steps with these validation accuracies, each with a checkpoint; return those kept, and the notes."""
    config, notes = config_of(folder, **checkpointing), Notes()
    settings = config.checkpointing
    checkpoints = CheckpointFolder(
        folder / "ck", keep_top_k=settings.keep_top_k, higher_is_better=settings.higher_is_better
    )
    checkpoints.prepare()
    with Journal.create(folder, config_to_json(config), config.algorithm, "run-1") as journal:
        recorder = ResultRecorder(config, journal, checkpoints, SampleFolder(config.logger, []), ObserverGroup([notes]))
        for step in range(1, max(metrics) + 1):
            accuracy = metrics.get(step)
            measured = {} if accuracy is None else {"val_accuracy": accuracy}
            journal.commit_step(StepRecord(step=step, version=step, metrics=measured, seconds={"total": 1.0}))
            if step in metrics:
                Path(checkpoints.temporary_pattern.format(step=step)).mkdir(parents=True)
                recorder.publish_checkpoint(step)
    return checkpoints.steps(), notes.lines


def test_they_rank_below_all_others_and_that_is_said_once(tmp_path: Path) -> None:
    metrics = {5: None, 10: 0.1, 15: None, 20: 0.3, 25: None, 30: 0.2, 35: None}
    kept, notes = publish_all(tmp_path, metrics, keep_top_k=2)
    assert kept == [20, 30, 35]
    assert notes == [
        "the checkpoint of step 5 has no val_accuracy (checkpointing.metric_name): such checkpoints rank below all "
        "others, and only 2 (keep_top_k) and the newest are kept"
    ]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_ranks_like_none(number: float, tmp_path: Path) -> None:
    kept, _ = publish_all(tmp_path, {10: 0.1, 20: number, 30: 0.2, 40: 0.05}, keep_top_k=2)
    assert kept == [10, 30, 40]


def test_nothing_is_said_where_all_are_kept_or_measured(tmp_path: Path) -> None:
    assert publish_all(tmp_path / "all", {5: None, 10: 0.1}, keep_top_k=None) == ([5, 10], [])
    assert publish_all(tmp_path / "measured", {10: 0.1, 20: 0.2}, keep_top_k=1) == ([20], [])


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"save_period": 10}, False),
        ({"save_period": 20}, False),
        ({"save_period": 15}, True),
        ({"save_period": 5}, True),
        ({"save_period": 5, "keep_top_k": None}, False),
        ({"save_period": 5, "metric_name": "train:reward"}, False),
        ({"save_period": 5, "enabled": False}, False),
    ],
)
def test_a_check_says_that_some_steps_will_not_have_it(settings: dict[str, Any], is_said: bool, tmp_path: Path) -> None:
    lines = [line for line in notices(config_of(tmp_path, **settings)) if "without validation" in line]
    assert len(lines) == is_said
    if is_said:
        assert lines[0].startswith(f"checkpointing.save_period is {settings['save_period']} and grpo.val_period 10: ")


def test_checkpoints_stay_until_their_late_metric_is_in(tmp_path: Path) -> None:
    late = LateMetrics({})
    checkpoints = CheckpointFolder(tmp_path, keep_top_k=1, higher_is_better=True, late_metrics=late)
    for step in range(1, 6):
        Path(checkpoints.temporary_pattern.format(step=step)).mkdir(parents=True)
        checkpoints.publish(
            CheckpointRecord(step=step, version=step, metric_name="val_accuracy", metric=None, config_json="{}")
        )
    assert checkpoints.steps() == [1, 2, 3, 4, 5], "any may be the best"
    late.metrics |= {1: 0.3, 2: 0.9, 3: None}
    checkpoints.prune(newest=5)
    assert checkpoints.steps() == [2, 4, 5]
    late.metrics[5] = 0.1
    late.are_expected = False
    checkpoints.prune(newest=5)
    assert checkpoints.steps() == [2, 5], "the one without ranks below, and the newest stays"
