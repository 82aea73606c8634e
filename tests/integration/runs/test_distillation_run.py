"""Runs of distillation: engines roll the policy out, or a data set is read, and a frozen teacher says its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness.runs.running import (
    TINY,
    coordinator,
    copy_examples,
    deterministic,
    steps_of,
    write_config,
)
from tests.harness.trainers.trainer_harness import make_model

CHARACTERS = TINY["policy"]["new_model"]["characters"]
TEACHER = {"model_name": "teacher", "logprob_batch_size": 4}
DISTILLATION: dict[str, Any] = {
    "algorithm": "distillation",
    "distillation": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 2,
        "max_num_steps": 4,
        "topk_logits_k": 5,
        "val_period": 2,
        "max_val_samples": 8,
        "seed": 7,
    },
    "loss_fn": {"kl_type": "reverse"},
    "teacher": TEACHER,
    "env": {"digits": {"class": "digits.Digits"}},
}
OFF_POLICY: dict[str, Any] = {
    "algorithm": "off_policy_distillation",
    "off_policy_distillation": {"max_num_steps": 4, "topk_logits_k": 5, "val_period": 2, "val_batches": 1},
    "loss_fn": {"kl_type": "forward"},
    "teacher": TEACHER,
    "policy": {"optimizer": {"kwargs": {"lr": 5.0e-3}}},
}


@pytest.fixture(autouse=True)
def teacher() -> None:
    make_model(Path("teacher"), "llama", seed=3, characters=CHARACTERS, hidden_size=48, num_hidden_layers=3)


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor that training has left in a checkpoint, to the bit."""
    return {
        f"{path.relative_to(checkpoint)} {name}": tensor.numpy().tobytes()
        for path in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def up(config: dict[str, Any], *words: str) -> None:
    ended = coordinator("up", write_config(config), *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr


def test_a_policy_learns_from_its_own_samples_and_goes_on_to_the_bit() -> None:
    up(DISTILLATION, "logger.log_dir=whole")
    for step in steps_of("whole"):
        assert step.metrics["num_valid_samples"] == 16
        assert step.metrics["grad_norm"] > 0
        assert step.metrics["loss"] > 0
        assert 0 < step.metrics["topk_probability"] < 1
        assert step.seconds["teacher_logprob_inference"] > 0
        assert "reward" in step.metrics
    assert "val_accuracy" in steps_of("whole")[-1].metrics

    up(DISTILLATION, "distillation.max_num_steps=2")
    up(DISTILLATION, "--resume")
    found, expected = steps_of("run"), steps_of("whole")
    assert [deterministic(step.metrics) for step in found] == [deterministic(step.metrics) for step in expected]
    tensors = tensors_of(Path("run/checkpoints/step_4"))
    assert tensors == tensors_of(Path("whole/checkpoints/step_4"))
    assert {name.partition("/")[0] for name in tensors} == {"policy", "optimizer"}, "the teacher is not saved"


def test_a_policy_learns_from_recorded_text() -> None:
    up(OFF_POLICY, "cluster.trainers=2")
    first, *_, last = steps_of("run")
    assert last.metrics["val_loss"] < first.metrics["val_loss"]
    assert last.seconds["teacher_logprob_inference"] > 0


def test_a_teacher_with_other_tokens_or_none_is_refused_before_anything_starts() -> None:
    make_model(Path("stranger"), "llama", characters=CHARACTERS.replace("+", "*"))
    for name, why in (
        ("stranger", "teacher.model_name: token '*' is none in "),
        ("nowhere", "teacher.model_name: 'nowhere' does not exist"),
    ):
        ended = coordinator("up", write_config(DISTILLATION), f"teacher.model_name={name}")
        assert ended.returncode == 1
        assert why in ended.stderr
        assert not Path("run").exists()


@pytest.mark.parametrize("name", ["distillation", "opd"])
def test_the_examples_run(name: str) -> None:
    copy_examples()
    section = {"distillation": "distillation", "opd": "grpo"}[name]
    small = [f"{section}.max_num_steps=2", f"{section}.num_prompts_per_step=64"]
    batches = [f"policy.{key}=64" for key in ("train_global_batch_size", "train_micro_batch_size")]
    ended = coordinator("up", f"examples/arithmetic_{name}.yaml", *small, *batches)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert "making results/arithmetic_sft/checkpoints/" in ended.stdout
    assert [step.step for step in steps_of(f"results/arithmetic_{name}")] == [0, 1, 2]


def test_the_example_over_recorded_text_runs() -> None:
    copy_examples()
    ended = coordinator(
        "up", "examples/arithmetic_off_policy_distillation.yaml", "off_policy_distillation.max_num_steps=2"
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert [step.step for step in steps_of("results/arithmetic_off_policy_distillation")] == [0, 1, 2]


def test_two_teachers_teach_raw_text_in_nemo_rls_form_and_go_on_to_the_bit() -> None:
    make_model(Path("other"), "llama", seed=4, characters=CHARACTERS)
    rows = [f"{number} + {number + 1} = {2 * number + 1}" for number in range(60)]
    Path("text.txt").write_text("".join(f"{row}\n" for row in rows))
    config: dict[str, Any] = {
        "algorithm": "distillation",
        "distillation": {"num_prompts_per_step": 8, "max_num_steps": 4, "max_num_epochs": 9, "val_period": 2},
        "teacher": None,
        "teachers": [
            {**TEACHER, "projection_matrix_path": None, "weight": 0.5},
            {"model_name": "other", "logprob_batch_size": 4},
        ],
        "loss_fn": {
            "vocab_topk": 5,
            "reverse_kl": False,
            "ce_loss_scale": 0.1,
            "dynamic_loss_scaling": True,
            "kd_loss_mode": "sum",
            "sum_weights_metric": "ce",
        },
        "policy": {"optimizer": {"kwargs": {"lr": 5.0e-3}}, "train_global_batch_size": 8},
        "data": {
            "dataset_name": None,
            "train": {
                "dataset_name": "arrow_text",
                "data_files": "*.txt",
                "text_key": "text",
                "processor": "kd_data_processor",
                "split_validation_size": 4,
            },
        },
    }
    up(config, "logger.log_dir=whole")
    steps = [step.metrics for step in steps_of("whole") if step.step]
    assert [step["weight_t0"] + step["weight_t1"] for step in steps] == pytest.approx([1.0] * 4)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["val_loss"] > 0
    up(config, "distillation.max_num_steps=2")
    up(config, "--resume")
    assert [deterministic(step.metrics) for step in steps_of("run") if step.step] == [*map(deterministic, steps)]
