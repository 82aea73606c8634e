"""A run whose responses may not contain some texts, through the console commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.samples.batch import MASKS
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import coordinator, steps_of, write_config


def test_no_response_contains_a_bad_word_and_training_scores_what_remains() -> None:
    over = {"grpo": {"max_num_steps": 2}, "loss_fn": {"reference_policy_kl_penalty": 0.01}}
    config = write_config(over | {"logger": {"samples": "all"}})
    free = coordinator("up", config, "logger.log_dir=free")
    assert free.returncode == 0, free.stdout + free.stderr
    ended = coordinator("up", config, "policy.generation.bad_words=['1', '23']")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    responses = {run: _responses(run) for run in ("free", "run")}
    assert any("1" in text for text in responses["free"]), "or nothing is shown"
    assert responses["run"]
    assert not any("1" in text or "23" in text for text in responses["run"])
    for run in responses:
        assert [step.metrics["token_mult_prob_error"] for step in steps_of(run)] == pytest.approx([1.0] * 2, abs=1e-5)
    assert steps_of("run")[0].metrics["kl"] == pytest.approx(0.0, abs=1e-6), "of all tokens, with equal weights"
    for sample in read_step(Path("run") / "samples", 1):
        lengths = sample.arrays.mask_lengths_T[sample.arrays.loss_mask_T]
        assert set(lengths.tolist()) == {1}, "each leaves out the 1, and none has a 2 before it"
    for sample in read_step(Path("free") / "samples", 1):
        assert MASKS[0] not in sample.arrays.columns


def _responses(run: str) -> list[str]:
    folder = Path(run) / "samples"
    return [sample.scored.response for step in (1, 2) for sample in read_step(folder, step)]
