"""The coordinator knows which trainers see the same sequences: what it computes is what the backends themselves say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.config import Config
from tandem.samples.batch_sharding import data_parallel_ranks
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import OPTIMIZER, make_checkpoint
from tests.harness.trainers.trainer_harness import make_config, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2": (2, {}),
    "FSDP2 + TP2": (4, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "FSDP2 + CP2": (4, {"dtensor_cfg": {"context_parallel_size": 2}}),
    "CP2 + TP2": (4, {"dtensor_cfg": {"context_parallel_size": 2, "tensor_parallel_size": 2}}),
    "Megatron, DP2 + TP2": (4, {"megatron_cfg": {"tensor_model_parallel_size": 2}}),
    "Megatron, DP2 + PP2": (4, {"megatron_cfg": {"pipeline_model_parallel_size": 2}}),
    "Megatron, DP2 + CP2": (4, {"megatron_cfg": {"context_parallel_size": 2}}),
    "Megatron, DP2 + EP2": (2, {"megatron_cfg": {"expert_model_parallel_size": 2}}),
    "Megatron, TP2 + PP2": (
        4,
        {"megatron_cfg": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}},
    ),
}


def places(rank: int, config: Config) -> tuple[int, int]:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    backend = make_backend(config, checkpoint=None)
    return backend.data_parallel_rank, backend.data_parallel_size


@pytest.mark.parametrize(("num_ranks", "policy"), CASES.values(), ids=CASES)
def test_data_parallel_ranks_are_those_of_the_backend(num_ranks: int, policy: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    if "megatron_cfg" in policy:
        policy = {"megatron_cfg": {"enabled": True, "optimizer": OPTIMIZER, **policy["megatron_cfg"]}}
    config = make_config(model, trainers=num_ranks, **policy)
    found = run_ranks(num_ranks, places, config)
    assert [rank for rank, _ in found] == data_parallel_ranks(config)
    assert {size for _, size in found} == {config.data_parallel_size}
