"""Schedules of learning rates advance once a pass over a rollout batch, however many optimizer steps it has.

So do NeMo-RL v0.7's: the scheduler steps at the end of `train()` (`dtensor_policy_worker_v2.py`, `scheduler.step()`;
`megatron_policy_worker.py`, `scheduler.step(increment=gbs)`), which GRPO calls once a step, and PPO once each of its
`ppo_epochs` (`ppo.py`). The right values come from torch's own schedule, and from the cosine's formula.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.trainer.files import checkpoints
from tests.harness.trainers.megatron_harness import config_for, make_checkpoint
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    begin,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

SMALL = {"train_global_batch_size": 2, "train_micro_batch_size": 2}
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
COSINE = {"lr_warmup_iters": 2, "lr_warmup_init": 1e-4, "lr_decay_style": "cosine"}
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(4)]


def learning_rates(rank: int, config: Config, num_steps: int, folder: Path, first: int = 1) -> list[dict[str, float]]:
    """Train as the steps from `first` on, and save; go on from the checkpoint before it if there is one."""
    checkpoint = folder / f"step_{first - 1}" if first > 1 else None
    backend, _ = begin(rank, config, checkpoint)
    last = first + num_steps - 1
    metrics = [train_on(backend, BATCHES[number - 1], config).metrics for number in range(first, last + 1)]
    backend.save(folder / f"step_{last}").num_bytes.result()
    return metrics


def rates_of(config: Config, num_steps: int, folder: Path, first: int = 1, name: str = "learning_rate") -> list[float]:
    return [metrics[name] for metrics in run_ranks(1, learning_rates, config, num_steps, folder, first)[0]]


def linear(num_steps: int) -> list[float]:
    """Return torch's learning rates, stepped once a training step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=ADAMW["lr"])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, **LINEAR["kwargs"])  # type: ignore[arg-type]
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def cosine(num_steps: int, decay: int) -> list[float]:
    """Return Megatron-Core's learning rates: a linear warm-up, then a cosine down to 2e-4."""
    rates = [1e-4, 5.5e-4]
    for step in range(2, num_steps):
        part = min(1.0, (step - 2) / (decay - 2))
        rates.append(2e-4 + (1e-3 - 2e-4) * (math.cos(math.pi * part) + 1) / 2)
    return rates[:num_steps]


def grpo(folder: Path, **policy: Any) -> Config:
    return make_config(make_model(folder), scheduler=[LINEAR], **SMALL, **policy)


def megatron(folder: Path, **megatron_cfg: Any) -> Config:
    settings = {"scheduler": COSINE, "optimizer": {"min_lr": 2e-4}, **megatron_cfg}
    return config_for(make_checkpoint(folder, "qwen3"), 1, settings, **SMALL)


def forget_schedule(checkpoint: Path) -> None:
    """Make a checkpoint one of an earlier release, which counted only optimizer steps."""
    path = checkpoint / "optimizer" / "optimizer.json"
    counts = json.loads(path.read_text())
    assert counts["num_optimizer_steps"] == 8
    assert counts.pop("num_schedule_steps") == 2
    path.write_text(json.dumps(counts))


@pytest.mark.parametrize("is_old", [False, True])
def test_the_schedule_advances_once_a_step_and_goes_on_when_resumed(is_old: bool, tmp_path: Path) -> None:
    config = grpo(tmp_path / "model")
    assert config.num_optimizer_steps_per_pass == 4
    assert rates_of(config, 2, tmp_path) == pytest.approx(linear(4)[:2])
    if is_old:
        forget_schedule(tmp_path / "step_2")
    assert rates_of(config, 2, tmp_path, first=3) == pytest.approx(linear(4)[2:])
    assert checkpoints.read_counts(tmp_path / "step_4")[:2] == (16, 4)


@pytest.mark.parametrize("is_old", [False, True])
def test_so_does_that_of_megatron_core(is_old: bool, tmp_path: Path) -> None:
    config = megatron(tmp_path / "model", train_iters=6)
    assert rates_of(config, 2, tmp_path) == pytest.approx(cosine(4, 6)[:2])
    if is_old:
        forget_schedule(tmp_path / "step_2")
    assert rates_of(config, 2, tmp_path, first=3) == pytest.approx(cosine(4, 6)[2:])


def test_lr_decay_iters_comes_before_the_length_of_the_run(tmp_path: Path) -> None:
    config = megatron(tmp_path / "model", train_iters=100, scheduler=COSINE | {"lr_decay_iters": 3})
    assert rates_of(config, 4, tmp_path) == pytest.approx(cosine(4, 3))


def test_ppo_advances_it_once_each_epoch(tmp_path: Path) -> None:
    config = make_config(
        make_model(tmp_path / "model", "llama"),
        algorithm="ppo",
        ppo={"ppo_epochs": 2},
        value={"optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAMW}, "scheduler": [LINEAR]},
        scheduler=[LINEAR],
        **SMALL,
    )
    metrics = run_ranks(1, learning_rates, config, 2, tmp_path)[0]
    for name in ("learning_rate", "value/learning_rate"):
        assert [each[name] for each in metrics] == pytest.approx(linear(4)[1::2])
