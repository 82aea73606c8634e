"""A run folder as a run leaves it, without any process: journal, checkpoints, and a record of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from samples_harness import recorded, sample_of, scored

from tandem.common.errors import DamagedCheckpoint
from tandem.config import Config, build_config, config_to_json, fingerprint
from tandem.coordinator.preparing.resuming import ResumePoints, StartingPoint
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples import manifest, sample_files, sample_writing
from tandem.samples.sample_record import RecordedSample
from tests.harness.trainers.damage import digests_in

WEIGHTS = "policy/model.safetensors"


def make_config(seed: int = 1) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "seed": seed},
            "policy": {"model_name": "model", "train_global_batch_size": 4, "train_micro_batch_size": 4},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


class Run:
    """A run of six steps that saved every other, without its processes."""

    def __init__(self, folder: str = "run", steps: range = range(2, 7, 2), config: Config | None = None) -> None:
        self.config = config or make_config()
        self.root = Path(folder) / "checkpoints"
        self.said: list[str] = []
        self.journal = Journal.create(Path(folder), config_to_json(self.config), "grpo")
        self.checkpoints = CheckpointFolder(
            self.root, keep_top_k=None, higher_is_better=True, run_id=self.journal.run_id
        )
        self.checkpoints.prepare()
        for step in range(1, 7):
            self.journal.commit_step(StepRecord(step=step, version=step, metrics={}, seconds={}))
            if step in steps:
                self.save(step)

    def save(self, step: int, seed: int | None = None) -> None:
        folder = Path(self.checkpoints.temporary_pattern.format(step=step))
        (folder / "policy").mkdir(parents=True)
        random = np.random.default_rng(step if seed is None else seed)
        save_file({name: random.normal(size=3000) for name in ("first", "second")}, folder / WEIGHTS)
        (folder / "policy" / "config.json").write_text(f'{{"rope_theta": {step}}}')
        files = {WEIGHTS: manifest.describe(folder / WEIGHTS, digests_in(folder / WEIGHTS))}
        files["policy/config.json"] = manifest.describe(folder / "policy" / "config.json")
        manifest.write_part(folder, 0, files)
        record = CheckpointRecord(
            step=step, version=step, metric_name="", metric=None, config_json=config_to_json(self.config).decode()
        )
        self.checkpoints.publish(record, fingerprint(self.config))

    def start(self, from_step: int | None = None) -> StartingPoint:
        return self.resuming().start(from_step)

    def resuming(self) -> ResumePoints:
        return ResumePoints(self.config, self.journal, self.checkpoints, self.said.append)

    def refusal(self, from_step: int | None = None) -> DamagedCheckpoint:
        with pytest.raises(DamagedCheckpoint) as raised:
            self.start(from_step)
        return raised.value


def samples_of_step(step: int, num_groups: int = 2, num_samples: int = 2, **known: Any) -> list[RecordedSample]:
    """What two rollouts make for a step, a group in turns; the first sample of a group has the higher reward.

    The first two groups have the same prompt.
    """
    return [
        recorded(
            scored(group, sample, prompt_length=2, response_length=2 + sample, **{"reward": 1.0 - sample} | known),
            sample_of(4 + sample, first_token=10 * (group // 2)),
            step=step,
            rollout=f"rollout-{group % 2}",
            command_id=100 * step + group % 2,
        )
        for group in range(num_groups)
        for sample in range(num_samples)
    ]


def record(run: Run, samples: list[RecordedSample]) -> None:
    """Write samples of one step to a run's record, a shard for each rollout."""
    folder = run.root.parent / sample_files.FOLDER
    folder.mkdir(exist_ok=True)
    for rollout in {sample.rollout for sample in samples}:
        table = sample_writing.table_of([sample for sample in samples if sample.rollout == rollout])
        shard = sample_files.shard_path(folder, samples[0].step, rollout)
        sample_writing.write_shard(shard, run.journal.run_id, table)
