"""A run that is never validated needs no other setting than that."""

from __future__ import annotations

import pytest

from tandem.config import build_config, notices

SETTINGS = {
    "policy": {"model_name": "model", "max_total_sequence_length": 64},
    "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
}


def test_the_metric_of_checkpoints_is_then_one_of_training() -> None:
    config = build_config({**SETTINGS, "grpo": {"val_period": 0}})
    assert config.checkpointing.metric_name == "reward"
    assert config.checkpointing.higher_is_better
    sft = build_config({**SETTINGS, "sft": {"val_period": 0, "val_at_start": False}})
    assert (sft.checkpointing.metric_name, sft.checkpointing.higher_is_better) == ("loss", False)


@pytest.mark.parametrize("otherwise", [{"val_at_start": True}, {"val_at_end": True}, {"max_num_steps": 0}, {}])
def test_it_is_one_of_validation_where_a_step_is_validated(otherwise: dict[str, object]) -> None:
    settings = {"val_period": 0, **otherwise} if otherwise else {}
    assert build_config({**SETTINGS, "grpo": settings}).checkpointing.metric_name == "val_reward"


@pytest.mark.parametrize("checkpointing", [{}, {"keep_top_k": None}, {"enabled": False}])
def test_one_that_is_set_and_never_measured_is_noticed(checkpointing: dict[str, object]) -> None:
    """NeMo-RL v0.7 has files with such a metric, and keeps the newest checkpoints."""
    settings = {**SETTINGS, "grpo": {"val_period": 0}}
    config = build_config({**settings, "checkpointing": {"metric_name": "val_accuracy", **checkpointing}})
    line = "checkpointing.metric_name: val_accuracy is never measured (grpo.val_period is 0)"
    expected = [] if checkpointing else [f"{line}: the newest checkpoints are kept"]
    assert [each for each in notices(config) if each.startswith("checkpointing.metric_name")] == expected
