"""A task that whole runs with vLLM learn in seconds, and what they learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.runs.running import steps_of

JUDGE = """
from tandem.rollout.environments import Score

class Sevens:
    def score(self, problem, response):
        return Score(reward=response.count("7") / 8, correct=False)
"""
NUM_STEPS = 12
SEVENS: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 16,
        "num_generations_per_prompt": 32,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
        "seed": 3,
    },
    "policy": {
        "new_model": {"config": {"hidden_size": 64, "head_dim": 32}},
        "train_global_batch_size": 512,
        "train_micro_batch_size": 64,
        "logprob_batch_size": 512,
        "generation": {
            "max_new_tokens": 8,
            "transformers_cfg": {"num_slots": 512},
            "vllm_kwargs": {"kv_cache_memory_bytes": 2**26},
        },
        "optimizer": {"kwargs": {"lr": 3.0e-3}},
    },
    "data": {"num_train": 128},
    "env": {"mine": {"class": "judging.Sevens"}},
    "checkpointing": {"enabled": False},
    "cluster": {"deadlines": {"build_s": 240.0}},
}


def curve(folder: str | Path, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a metric of every step."""
    return np.array([step.metrics[metric] for step in steps_of(folder)])
