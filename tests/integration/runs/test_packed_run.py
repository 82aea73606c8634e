"""Whole runs with packed rows: what is learned is what padded rows teach."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.runs.running import coordinator, steps_of, write_config

PACKED: dict[str, Any] = {
    "policy": {
        "train_global_batch_size": 16,
        "sequence_packing": {"train_mb_tokens": 64, "logprob_mb_tokens": 128, "sequence_length_round": 16},
    },
    "checkpointing": {"enabled": False},
}


def both(over: dict[str, Any]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Run with padded rows and one trainer, and with packed rows and two; return the metrics of the steps."""
    config = write_config(PACKED | over)
    runs = {"padded": [], "packed": ["policy.sequence_packing.enabled=true", "cluster.trainers=2"]}
    for folder, overrides in runs.items():
        ended = coordinator("up", config, f"logger.log_dir={folder}", *overrides)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    padded, packed = ([step.metrics for step in steps_of(folder)] for folder in runs)
    return padded, packed


def test_grpo_takes_the_same_first_step_with_packed_rows() -> None:
    loss = {"reference_policy_kl_penalty": 0.1}
    padded, packed = both({"grpo": {"max_num_steps": 1, "val_period": 0}, "loss_fn": loss})
    for name in ("loss", "grad_norm", "entropy", "reward", "token_mult_prob_error"):
        assert packed[0][name] == pytest.approx(padded[0][name], abs=1e-5), name


def test_sft_learns_and_validates_the_same_with_packed_rows() -> None:
    sft = {"max_num_steps": 3, "val_period": 3, "val_at_start": False, "val_global_batch_size": 16}
    padded, packed = both({"algorithm": "sft", "sft": sft})
    assert len(padded) == 3
    for before, after in zip(padded, packed, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert after[name] == pytest.approx(before[name], abs=1e-5), name
    assert packed[-1]["val_loss"] == pytest.approx(padded[-1]["val_loss"], abs=1e-5)
