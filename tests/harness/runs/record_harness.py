"""What tests of the record of samples share: what is in one, and that all of a run follows from it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tandem.config import load_config
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tandem.samples.recorded_shards import read_step, steps
from tandem.samples.sample_files import FOLDER, SHARD
from tandem.samples.sample_record import RecordedSample
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import Command, steps_of, wait_until

TWO: dict[str, Any] = {
    "cluster": {"rollouts": 2},
    "grpo": {"val_period": 0},
    "checkpointing": {"metric_name": "reward"},
}


def record_of(run: str | Path = "run") -> dict[int, list[RecordedSample]]:
    """Return what is recorded of each step."""
    folder = Path(run) / FOLDER
    with read_journal(Path(run)) as journal:
        run_id = journal.run_id
    return {step: read_step(folder, step, run_id) for step in steps(folder)}


def assert_recorded(run: str | Path, config: Path) -> dict[int, list[RecordedSample]]:
    """Assert that the batch and the metrics of every step follow from its record; return the record."""
    loaded, done, record = load_config(config), steps_of(run), record_of(run)
    assert [*record] == [step.step for step in done if step.step]
    for step in done:
        if not step.step:
            continue
        rows = record[step.step]
        known = [SampleRecord(row.scored, row.rollout, row.command_id) for row in rows]
        prompts = {row.scored.group: row.prompt for row in rows}
        batch, metrics = training_batch(loaded, step.step, known, prompts)
        assert {name: step.metrics[name] for name in metrics} == metrics, step.step
        columns = (batch.command_S, batch.group_S, batch.sample_S)
        places = zip(*(column.tolist() for column in columns), strict=True)
        expected = dict(zip(places, batch.advantages_S.tolist(), strict=True))
        found = {(row.command_id, row.scored.group, row.scored.sample): row.advantage for row in rows}
        assert {place: value for place, value in found.items() if value is not None} == expected
        for row in rows:
            made_T = row.arrays.loss_mask_T
            assert len(row.arrays.token_ids_T) == row.scored.num_tokens
            assert made_T.sum() == row.scored.response_length
            assert row.scored.oldest_version == row.arrays.versions_T[made_T].min()
            assert row.scored.newest_version == row.arrays.versions_T[made_T].max() < step.step
            assert (row.arrays.generation_logprobs_T[made_T] < 0).any()
            assert row.started_at < row.finished_at <= step.committed_at
    leftover = [path for path in (Path(run) / FOLDER).rglob("*") if path.is_file() and path.suffix != SHARD]
    assert leftover == [], f"nothing else is left behind: {leftover}"
    return record


def kill_after(
    config: Path, step: int, *arguments: str, num_scored: int | None = None, recorded: str | None = None
) -> list[StepRecord]:
    """Kill a run's coordinator once a step is done, and a shard of the record written; return what it had done.

    The run waits before it scores the samples of more than `num_scored` steps, which are by default that many.
    """
    counted = Path("holds", "scores")
    before = counted.stat().st_size if counted.exists() else 0
    hold(at=before + 16 * (step if num_scored is None else num_scored) + 1)
    with Command("coordinator", "up", config, *arguments) as run:
        await_hold(run, rf"step {step}/\d+")
        if recorded is not None:
            wait_until(Path(recorded).exists, lambda: recorded)
        services = run.children()
        run.signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in services), lambda: "its end")
    go_on()
    return steps_of()
