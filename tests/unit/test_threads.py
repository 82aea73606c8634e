"""Processes that work at the same time share the cores."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tandem.config import build_config
from tandem.config.threads import count_threads


@pytest.mark.parametrize(
    ("cluster", "kind", "expected"),
    [
        ({}, "trainers", 8),
        ({"rollouts": 2}, "rollouts", 4),
        ({"rollouts": 2}, "trainers", 8),
        ({"trainers": 3}, "trainers", 2),
        ({"rollouts": 16}, "rollouts", 1),
        ({"rollouts": 2, "threads_per_process": 5}, "rollouts", 5),
        ({"rollouts": 4, "launch": "none"}, "rollouts", 8),
        ({"rollouts": 4, "launch": {"trainers": 0, "rollouts": 2, "refit": True}}, "rollouts", 4),
        ({"rollouts": 4, "launch": {"trainers": 0, "rollouts": 2, "refit": True}}, "trainers", 8),
    ],
)
def test_cores_are_shared(cluster: dict[str, Any], kind: Literal["trainers", "rollouts"], expected: int) -> None:
    assert count_threads(build_config(settings(cluster)), kind, 8) == expected


def test_workers_of_an_engine_share_what_the_engine_has() -> None:
    generation = {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 2}}
    config = build_config(settings({"rollouts": 2}, generation))
    assert [count_threads(config, kind, 8) for kind in ("rollouts", "trainers")] == [2, 8]


def settings(cluster: dict[str, Any], generation: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "grpo": {"num_prompts_per_step": 6, "num_generations_per_prompt": 2},
        "policy": {
            "model_name": "model",
            "train_global_batch_size": 12,
            "train_micro_batch_size": 2,
            "generation": generation or {},
        },
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        "cluster": cluster,
    }
