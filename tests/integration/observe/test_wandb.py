"""Weights & Biases: what a real run leaves in its offline folders, and what is said where that cannot be."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tandem.common.distribution import install_command
from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.monitoring_harness import rows_in
from tests.harness.runs.running import coordinator, write_config

NAMES = ("train/reward", "train/loss", "timing/train/total_step_time", "timing/train/policy_training")
OVER = {"logger": {"wandb_enabled": True, "wandb": {"project": "tests", "name": "tiny"}}}

installed = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason=f"wandb is not installed: {install_command('wandb')}"
)


@installed
def test_a_run_and_its_resumption_are_one_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = write_config(OVER)
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    ended = coordinator("up", config, "--resume", "grpo.max_num_steps=4")
    assert ended.returncode == 0, ended.stderr
    with read_journal(Path("run")) as journal:
        run_id = journal.run_id
        steps = {record.step: record for record in journal.steps()}
    first, second = sorted(Path("run/wandb").glob("offline-run-*"))
    assert first.name.endswith(f"-{run_id}")
    assert second.name.endswith(f"-{run_id}")
    rows = [*rows_in(first), *rows_in(second)]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        record = steps[row["step"]]
        assert row["validation/accuracy" if row["step"] % 2 == 0 else "train/reward"] is not None
        for name in NAMES:
            where, _, short = name.rpartition("/")
            ours = record.metrics if where == "train" else record.seconds
            assert row.get(name) == ours.get("total" if short == "total_step_time" else short)


@installed
def test_what_the_service_refuses_ends_in_a_line_and_begins_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, os.path.abspath("home"))
    ended = coordinator("up", write_config(OVER))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith("error: logger.wandb_enabled: ")
    assert "launched" not in ended.stdout
    assert not Path("run").exists()
