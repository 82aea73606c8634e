"""Which of the samples that had been generated a resumed run trains on: whole groups, proven, of its own problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from samples_harness import RUN_ID, recorded, sample_of, scored

from tandem.common.messages import Problem, PromptGroup
from tandem.config import Config, build_config
from tandem.coordinator.loop.restored_samples import RestoredSamples, limits_of
from tandem.observe.run_folder.journal import RefitRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.sample_files import RestoreLimits, SampleFolder, shard_path, unfinished_path
from tandem.samples.sample_record import RecordedSample
from tandem.samples.sample_writing import UnfinishedFile, table_of, write_shard

SIZE = 2
"""Samples of a group."""
PROVEN = RestoreLimits(newest_proven=9)


class Problems:
    """What is asked of an algorithm: the problem of each group."""

    num_steps = 8

    def prompt_groups(self, step: int, purpose: str, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        return tuple(
            PromptGroup(
                group=group,
                problem=Problem(problem_id=f"problem-{group}", question="", answer="", metadata={}),
                prompt_ids=(1,),
                seeds=(1, 2),
            )
            for group in groups
        )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return build_config(
        {
            "grpo": {"num_generations_per_prompt": SIZE, "async_grpo": {"enabled": True}},
            "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
            "policy": {
                "model_name": "model",
                "train_global_batch_size": 64,
                "generation": {"colocated": {"enabled": False}},
            },
            "env": {"mine": {"class": "digits.Digits"}},
            "logger": {"log_dir": str(tmp_path)},
        }
    )


def group(step: int, number: int, version: int, *, count: int = SIZE, **more: Any) -> list[RecordedSample]:
    versions = {"oldest_version": version, "newest_version": version}
    usual = {"command_id": 10 * step} | more
    return [recorded(scored(number, i, **versions), sample_of(2), step=step, **usual) for i in range(count)]


def shard(folder: Path, samples: list[RecordedSample], run_id: str = RUN_ID) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(shard_path(folder, samples[0].step, samples[0].rollout), run_id, table_of(samples))


def unfinished(folder: Path, samples: list[RecordedSample]) -> None:
    file = UnfinishedFile(unfinished_path(folder, samples[0].step, samples[0].rollout), RUN_ID)
    file.append(samples)
    file.close()


def found(config: Config, limits: RestoreLimits = PROVEN) -> tuple[dict[tuple[int, int], tuple[str, int]], list[str]]:
    """Put aside what is there after step 4; return what is found, and what was said."""
    said: list[str] = []
    folder = SampleFolder(config.logger)
    folder.put_aside_after(4, limits)
    kept = RestoredSamples(config, folder, RUN_ID, said.append).find(Problems(), 5)  # type: ignore[arg-type]
    return {place: (Path(group.file).parent.name, group.command_id) for place, group in kept.items()}, said


def test_whole_groups_are_found_wherever_they_lie(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    shard(folder, [*group(5, 0, 4), *group(5, 1, 4, count=1)])
    unfinished(folder, [*group(6, 3, 5), *group(6, 4, 4)])
    unfinished(folder, group(9, 0, 8))  # beyond the last step
    kept, said = found(config)
    assert kept == {place: ("before-resume-1", 10 * place[0]) for place in ((5, 0), (6, 3), (6, 4))}
    assert said == ["3 groups of steps 5 to 6 had been generated, and are not generated again"]


def test_what_was_trained_on_is_preferred_and_then_what_was_made_last(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    unfinished(folder, [*group(5, 0, 4, command_id=70), *group(5, 1, 4, command_id=71), *group(5, 1, 4, command_id=72)])
    shard(folder, group(5, 0, 4, command_id=60))
    kept, _ = found(config)
    assert {place: command_id for place, (_, command_id) in kept.items()} == {(5, 0): 60, (5, 1): 72}


def test_only_what_proven_weights_have_made_counts_unless_it_was_trained_on(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    unfinished(folder, [*group(7, 0, 5), *group(7, 1, 6), *group(7, 2, 5, command_id=9)])
    unfinished(folder, group(7, 3, 5, rollout="rollout-1"))
    shard(folder, group(8, 0, 7))
    limits = RestoreLimits(newest_proven=5, quarantined={"rollout-1": (5,)})
    assert sorted(found(config, limits)[0]) == [(7, 0), (7, 2), (8, 0)]
    unverified, _ = found(config, RestoreLimits(newest_proven=None))
    assert sorted(unverified) == [(7, 0), (7, 2), (8, 0)], "what was put aside goes by what was known then"


def test_what_would_not_be_asked_for_now_does_not_count(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    old = group(7, 1, 4)  # an age of one is allowed
    other = group(7, 2, 6, problem_id="of another data set")
    unfinished(folder, [*group(7, 0, 5), *old, *other])
    assert [*found(config)[0]] == [(7, 0)]


def test_what_is_damaged_or_of_another_run_is_said_and_older_files_do_not_stand_in(
    config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "samples"
    shard(folder, group(5, 0, 4))
    shard(folder, group(6, 0, 4))
    assert sorted(found(config)[0]) == [(5, 0), (6, 0)]
    shard(folder, group(6, 0, 5))
    path = folder / "step-00000006.rollout-0.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    shard(folder, group(7, 0, 5), run_id="other")
    kept, said = found(config)
    assert sorted(kept) == [(5, 0)]
    assert "step-00000006.rollout-0.parquet cannot be read as part of the rollout log" in said[0]
    assert "step-00000007.rollout-0.parquet is of the run other, not run" in said[1]
    assert said[-1] == "1 groups of step 5 had been generated, and are not generated again"


def test_what_was_dropped_stays_so(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    shard(folder, [*group(6, 0, 4), *group(6, 1, 5)])
    assert sorted(found(config)[0]) == [(6, 0), (6, 1)]
    SampleFolder(config.logger).drop_from(5)
    assert sorted(found(config)[0]) == [(6, 0)]


def test_limits_are_what_the_journal_says(config: Config, tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "run", b"{}", "grpo")
    for version, quarantined in ((3, {}), (4, {"rollout-1": "it differs"})):
        journal.record_refit(
            RefitRecord(
                version=version,
                engines=("rollout-0", "rollout-1"),
                num_bytes={},
                seconds={},
                predicted_s=0.0,
                bound_s=0.0,
                digest=7,
                quarantined=quarantined,
            )
        )
    assert limits_of(config, journal) == RestoreLimits(newest_proven=4, quarantined={"rollout-1": (4,)})
    journal.forget_after(3)
    assert limits_of(config, journal).newest_proven == 3
    journal.close()
