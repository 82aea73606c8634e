"""A run whose responses may not contain some texts, through the console commands."""

from __future__ import annotations

from pathlib import Path

from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import coordinator, steps_of, write_config


def test_no_response_contains_a_bad_word_and_training_sees_the_rest_as_likelier() -> None:
    config = write_config({"grpo": {"max_num_steps": 2}, "logger": {"samples": "all"}})
    free = coordinator("up", config, "logger.log_dir=free")
    assert free.returncode == 0, free.stdout + free.stderr
    ended = coordinator("up", config, "policy.generation.bad_words=['1', '23']")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    responses = {run: _responses(run) for run in ("free", "run")}
    assert any("1" in text for text in responses["free"]), "or nothing is shown"
    assert responses["run"]
    assert not any("1" in text or "23" in text for text in responses["run"])
    errors = {run: max(step.metrics["token_mult_prob_error"] for step in steps_of(run)) for run in responses}
    assert errors["free"] < 1.001 < errors["run"], "training's log-probabilities are of all tokens"


def _responses(run: str) -> list[str]:
    folder = Path(run) / "samples"
    return [sample.scored.response for step in (1, 2) for sample in read_step(folder, step)]
