"""What NeMo-RL v0.7's files ask of a run: lists of data sets, a validation at the end, an end in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config import load_config
from tests.harness.runs.running import SUMS, coordinator, steps_of, write_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_sums(name: str, first: int, last: int) -> dict[str, str]:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in SUMS[first:last]))
    return {"data_path": name}


def test_several_sets_are_trained_on_and_validated_at_the_end() -> None:
    sets = {
        "train": [write_sums("low.jsonl", 0, 40), {**write_sums("high.jsonl", 100, 140), "max_samples": 30}],
        "validation": [write_sums("easy.jsonl", 50, 58), {**write_sums("hard.jsonl", 180, 184), "repeat": 2}],
        "default": {"env_name": "digits"},
        "dataset_name": None,  # nothing of the tiny configuration's
    }
    config = write_config({"data": sets, "grpo": {"val_period": 0, "val_at_end": True, "max_num_steps": 2}})
    done = coordinator("up", config)
    assert done.returncode == 0, done.stderr + done.stdout
    first, last = (record.metrics for record in steps_of() if record.step)
    assert "val_reward" not in first
    assert {"val_easy/reward", "val_hard/reward", "val_easy/accuracy", "val_hard/accuracy"} <= last.keys()
    assert last["val_reward"] == pytest.approx((last["val_easy/reward"] + last["val_hard/reward"]) / 2), "8 of each"


def test_a_run_ends_after_its_epochs_of_what_is_repeated() -> None:
    sets = {
        "train": [{**write_sums("few.jsonl", 0, 4), "repeat": 2}, write_sums("more.jsonl", 100, 108)],
        "validation": write_sums("held.jsonl", 50, 54),
        "default": {"env_name": "digits"},
        "dataset_name": None,  # nothing of the tiny configuration's
    }
    config = write_config({"data": sets, "grpo": {"max_num_epochs": 2, "max_num_steps": 100, "val_period": 50}})
    done = coordinator("up", config)
    assert done.returncode == 0, done.stderr + done.stdout
    num_prompts = load_config(config).grpo.num_prompts_per_step
    assert [record.step for record in steps_of()] == [*range(1, 2 * 16 // num_prompts + 1)], "4 twice, and 8"


def test_a_run_that_is_given_so_long_saves_and_ends_before() -> None:
    over = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 100_000, "max_num_epochs": 100_000, "val_period": 100_000, "val_at_start": False},
        "policy": {"train_global_batch_size": 8},
        "data": {"solution_template": "{answer}"},
        "checkpointing": {"checkpoint_must_save_by": "00:00:00:01", "save_period": 1000},
    }
    config = write_config(over)
    done = coordinator("up", config)
    assert "checkpointing.checkpoint_must_save_by is 00:00:00:01" in done.stdout, done.stderr
    assert f"saved in time; continue with: coordinator up {config} --resume" in done.stdout
    assert done.returncode == 0, "it did what it was told"
    last = steps_of()[-1].step
    assert 1 <= last < 1000, "a step takes more than a millisecond"
    assert (Path("run/checkpoints") / f"step_{last}").is_dir()
    again = coordinator("up", config, "--resume", "--unfinished-code", "75", "--supervise")
    assert again.returncode == 75, "a script that asks can tell it from a run that has finished"
    assert steps_of()[-1].step > last
