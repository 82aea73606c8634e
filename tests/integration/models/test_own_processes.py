"""Models with processes of their own: a run learns what it learns where they live in the policy's, whatever is lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness import leaks
from tests.harness.runs.by_hand import assert_same_metrics
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    PPO,
    TINY,
    Command,
    all_gone,
    coordinator,
    merged,
    process_of,
    processes_of,
    steps_of,
    write_config,
)
from tests.harness.trainers.trainer_harness import make_model

NUM_STEPS = 4
GRPO: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS},
    "loss_fn": {"reference_policy_kl_penalty": 0.1},
    "checkpointing": {"save_period": 2},
}
DISTILLATION: dict[str, Any] = {
    "algorithm": "distillation",
    "distillation": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 2,
        "max_num_steps": NUM_STEPS,
        "topk_logits_k": 5,
        "val_period": 0,
        "seed": 7,
    },
    "loss_fn": {"kl_type": "reverse"},
    "teacher": {"model_name": "teacher", "logprob_batch_size": 4},
    "checkpointing": {"metric_name": "loss"},
}
OFF_POLICY: dict[str, Any] = {
    "algorithm": "off_policy_distillation",
    "off_policy_distillation": {"max_num_steps": NUM_STEPS, "topk_logits_k": 5, "val_period": 2, "val_batches": 1},
    "loss_fn": {"kl_type": "forward"},
    "teacher": {"model_name": "teacher", "logprob_batch_size": 4},
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "grpo": (GRPO, {"reference": 1}),
    "ppo": (PPO, {"reference": 1, "value": 1}),
    "distillation": (DISTILLATION, {"teacher": 1}),
    "off-policy distillation": (OFF_POLICY, {"teacher": 1}),
}
"""Configurations, and the models that get a process."""


def tensors_of(run: str) -> dict[str, bytes]:
    """Every tensor that training has left in the last checkpoint, to the bit."""
    checkpoint = Path(run) / "checkpoints" / "latest"
    return {
        f"{path.relative_to(checkpoint)} {name}": tensor.numpy().tobytes()
        for path in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_equal_runs(run: str, expected: str) -> None:
    """Compare all steps and all that was trained, to the bit."""
    for ours, theirs in zip(steps_of(run), steps_of(expected), strict=True):
        assert_same_metrics(ours.metrics, theirs.metrics, step=ours.step)
    assert tensors_of(run) == tensors_of(expected)


def up(config: dict[str, Any], *words: str) -> None:
    ended = coordinator("up", write_config(config), *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_the_one_whose_models_live_together_also_when_it_is_killed_and_resumed(name: str) -> None:
    config, processes_of_models = RUNS[name]
    characters = TINY["policy"]["new_model"]["characters"]
    make_model(Path("teacher"), "llama", seed=3, characters=characters, hidden_size=48, num_hidden_layers=3)
    apart = merged(config, {"cluster": {"processes_of": processes_of_models}})
    up(config, "logger.log_dir=together")
    up(apart, "logger.log_dir=apart")
    assert_equal_runs("apart", "together")

    before = leaks.segments()
    with Command("coordinator", "up", write_config(apart)) as run:
        run.wait_for(f"step 3/{NUM_STEPS}")
        children = run.children()
        run.signal(signal.SIGKILL)
        run.wait()
    assert all_gone(children, 30.0) == []
    assert leaks.segments_left(before) == set()
    up(apart, "--resume")
    assert_equal_runs("run", "together")


def test_who_holds_a_value_model_is_lost_and_the_run_goes_on_as_if_nothing_had_happened() -> None:
    apart = {"ppo": {"max_num_steps": 24}, "cluster": {"processes_of": {"value": 1}}}
    before, config = leaks.segments(), merged(PPO, apart)
    up(config, "logger.log_dir=undisturbed")
    hold(at=3 * 16 + 8 + 1)
    with Command("coordinator", "up", write_config(config)) as run:
        await_hold(run, "step 3/24")
        assert len(processes_of(run, "trainer")) == 2
        process_of(run, "trainer", 1).send_signal(signal.SIGKILL)
        go_on()
        run.wait_for("trainer-1 is lost: killed by SIGKILL.*all trainers are started again")
        children = run.children()
        assert run.wait() == 0, run.output()
        assert all_gone(children, 30.0) == []
    assert leaks.segments_left(before) == set()
    assert_equal_runs("run", "undisturbed")


@pytest.mark.parametrize(
    ("config", "words", "error"),
    [
        (GRPO, ["cluster.processes_of.value=1"], "cluster.processes_of.value: 1, but GRPO holds no value"),
        (
            GRPO,
            ["cluster.processes_of.reference=1", "loss_fn.reference_policy_kl_penalty=0"],
            "cluster.processes_of.reference: 1, but GRPO holds no reference: loss_fn.reference_policy_kl_penalty is 0",
        ),
        (GRPO, ["cluster.processes_of.critic=1"], "cluster.processes_of.critic: unknown key"),
    ],
)
def test_processes_that_no_model_is_for_are_refused(config: dict[str, Any], words: list[str], error: str) -> None:
    ended = coordinator("check", write_config(config), *words)
    assert ended.returncode == 2
    assert error in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
