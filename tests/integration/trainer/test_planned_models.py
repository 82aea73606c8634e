"""Bytes of each model's weights on each rank: as `coordinator plan` says, and as the backend holds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.refit.forecast.beside import describe_beside_models
from tandem.refit.forecast.sides import model_shape, sides
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import CP2, OPTIMIZER, PP2, TP2, make_checkpoint
from tests.harness.trainers.trainer_harness import make_config, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

ALONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
EP2 = {"expert_model_parallel_size": 2}
VALUES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks, tensor-parallel values": (2, {}, TP2),
    "tensor-parallel policy, values in two stages": (2, TP2, {**ALONE, **PP2}),
    "policy in two stages, whole values": (2, PP2, ALONE),
    "context-parallel policy, values tensor-parallel in two stages": (4, CP2, {**ALONE, **TP2, **PP2}),
}
TEACHERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensor-parallel student, whole teacher": (2, TP2, ALONE),
    "student in two stages, a teacher with experts apart": (2, PP2, {**ALONE, **EP2}),
    "tensor-parallel student, a teacher in two stages": (2, TP2, {**ALONE, **PP2}),
}
"""Ranks, and keys of each model's ``megatron_cfg``."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, name) for name in ("llama", "qwen3 tied", "qwen3_moe")}


def held_bytes(rank: int, config: Config) -> dict[str, int]:
    """Return the bytes of each model's weights on this rank."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    backend = make_backend(config, checkpoint=None)
    held: Any = backend._held  # type: ignore[attr-defined]
    found = {
        f"{model}{number}": sum(tensor.numel() * tensor.element_size() for tensor in each.weights.parameters.values())
        for (model, number), each in held.items()
    }
    backend.close()
    return found


def planned_bytes(config: Config, rank: int) -> dict[str, int]:
    """Return what the plan says of them."""
    shape = model_shape(config)
    assert not isinstance(shape, str)
    of_models = {"policy": sides(config, shape)[0]} | {
        each.name: each.side for each in describe_beside_models(config, shape)
    }
    return {
        f"{name}0": sum(storage.num_bytes for storage in side.deployment.parameters(side.model, rank).storages)
        for name, side in of_models.items()
    }


def assert_as_planned(config: Config, num_ranks: int, beside: str) -> None:
    held = run_ranks(num_ranks, held_bytes, config)
    assert held == [planned_bytes(config, rank) for rank in range(num_ranks)]
    assert {*held[0]} == {"policy0", f"{beside}0"}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_model_is_divided_as_planned(case: str, folders: dict[str, Path]) -> None:
    num_ranks, policy, value = VALUES[case]
    megatron = {"enabled": True, "optimizer": OPTIMIZER}
    config = make_config(
        folders["qwen3 tied"],
        algorithm="ppo",
        loss={"reference_policy_kl_penalty": 0.0},
        value={"megatron_cfg": {**megatron, **value}},
        trainers=num_ranks,
        megatron_cfg={**megatron, **policy},
    )
    assert_as_planned(config, num_ranks, "value")


@pytest.mark.parametrize("case", TEACHERS)
def test_a_teacher_is_divided_as_planned(case: str, folders: dict[str, Path]) -> None:
    num_ranks, student, teacher = TEACHERS[case]
    config = make_config(
        folders["llama"],
        algorithm="distillation",
        teacher={"model_name": str(folders["qwen3_moe"]), "megatron_cfg": {"enabled": True, **teacher}},
        topk=3,
        trainers=num_ranks,
        megatron_cfg={"enabled": True, "optimizer": OPTIMIZER, **student},
    )
    assert_as_planned(config, num_ranks, "teacher")
