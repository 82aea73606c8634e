"""A run of PPO: its value model is trained, saved and resumed beside the policy, and engines take the policy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.harness.runs.asynchronous_runs import ASYNCHRONOUS, as_ppo, check_steps
from tests.harness.runs.by_hand import MEGATRON_TP2, refits_of
from tests.harness.runs.running import (
    PPO,
    coordinator,
    copy_examples,
    deterministic,
    merged,
    steps_of,
    write_config,
)

CONFIG: dict[str, Any] = {**PPO, "value_loss_fn": {"cliprange": None}}
VALUE = ("value/model.safetensors", "value/config.json", "value_optimizer/optimizer.json", "policy/model.safetensors")


def ppo_config(over: dict[str, Any] | None = None, name: str = "config.yaml") -> Path:
    return write_config(merged(CONFIG, over or {}), name)


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor that training has left in a checkpoint, to the bit."""
    files = list(checkpoint.rglob("*.safetensors"))
    return {
        f"{path.relative_to(checkpoint)} {name}": tensor.numpy().tobytes()
        for path in files
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, the first of which trains the value model alone, in a folder of its own."""
    folder = tmp_path_factory.mktemp("ppo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = coordinator("up", ppo_config())
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    return folder


def test_a_run_trains_both_models(whole: Path) -> None:
    first, *others = steps_of(whole / "run")
    assert "loss" not in first.metrics
    for step in (first, *others):
        assert step.metrics["value/grad_norm"] > 0
        assert step.metrics["value/loss"] > 0
        assert step.metrics["num_valid_samples"] == 16
        assert step.seconds["value_training"] > 0
        assert step.seconds["value_inference"] > 0
        assert step.metrics["value/explained_variance"] <= 1
    assert all(step.metrics["grad_norm"] > 0 for step in others)
    checkpoints = whole / "run" / "checkpoints"
    for name in VALUE:
        assert (checkpoints / "step_4" / name).is_file()
    steps = json.loads((checkpoints / "step_4" / "value_optimizer" / "optimizer.json").read_text())
    assert (steps["num_optimizer_steps"], steps["num_schedule_steps"]) == (4 * 2 * 2, 4 * 2)
    assert len(steps["recent_grad_norms"]) == len(steps["recent_losses"]) == 4 * 2 * 2
    policy = json.loads((checkpoints / "step_4" / "optimizer" / "optimizer.json").read_text())
    assert (policy["num_optimizer_steps"], policy["num_schedule_steps"]) == (3 * 2 * 2, 3 * 2)


def test_a_resumed_run_equals_one_that_was_not_interrupted(whole: Path, tmp_path: Path) -> None:
    ended = coordinator("up", ppo_config({"ppo": {"max_num_steps": 2}}))
    assert ended.returncode == 0, ended.stderr
    ended = coordinator("up", ppo_config(), "--resume")
    assert ended.returncode == 0, ended.stderr
    found, expected = steps_of("run"), steps_of(whole / "run")
    assert [deterministic(step.metrics) for step in found] == [deterministic(step.metrics) for step in expected]
    tensors = tensors_of(Path("run/checkpoints/step_4"))
    assert tensors == tensors_of(whole / "run/checkpoints/step_4")
    assert {name.partition("/")[0] for name in tensors} == {"policy", "optimizer", "value", "value_optimizer"}


def test_asynchronous_ppo_learns_from_samples_of_older_weights() -> None:
    """A digit is worth something wherever it stands; six of them are the most that a response can have."""
    over = {"grpo": {"max_num_steps": 40, "val_period": 10}, "policy": {"optimizer": {"kwargs": {"lr": 5.0e-3}}}}
    ended = coordinator("up", write_config(as_ppo(merged(ASYNCHRONOUS, over), num_epochs=2)))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    check_steps("run", age=1, num_steps=40, val_period=10)
    steps = steps_of("run")
    first, last = ([step.metrics["reward"] for step in part] for part in (steps[:5], steps[-5:]))
    assert np.mean(last) > np.mean(first) + 0.08, (first, last)
    assert np.mean([step.metrics["avg_trajectory_age"] for step in steps]) > 0.5
    for step in steps:
        assert step.metrics["value/grad_norm"] > 0
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=0.2)
    assert steps[-1].metrics["value/loss"] < steps[0].metrics["value/loss"] / 10


def test_a_run_whose_models_divide_the_ranks_of_megatron_core_differently(tmp_path: Path) -> None:
    learns = {"optimizer": {"lr": 2.0e-3}}
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    config = ppo_config(merged(MEGATRON_TP2, {"value": {"optimizer": None, "megatron_cfg": learns | sizes}}))
    assert coordinator("up", config, "ppo.max_num_steps=2").returncode == 0
    ended = coordinator("up", config, "--resume")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    first, *others = steps_of("run")
    assert [step.step for step in (first, *others)] == [1, 2, 3, 4]
    assert all(step.metrics["value/grad_norm"] > 0 for step in (first, *others))
    assert all(step.metrics["grad_norm"] > 0 for step in others)
    assert all(refit.digest for refit in refits_of())


def test_the_example_runs() -> None:
    copy_examples()
    ended = coordinator("up", "examples/arithmetic_ppo.yaml", "ppo.max_num_steps=2", "ppo.num_prompts_per_step=64")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert [step.step for step in steps_of("results/arithmetic_ppo")] == [0, 1, 2]
    assert steps_of("results/arithmetic_ppo")[-1].metrics["num_valid_samples"] == 256
