"""Evaluation through the console command: a model, checkpoints of a run, and what comes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import coordinator, steps_of, write_config


def test_no_step_at_all_validates_the_model_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config({"grpo": {"max_num_steps": 0, "val_period": 0, "num_val_generations_per_prompt": 2}})
    checked = coordinator("check", config)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "no step, but a validation on 8 problems x 2" in checked.stdout
    planned = coordinator("plan", config)
    assert "no step: validation on at most 8 problems × 2 samples, temperature 1" in planned.stdout, planned.stderr
    done = coordinator("up", config)
    assert done.returncode == 0, done.stderr
    (step,) = steps_of()
    assert (step.step, step.version) == (0, 0)
    assert f"val_accuracy  {step.metrics['val_accuracy']:.4f}" in done.stdout
    assert not [*Path("run/checkpoints").glob("step_*")]
    again = coordinator("up", config, "--resume")
    assert again.returncode == 0
    assert "nothing to do: run has been evaluated" in again.stdout
    assert steps_of() == [step], "what was found stays"
