"""The warm-up of a learning rate by one key, against Transformers' schedule of the same meaning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config, make_plain, notices
from tandem.trainer.backends.optimizers import make_scheduler

LR = 3e-4
MEGATRON = {"enabled": True, "optimizer": {"lr": LR, "min_lr": 0.0}}


def configure(algorithm: str = "grpo", section: dict[str, Any] | None = None, **policy: Any) -> Config:
    sizes = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": LR}}
    return build_config(
        {
            "algorithm": algorithm,
            algorithm: {"max_num_steps": 40} | sizes | (section or {}),
            "policy": {
                "model_name": "model",
                "train_global_batch_size": 16,
                "train_micro_batch_size": 4,
                "optimizer": optimizer,
            }
            | policy,
            **({"value": {"optimizer": optimizer, "warmup_steps": 2}} if algorithm == "ppo" else {}),
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


@pytest.mark.parametrize("warmup", [1, 4, 7, 0.1, 0.33])
def test_the_rates_are_those_of_transformers(warmup: float) -> None:
    ours, theirs = optimizer(), optimizer()
    scheduler = make_scheduler(configure(warmup_steps=warmup).policy.scheduler, ours)
    steps = transformers.TrainingArguments(output_dir=".", warmup_steps=warmup).get_warmup_steps(40)
    expected = transformers.get_constant_schedule_with_warmup(theirs, steps)
    for _ in range(20):
        assert scheduler.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=1e-9, abs=1e-15)
        for one in (ours, theirs, scheduler, expected):
            one.step()


def test_a_share_is_of_all_passes() -> None:
    def length(config: Config) -> int:
        (entry,) = config.policy.scheduler
        return int(entry.kwargs["total_iters"])

    assert length(configure(warmup_steps=0.1)) == 4
    assert length(configure("grpo", {"num_iterations": 3}, warmup_steps=0.1)) == 12
    ppo = configure("ppo", {"ppo_epochs": 2}, warmup_steps=0.1)
    assert length(ppo) == 8
    assert ppo.value is not None
    assert ppo.value.scheduler[0].kwargs["total_iters"] == 2


def test_megatron_core_has_a_key_for_it() -> None:
    config = configure(warmup_steps=5, megatron_cfg=MEGATRON)
    assert config.policy.megatron_cfg.scheduler.lr_warmup_iters == 5
    assert config.policy.scheduler == ()
    assert not [notice for notice in notices(config) if "scheduler" in notice]


def test_no_key_means_no_schedule() -> None:
    config = configure()
    assert config.policy.scheduler == ()
    assert config.policy.megatron_cfg.scheduler.lr_warmup_iters == 0
    assert build_config(make_plain(configure(warmup_steps=5))) == configure(warmup_steps=5)


CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"warmup_steps": 2.5}, "2.5 is neither a whole number of steps nor a share below 1"),
        (
            {"warmup_steps": 5, "scheduler": CONSTANT},
            "5, but policy.scheduler says another warm-up: set one of them",
        ),
        (
            {"warmup_steps": 5, "megatron_cfg": MEGATRON | {"scheduler": {"lr_warmup_iters": 3}}},
            "5, but policy.megatron_cfg.scheduler.lr_warmup_iters says another warm-up: set one of them",
        ),
    ],
)
def test_two_warmups_are_refused(policy: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(**policy)
    assert f"policy.warmup_steps: {expected}" in str(caught.value)


def test_a_share_needs_a_length() -> None:
    with pytest.raises(
        ConfigError, match=r"policy\.warmup_steps: 0\.1 is a share of rm\.max_num_steps, which is not set"
    ):
        build_config(
            {
                "algorithm": "rm",
                "policy": {"model_name": "model", "warmup_steps": 0.1},
                "data": {"dataset_name": "jsonl", "train_data_path": "pairs.jsonl"},
            }
        )
    assert math.isclose(configure(warmup_steps=0.1).policy.warmup_steps, 0.1)
