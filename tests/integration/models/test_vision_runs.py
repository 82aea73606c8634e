"""Whole runs of a vision model, with its layers divided over trainers: engines get all of it, tower included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.running import coordinator, steps_of, write_config
from tests.harness.trainers.megatron_harness import OPTIMIZER, PP2, SP, TP2
from tests.harness.trainers.trainer_harness import ADAMW
from tests.harness.vision_models import write_vision_model

LORA = {"enabled": True, "dim": 4, "alpha": 8, "match_all_linear": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("qwen2_5_vl", {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "Megatron-Core, TP2 with sequence parallelism": (
        "qwen2_5_vl",
        {"megatron_cfg": {"enabled": True, **TP2, **SP, "optimizer": OPTIMIZER}},
    ),
    "TP2 with adapters": ("smolvlm", {"dtensor_cfg": {"tensor_parallel_size": 2, "lora_cfg": LORA}}),
    "Megatron-Core, TP2 with adapters": (
        "qwen3_vl",
        {"megatron_cfg": {"enabled": True, **TP2, "optimizer": OPTIMIZER, "peft": {"enabled": True, "dim": 4}}},
    ),
    "Megatron-Core, PP2": ("smolvlm", {"megatron_cfg": {"enabled": True, **PP2, "optimizer": OPTIMIZER}}),
}


@pytest.mark.parametrize(("family", "policy"), CASES.values(), ids=CASES)
def test_an_engine_has_the_weights_of_trainers_that_share_them(
    family: str, policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    write_vision_model(family, Path("sees"), num_key_value_heads=2, num_hidden_layers=4)
    config = {
        "grpo": {"max_num_steps": 3, "max_val_samples": 8},
        "policy": {
            "model_name": "sees",
            "new_model": None,
            "max_total_sequence_length": 512,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAMW},
            **policy,
        },
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 64, "num_validation": 16},
        "env": {"digits": {"class": "digits.Digits"}},
    }
    ended = coordinator("up", write_config(config), "cluster.trainers=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of(Path("run"))
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        # The engine's own log-probabilities are the trainers'.
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["grad_norm"] > 0.0
    with read_journal(Path("run")) as journal:
        refits = list(journal.refits())
    assert {refit.version for refit in refits} >= {1, 2, 3}
    assert all(refit.verify == "full" and refit.digest for refit in refits)
