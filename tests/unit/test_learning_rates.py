"""Notices of learning rates that a model of its size does not bear, and of steps that passes over the data cap."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.optim.lr_scheduler import SequentialLR

from tandem.common.user_code import named
from tandem.config import Config, build_config, notices
from tandem.samples.data_sets import describe_capped_steps, describe_repeats

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
    assert describe_capped_steps(asked, 87, 2784, 32) == (
        "sft.max_num_steps is 240, but the run ends after 87 steps: sft.max_num_epochs allows 1 pass over 2784 items, "
        "32 a step"
    )
    assert describe_capped_steps(asked, 240, 7680, 32) is None
    default = build_config({"algorithm": "sft", "policy": policy, "data": data})
    assert describe_capped_steps(default, 30, 960, 32) is None, "the number of steps was not asked for"


def scheduled(scheduler: list[dict[str, Any]], num_steps: int = 24, **grpo: Any) -> list[str]:
    base = configure(1e-4, scheduler=scheduler)
    config = msgspec.structs.replace(base, grpo=msgspec.structs.replace(base.grpo, max_num_steps=num_steps, **grpo))
    return [line for line in notices(config) if "learning rate is 0" in line]


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.0}}
WARM_UP = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
POLYNOMIAL = {"name": "torch.optim.lr_scheduler.PolynomialLR", "kwargs": {"total_iters": 9}}


@pytest.mark.parametrize(
    ("scheduler", "last"),
    [
        ([LINEAR], 5),
        ([POLYNOMIAL], 9),
        ([WARM_UP, LINEAR, {"milestones": [3]}], 8),
        ([WARM_UP], None),
        ([{"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 5}}], None),
    ],
)
def test_a_schedule_that_the_run_outlasts_is_said_as_torch_has_it(
    scheduler: list[dict[str, Any]], last: int | None
) -> None:
    """The rates are those of torch 2.13's own schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts = [named(each["name"])(optimizer, **each["kwargs"]) for each in scheduler if "name" in each]
    milestones = [step for each in scheduler for step in each.get("milestones", [])]
    whole = SequentialLR(optimizer, parts, milestones) if milestones else parts[0]
    rates = []
    for _ in range(24):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    zero = [step for step, rate in enumerate(rates, 1) if rate < 1e-12]
    told = scheduled(scheduler)
    if last is None:
        assert told == []
        assert not zero or zero[-1] < 24
        return
    assert zero == [*range(last + 1, 25)]
    what = f"the learning rate is 0 after step {last}, and grpo.max_num_steps is 24: later steps change nothing"
    assert told == [f"policy.scheduler: {what}"]
    assert scheduled(scheduler, num_steps=last) == []


def test_a_schedule_counts_passes_over_a_batch() -> None:
    assert "after step 3," in scheduled([LINEAR], num_iterations=2)[0]


def test_a_decay_of_megatron_core_that_ends_is_said_too() -> None:
    megatron = {"enabled": True, "optimizer": {"min_lr": 0.0}, "scheduler": {"lr_decay_style": "linear"}}
    base = configure(1e-4, dtensor_cfg={"enabled": False}, megatron_cfg=megatron)
    for scheduler, optimizer, is_told in (
        ({"lr_decay_iters": 5}, {}, True),
        ({"lr_decay_iters": 5, "lr_decay_style": "constant"}, {}, False),
        ({"lr_decay_iters": 5}, {"min_lr": 1e-7}, False),
        ({}, {}, False),
    ):
        section = base.policy.megatron_cfg
        section = msgspec.structs.replace(
            section,
            optimizer=section.optimizer | optimizer,
            scheduler=msgspec.structs.replace(section.scheduler, **scheduler),
        )
        config = msgspec.structs.replace(base, policy=msgspec.structs.replace(base.policy, megatron_cfg=section))
        lines = [line for line in notices(config) if "learning rate is 0 after step 5" in line]
        assert len(lines) == is_told


def test_fewer_rows_than_prompts_are_announced() -> None:
    config = configure(1e-4)
    assert describe_repeats(config, 32) is None
    assert describe_repeats(config, 11) == (
        "data: 11 to train on, but grpo.num_prompts_per_step is 32: each step takes some of them several times"
    )
