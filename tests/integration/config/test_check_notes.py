"""What ``coordinator check`` notes of a run, also where another run makes its model first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.runs.running import coordinator, merged, write_config

SFT: dict[str, Any] = {
    "algorithm": "sft",
    "sft": {"max_num_steps": 2, "val_period": 0, "val_at_start": False, "seed": 1},
    "checkpointing": {"metric_name": "loss"},
    "logger": {"log_dir": "sft_run"},
}
THEN: dict[str, Any] = {
    "prerequisite": "sft.yaml",
    "grpo": {"max_num_steps": 1},
    "policy": {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None},
}
TOO_LARGE = "policy.optimizer.kwargs.lr (0.5) is far too large for a model of this size: above 0.072 it breaks; "


def of_rate(rate: float) -> dict[str, Any]:
    return {"policy": {"optimizer": {"kwargs": {"lr": rate}}}}


def noted(*words: str | Path) -> list[str]:
    ended = coordinator("check", *words)
    assert ended.returncode == 0, ended.stderr
    return [line.removeprefix("note: ") for line in ended.stderr.splitlines()]


def test_a_rate_is_judged_by_the_model_that_the_run_before_will_make() -> None:
    write_config(SFT, "sft.yaml")
    config = write_config(merged(THEN, of_rate(0.5)))
    (line,) = noted(config)
    assert line.startswith(TOO_LARGE)
    said = coordinator("up", config).stdout
    assert said.count(TOO_LARGE) == 1
    (again,) = noted(config, "logger.log_dir=other")
    assert again == line, "now it is there"


def test_what_is_to_be_said_of_the_run_before_is_said_until_it_is_done() -> None:
    write_config(merged(merged(SFT, of_rate(0.5)), {"sft": {"max_num_steps": 9}}), "sft.yaml")
    config = write_config(THEN)
    where = f"prerequisite {Path.cwd()}/sft.yaml: "
    rate, capped = noted(config)
    assert rate.startswith(f"{where}{TOO_LARGE}")
    assert capped.startswith(f"{where}sft.max_num_steps is 9, but the run ends after 4 steps: sft.max_num_epochs ")
    said = coordinator("up", config).stdout
    assert said.count(TOO_LARGE) == 1
    assert said.count("but the run ends after 4 steps") == 1
    assert noted(config, "logger.log_dir=other") == []
