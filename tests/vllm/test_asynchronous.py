"""Asynchronous runs with vLLM: engines generate while trainers train, and take weights between two tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.by_hand import refits_of
from tests.harness.runs.running import Command, coordinator, merged, process_of, steps_of, write_config
from tests.vllm.run_harness import JUDGE, NUM_STEPS, SEVENS, curve

AGE = 1
ASYNCHRONOUS: dict[str, Any] = merged(
    SEVENS,
    {
        # Longer responses of fewer samples: generation takes longer than training, so that weights come in its midst.
        "grpo": {
            "num_generations_per_prompt": 8,
            "val_period": 4,
            "async_grpo": {
                "enabled": True,
                "max_trajectory_age_steps": AGE,
                "in_flight_weight_updates": True,
            },
        },
        "loss_fn": {"use_importance_sampling_correction": True},
        "policy": {
            "max_total_sequence_length": 64,
            "train_global_batch_size": 128,
            "generation": {"backend": "vllm", "max_new_tokens": 48, "colocated": {"enabled": False}},
        },
        "refit": {"verify": "full"},
    },
)


def assert_asynchronous(run: str | Path, num_steps: int) -> None:
    """Assert that every step is done, with samples of older weights within the bound, all of them proven."""
    steps = [step for step in steps_of(run) if step.step]
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    assert curve(run, "max_trajectory_age").max() == AGE
    shares = [[step.metrics[f"token_share/age_{age}"] for age in range(AGE + 1)] for step in steps]
    assert [sum(share) for share in shares] == pytest.approx([1.0] * num_steps)
    assert {refit.version for refit in refits_of(run)} == set(range(num_steps + 1))
    # Tokens of older weights are less or more likely by now, but not those of another model.
    assert curve(run, "token_mult_prob_error").max() < 1.5


@pytest.mark.parametrize("is_async_engine", [False, True], ids=["waiting", "async_engine"])
def test_it_learns_from_samples_of_several_versions(is_async_engine: bool) -> None:
    Path("judging.py").write_text(JUDGE)
    engine = f"policy.generation.vllm_cfg.async_engine={str(is_async_engine).lower()}"
    recompute = f"grpo.async_grpo.recompute_kv_cache_after_weight_updates={str(is_async_engine).lower()}"
    ended = coordinator("up", write_config(ASYNCHRONOUS), engine, recompute, timeout_s=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_asynchronous("run", NUM_STEPS)
    rewards = curve("run", "reward")
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.2
    assert curve("run", "token_share/age_0")[1:].max() > 0, "weights came while samples were being made"


def test_kill_9_of_an_engine_is_made_good() -> None:
    Path("judging.py").write_text(JUDGE)
    arguments = (write_config(ASYNCHRONOUS), "grpo.max_num_steps=6", "cluster.rollouts=2")
    with Command("coordinator", "up", *arguments) as run:
        run.wait_for(r"step 2/6")
        process_of(run, "rollout", 1).kill()
        run.wait_for(r"rollout-1 is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    assert_asynchronous("run", 6)
