"""A model most of whose layers carry a state: its run with packed rows survives kills with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import Command, process_of, steps_of, write_config

STEPS = 20
MODEL = NewModel(
    characters="0123456789+-= ",
    config={
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of a run with packed rows on two ranks."""
    folder = tmp_path_factory.mktemp("model")
    write_new_model(folder, MODEL)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return {
        "grpo": {"max_num_steps": STEPS, "val_period": 0},
        "policy": {"model_name": str(folder), "new_model": None, "sequence_packing": {"enabled": True}},
        "cluster": {"trainers": 2},
    }


@pytest.fixture(scope="module")
def undisturbed(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), settings)


def test_training_and_generation_agree_on_a_model_with_states(undisturbed: Path) -> None:
    for step in steps_of(undisturbed):
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("kind", ["rollout", "trainer"])
def test_kill_9_changes_nothing_but_the_time_it_takes(kind: str, settings: dict[str, Any], undisturbed: Path) -> None:
    hold(at=49)
    with Command("coordinator", "up", write_config(settings | {"checkpointing": {"save_period": 2}})) as run:
        await_hold(run, f"step 3/{STEPS}")
        process_of(run, kind).kill()
        go_on()
        assert run.wait() == 0, run.output()
    assert "killed by SIGKILL" in run.output()
    assert_same_results("run", undisturbed)
