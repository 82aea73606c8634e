"""Vision models learn from what they see."""

from __future__ import annotations

from pathlib import Path

from tests.harness.runs.running import coordinator, steps_of
from tests.harness.runs.shapes import SHAPES, write_shapes


def test_sft_learns_answers_about_pictures_and_blank_ones_tell_less() -> None:
    """The same steps over the same questions, once with pictures that show nothing."""
    losses = {}
    for name, task in (("seen", {"size": 32}), ("blank", {"size": 32, "blank": True})):
        data = {**SHAPES["data"], "task_params": task, "num_train": 2048, "num_validation": 64}
        over = {
            "algorithm": "sft",
            "sft": {"max_num_steps": 150, "val_period": 150, "val_batches": 1, "val_global_batch_size": 64},
            "data": {**data, "solution_template": "{answer}"},
            "logger": {"log_dir": name},
            "checkpointing": {"enabled": False},
            "policy": {
                "train_global_batch_size": 32,
                "train_micro_batch_size": 32,
                "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2.0e-3}},
            },
        }
        ended = coordinator("up", write_shapes(over))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        losses[name] = steps_of(Path(name))[-1].metrics["val_loss"]
    assert losses["seen"] < 0.8 * losses["blank"]
