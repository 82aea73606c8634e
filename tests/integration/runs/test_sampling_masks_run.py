"""Runs that draw from some of the tokens, through the console commands: ratios are one where weights are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.samples.batch import MASKS
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import coordinator, merged, steps_of, write_config

CUT: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "val_period": 0, "adv_estimator": {"name": "grpo"}},
    "loss_fn": {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.01},
    "policy": {"generation": {"temperature": 0.8, "top_p": 0.9}},
    "logger": {"samples": "all"},
    "checkpointing": {"metric_name": "reward", "save_period": 2},
}


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_ratios_are_one_where_weights_are_equal_and_a_replay_has_the_same_numbers(num_trainers: int) -> None:
    config = write_config(merged(CUT, {"cluster": {"trainers": num_trainers}}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of("run"):
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["kl"] >= 0
    assert steps_of("run")[0].metrics["kl"] == pytest.approx(0.0, abs=1e-6), "both without masks, of equal weights"
    for sample in read_step(Path("run") / "samples", 1):
        assert (sample.arrays.mask_lengths_T > 0)[sample.arrays.loss_mask_T].any()
        assert not sample.arrays.mask_lengths_T[~sample.arrays.loss_mask_T].any()
    replayed = coordinator("replay", "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    (folder,) = Path().glob("run-replay*")
    for name in ("loss", "grad_norm", "sampling_importance_ratio"):
        assert [step.metrics[name] for step in steps_of(folder)] == [step.metrics[name] for step in steps_of("run")]


def test_a_run_that_draws_from_all_tokens_has_no_masks() -> None:
    config = write_config(merged(CUT, {"policy": {"generation": {"top_p": 1.0}}, "grpo": {"max_num_steps": 1}}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = steps_of("run")
    assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert all(MASKS[0] not in sample.arrays.columns for sample in read_step(Path("run") / "samples", 1))
