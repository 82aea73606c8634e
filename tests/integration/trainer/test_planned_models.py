"""Bytes of each model's weights on each rank: as `coordinator plan` says, and as the backend holds them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.coordinator.cli import main
from tandem.coordinator.forecast.memory import describe_beside_models
from tandem.coordinator.forecast.sides import describe_cache, model_shape, sides
from tandem.rollout.engines.attention import AttentionStep, SlotPrompt
from tandem.rollout.engines.own_caches import BatchCache
from tandem.rollout.engines.skeleton import load_skeleton
from tandem.rollout.engines.states import make_cache
from tandem.trainer.backends import make_backend
from tests.harness.model_types.measuring import make_tiny
from tests.harness.model_types.shrinking import shrink
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


TYPES = {
    "llama": "slots",
    "deepseek_v3": "slots",
    "gemma2": "slots",
    "qwen3_5_moe_text": "slots",
    "nemotron_h": "slots",
    "lfm2": "slots",
    "llama4_text": "slots",
    "deepseek_v32": "its own cache",
    "falcon": "its own cache",
}
"""Types with a table here and without, and what the embedded engine keeps their sequences in."""


@pytest.mark.parametrize("model_type", TYPES)
def test_any_type_is_planned_as_transformers_builds_it(model_type: str, tmp_path: Path) -> None:
    folder, num_slots, length = make_tiny(model_type, tmp_path / "model"), 3, 48
    config = make_config(folder, max_total_sequence_length=length)
    shape, cache = model_shape(config), describe_cache(config)
    assert not isinstance(shape, str)
    assert cache is not None
    built = load_skeleton(folder, length, torch.float32, with_weights=True)
    counted = sum(parameter.numel() for parameter in built.parameters())
    counted += sum(buffer.numel() for name, buffer in built.named_buffers() if name in built.state_dict())
    assert shape.num_parameters == counted
    slots = make_cache(built, num_slots, length)
    no_rows, prompt = torch.zeros(0, dtype=torch.int64), SlotPrompt(0, length, 0, num_slots)
    step = AttentionStep(slots, 0, no_rows, no_rows, 0, torch.zeros(0, 1, 1, 0), (prompt,))
    inputs = {"input_ids": torch.zeros((1, length), dtype=torch.int64), "position_ids": torch.arange(length)[None]}
    with torch.inference_mode():
        built(**inputs, use_cache=False, slot_step=step, told_windows={})
    if TYPES[model_type] == "slots":
        assert type(slots) is not BatchCache
        assert num_slots * cache.num_bytes == slots.num_bytes
    else:  # made as `generate` makes it, and no room is set aside
        assert type(slots) is BatchCache
        assert num_slots * cache.num_bytes == pytest.approx(slots.num_bytes, rel=0.01)


def test_memory_of_layers_with_windows_and_states_is_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file = tmp_path / "config.yaml"
    new_model = {"characters": "0123456789+= ", "config": shrink("qwen3_5_text").to_dict()}
    policy = {"model_name": "new", "new_model": new_model, "max_total_sequence_length": 64}
    policy["generation"] = {"backend": "vllm", "max_new_tokens": 32, "vllm_cfg": {"tensor_parallel_size": 2}}
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    config_file.write_text(
        json.dumps({"algorithm": "grpo", "policy": policy, "data": data, "cluster": {"gpus_per_node": 2}})
    )
    assert main(["plan", str(config_file)]) == 0
    output = capsys.readouterr().out
    assert re.search(
        r"an engine keeps [\d.]+ MB of 64 tokens, .* linear_attention layers, .* full_attention layers", output
    )
    assert "vLLM's loader says where the weights of this family lie" in output
    assert "received by an engine rank" in output
