"""A small run over pictures of shapes, by a tiny vision model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.runs.running import merged, write_config
from tests.harness.vision_models import write_vision_model

SHAPES: dict[str, Any] = {
    "grpo": {"max_num_steps": 4, "max_val_samples": 8},
    "policy": {"model_name": "sees", "new_model": None, "max_total_sequence_length": 64},
    "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 64, "num_validation": 16},
    "env": {"digits": {"class": "digits.Digits", "timeout_s": 300.0}},
}


def write_shapes(over: dict[str, Any] | None = None) -> Path:
    """Write the configuration, and the model that it begins with, to the working directory."""
    if not Path("sees").exists():
        write_vision_model("qwen2_5_vl", Path("sees"))
    return write_config(merged(SHAPES, over or {}))
