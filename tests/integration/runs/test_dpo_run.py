"""A whole DPO run through the console command: pairs from a file, two trainers, no engines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tandem.samples.data_sets import epoch_stream
from tests.harness.runs.running import (
    coordinator,
    copy_examples,
    deterministic,
    pairs_of_sums,
    steps_of,
    weights_of,
    write_config,
    write_rows,
)

NUM_STEPS = 6


def write_pairs() -> None:
    """Write pairs to train on, and two sets to hold out."""
    pairs = pairs_of_sums()
    for name, part in {"pairs": pairs[28:], "first": pairs[:8], "second": pairs[8:28]}.items():
        write_rows(name, part)


def test_dpo_learns_preferences_and_resumes_to_the_bit() -> None:
    write_pairs()
    dpo = {
        "algorithm": "dpo",
        "dpo": {"max_num_steps": NUM_STEPS, "max_num_epochs": 9, "val_period": 3, "val_batches": 2},
        "policy": {"train_micro_batch_size": 4, "optimizer": {"kwargs": {"lr": 3e-3}}},
        "data": {
            "train_data_path": "pairs.jsonl",
            "num_validation": None,
            "val_data_paths": {"first": "first.jsonl", "second": "second.jsonl"},
        },
        "checkpointing": {"save_period": 3},
        "cluster": {"trainers": 2},
    }
    config = write_config(dpo)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    steps = steps_of("whole")
    assert [step.step for step in steps] == list(range(NUM_STEPS + 1))
    for step in steps[1:]:
        assert all(math.isfinite(value) for value in step.metrics.values())
        assert {"preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean"} <= step.metrics.keys()
        assert step.metrics["num_valid_samples"] == 16, "pairs"
    assert steps[0].metrics["val_loss"] == pytest.approx(math.log(2), abs=1e-5), "policy and reference are the same"
    last = steps[-1].metrics
    assert (last["val_first/num_valid_samples"], last["val_second/num_valid_samples"]) == (8, 16)
    assert last["val_loss"] == pytest.approx((8 * last["val_first/loss"] + 16 * last["val_second/loss"]) / 24)
    assert last["val_accuracy"] > 0.9
    assert last["val_loss"] < math.log(2)
    assert last["val_rewards_chosen_mean"] > last["val_rewards_rejected_mean"]
    assert "val_accuracy" in whole.stdout
    assert Path("whole/report.png").exists()
    assert '"rewards_chosen_mean"' in Path("whole/report.html").read_text()

    first = coordinator("up", config, "dpo.max_num_steps=3")
    assert first.returncode == 0, first.stderr
    second = coordinator("up", config, "--resume")
    assert second.returncode == 0, second.stderr
    assert weights_of("run/checkpoints/step_6") == weights_of("whole/checkpoints/step_6")
    for resumed, uninterrupted in zip(steps_of("run")[4:], steps[4:], strict=True):
        assert deterministic(resumed.metrics) == deterministic(uninterrupted.metrics)


def test_a_bad_pair_is_one_line_before_anything_starts() -> None:
    Path("pairs.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n{"prompt": "1", "chosen": "2"}\n')
    ended = coordinator("up", write_config({"algorithm": "dpo", "data": {"train_data_path": "pairs.jsonl"}}))
    assert ended.returncode == 1
    expected = "pairs.jsonl:2 has no field 'rejected' (data.rejected_key); its fields are prompt, chosen"
    assert ended.stderr.strip() == f"error: {expected}"
    assert not Path("run").exists()


def test_a_pair_that_cannot_be_tokenised_ends_the_run_when_it_is_drawn_and_put_right_lets_it_go_on() -> None:
    num_pairs = 20 * 16
    (late,) = epoch_stream(42, num_pairs, num_pairs - 16, 1)
    dpo = {
        "algorithm": "dpo",
        "dpo": {"max_num_epochs": 1, "val_period": 20, "val_at_start": False},
        "policy": {"optimizer": {"kwargs": {"lr": 1e-3}}},
        "data": {
            "train_data_path": "pairs.jsonl",
            "val_data_path": "held_out.jsonl",
            "num_train": None,
            "num_validation": None,
        },
        "checkpointing": {"save_period": 19},
    }
    config = write_config(dpo)
    Path("held_out.jsonl").write_text(json.dumps({"prompt": "0", "chosen": "1", "rejected": "2"}))
    right = [json.dumps({"prompt": f"{i} + 1", "chosen": f" = {i + 1}", "rejected": "-"}) for i in range(num_pairs)]
    unanswered = [{"role": "user", "content": "2"}]
    wrong = list(right)
    wrong[late] = json.dumps(json.loads(right[late]) | {"chosen": unanswered})
    Path("pairs.jsonl").write_text("\n".join(wrong))
    ended = coordinator("up", config)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"error: problem 'pairs.jsonl:{late + 1}': its solution does not end with a turn of the assistant"
    )
    assert [step.step for step in steps_of()] == list(range(1, 20))
    Path("pairs.jsonl").write_text("\n".join(right))
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [step.step for step in steps_of()] == list(range(1, 21))


def test_the_example_runs() -> None:
    copy_examples()
    ended = coordinator("up", "examples/arithmetic_dpo.yaml", "dpo.max_num_steps=2")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert [step.step for step in steps_of("results/arithmetic_dpo")] == [0, 1, 2]
    assert steps_of("results/arithmetic_dpo")[-1].metrics["num_valid_samples"] == 64
