"""The example's loop takes the steps of a run that has the same samples: same losses, and same weights after each."""

from __future__ import annotations

import json

import pytest

from tests.harness.runs.running import coordinator, steps_of, write_config
from tests.harness.tinker.server import MODEL, ROOT, served, write_model

_CLOSE = 1e-5
_STEPS = 10
_ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.5}
_RUN = {
    "grpo": {"max_num_steps": _STEPS + 1, "val_period": 0, "val_at_start": False},
    # With it a token counts by its probability now over that of the engine, as in importance_sampling.
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {
        "model_name": str(MODEL),
        "new_model": None,
        "max_grad_norm": _ADAM["grad_clip_norm"],
        "optimizer": {
            "kwargs": {
                "lr": _ADAM["learning_rate"],
                "betas": [_ADAM["beta1"], _ADAM["beta2"]],
                "eps": _ADAM["eps"],
                "weight_decay": _ADAM["weight_decay"],
            }
        },
    },
    "cluster": {"trainers": 2},
    "checkpointing": {"enabled": False},
    "logger": {"log_dir": "alone"},
}


def test_the_example_takes_the_steps_of_a_run_with_the_same_samples() -> None:
    write_model()
    done = coordinator("up", write_config(_RUN))
    assert done.returncode == 0, done.stderr
    with served() as server:
        found = server.client("replayed", str(ROOT / "examples" / "tinker_loop.py"), "alone", json.dumps(_ADAM))
    # The log-probabilities of a step tell the weights that those before it have left.
    assert found["gap"] < _CLOSE
    of_run = [step.metrics for step in steps_of("alone")[:_STEPS]]
    assert len(found["steps"]) == _STEPS
    for name in ("loss", "grad_norm"):
        numbers = [step[name] for step in of_run]
        assert [step[name] for step in found["steps"]] == pytest.approx(numbers, rel=_CLOSE, abs=_CLOSE), name
        assert max(map(abs, numbers)) > 100 * _CLOSE, "they say something"
