"""Notices of learning rates that a model of its size does not bear, and of steps that passes over the data cap."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config import Config, build_config, notices
from tandem.samples.data_sets import steps_capped

ADAM = {"name": "torch.optim.AdamW"}


def configure(rate: float, hidden_size: int = 128, **policy: Any) -> Config:
    model = {"model_type": "qwen3", "hidden_size": hidden_size}
    return build_config(
        {
            "algorithm": "grpo",
            "policy": {
                "model_name": "nowhere",
                "new_model": {"characters": "01", "config": model},
                "optimizer": ADAM | {"kwargs": {"lr": rate}},
            }
            | policy,
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def of_rate(config: Config) -> list[str]:
    return [line for line in notices(config) if ".lr (" in line]


@pytest.mark.parametrize(("rate", "hidden_size"), [(0.0, 128), (1e-9, 128), (4e-4, 128), (0.0179, 128), (1e-4, 12288)])
def test_of_a_usual_rate_nothing_is_said(rate: float, hidden_size: int) -> None:
    assert of_rate(configure(rate, hidden_size)) == []


def test_a_rate_far_above_what_the_width_bears_is_said_with_its_range_and_its_source() -> None:
    (line,) = of_rate(configure(4e-2))
    assert line.startswith("policy.optimizer.kwargs.lr (0.04) is far too large for a model of this size: above 0.018 ")
    assert "Brown et al. 2020" in line
    assert of_rate(configure(4e-4, 12288))
    assert of_rate(configure(4e-2, optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 4e-2}})) == []


def test_a_rate_that_changes_nothing_is_said() -> None:
    (line,) = of_rate(configure(9e-10))
    assert "is too small: below 1e-09 most float32 weights do not change" in line


def test_steps_that_passes_over_the_data_cap_are_announced() -> None:
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    policy = {"model_name": "nowhere"}
    asked = build_config({"algorithm": "sft", "sft": {"max_num_steps": 240}, "policy": policy, "data": data})
    assert steps_capped(asked, 87, 2784, 32) == (
        "sft.max_num_steps is 240, but the run ends after 87 steps: sft.max_num_epochs allows 1 pass over 2784 items, "
        "32 a step"
    )
    assert steps_capped(asked, 240, 7680, 32) is None
    default = build_config({"algorithm": "sft", "policy": policy, "data": data})
    assert steps_capped(default, 30, 960, 32) is None, "the number of steps was not asked for"
