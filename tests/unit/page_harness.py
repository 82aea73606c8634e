"""Run folders for tests of the page: a journal, ``live.json`` and samples, made as a run makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from samples_harness import recorded, sample_of, scored
from starlette.testclient import TestClient

from tandem.observe.page.server import make_app
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.sample_files import FOLDER, shard_path
from tandem.samples.sample_record import RecordedSample
from tandem.samples.sample_writing import table_of, write_shard

_OF_RECORD = ("advantage", "problem_id", "question", "answer", "prompt")
LOOPBACK = "http://127.0.0.1:8700"


def make_run(
    folder: str | Path = "run", num_steps: int = 3, config: Mapping[str, Any] | None = None, run_id: str = "a-run"
) -> Journal:
    """Make a run that is going on, with so many steps; whoever calls closes the journal, which ends it."""
    config = config or {"policy": {"model_name": "model"}, "grpo": {"max_num_steps": 9}}
    journal = Journal.create(Path(folder), msgspec.json.encode(config), "grpo", run_id)
    for step in range(1, num_steps + 1):
        commit(journal, step)
    return journal


def commit(journal: Journal, step: int) -> None:
    """Commit a step, with a validation every second one."""
    metrics = {"reward": step / 10, "loss": math.nan if step == 2 else -step, "memory_training_trainer_gb": 0.5}
    if step % 2 == 0:
        metrics["val_accuracy"] = step / 100
    seconds = {"total": 2.0, "generation": 1.0, "policy_training": 0.75}
    journal.commit_step(StepRecord(step=step, version=step, metrics=metrics, seconds=seconds))


def a_refit(version: int, digest: int = 2**63 + 1) -> RefitRecord:
    """Return the record of a refit."""
    return RefitRecord(
        version=version,
        engines=("rollout-0",),
        num_bytes={"trainer-0>rollout-0": 1000},
        seconds={"copy": 0.5, "transfer": 1.0},
        predicted_s=0.4,
        bound_s=0.25,
        digest=digest,
        quarantined={},
        verify="full",
    )


def client(*folders: str | Path, token: str | None = None, static: Path | None = None) -> TestClient:
    """Return what asks the page of these runs, as a browser on this machine does."""
    where = {} if static is None else {"static": static}
    return TestClient(make_app([Path(folder) for folder in folders], token, **where), base_url=LOOPBACK)


def get(page: TestClient, path: str) -> Any:
    """Return what the page answers."""
    answer = page.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def a_sample(step: int, group: int, sample: int, *, length: int = 5, **more: Any) -> RecordedSample:
    """Return a sample with a prompt of two tokens; `more` is what is known of it."""
    of_record = {name: more.pop(name) for name in _OF_RECORD if name in more}
    known = scored(group, sample, prompt_length=2, response_length=length - 2, **more)
    return recorded(known, sample_of(length), step=step, **of_record)


def record(
    run: str | Path, samples: list[RecordedSample], *, run_id: str = "a-run", is_validation: bool = False
) -> None:
    """Record samples of one step, as its rollout does."""
    folder, step = Path(run) / FOLDER, samples[0].step
    into = Path("validation") if is_validation else folder
    write_shard(shard_path(into, step, "rollout-0"), run_id, table_of(samples))
    if is_validation:
        name = f"{step:08d}.rollout-0.parquet"
        (into / f"step-{name}").rename(folder / f"validation-{name}")
