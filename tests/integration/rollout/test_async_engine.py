"""Runs with ``async_engine``: several engines share the prompts, and one of them is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import HOLDS, Command, coordinator, process_of, steps_of, write_config

SLEEP_S = 100.0
SLOW = f"""{HOLDS}
from tandem.rollout.environments import Score, Turn

class Slow:
    '''Answers once; whoever leaves the first mark sleeps.'''

    def step(self, problem, conversation):
        try:
            Path(__file__).with_name("mark").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            time.sleep({SLEEP_S})
        wait_while_held()
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        reward = 0.1 * sum(character.isdigit() for character in said[-1])
        return Score(reward, correct=False) if len(said) == 2 else Turn([{{"role": "user", "content": "1+1"}}], reward)
"""
ASYNC: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "max_rollout_turns": 2},
    # Room for one group of four at a time: the others wait for an engine.
    "policy": {"generation": {"async_engine": True, "generation_timeout": 1.0, "transformers_cfg": {"num_slots": 4}}},
    "env": {"slow": {"class": "slow.Slow", "num_workers": 2, "timeout_s": 300.0}},
    "cluster": {"rollouts": 2},
}
SAME = ("loss", "grad_norm", "reward", "reward_std", "avg_turns_per_sample", "mean_generation_length")


def test_what_a_slow_engine_holds_is_made_by_another() -> None:
    Path("slow.py").write_text(SLOW)
    config = write_config(ASYNC)
    ended = coordinator("up", config, "logger.log_dir=slow")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "is lost" not in ended.stdout
    # Dealt like cards, by engines that wait for the environment; the mark is there.
    plain = ("policy.generation.async_engine=false", "policy.generation.generation_timeout=null")
    again = coordinator("up", config, *plain, "logger.log_dir=plain")
    assert again.returncode == 0, again.stdout + again.stderr
    slow, quick = steps_of("slow"), steps_of("plain")
    assert [step.step for step in slow] == [1, 2]
    assert slow[0].seconds["generation"] < SLEEP_S / 2
    for name in SAME:
        # Every sample is there once: the batch is whole, and what is learned from it is the same.
        assert slow[0].metrics[name] == pytest.approx(quick[0].metrics[name], abs=1e-5), name


def test_what_a_killed_engine_held_is_made_by_another() -> None:
    Path("slow.py").write_text(SLOW.replace(str(SLEEP_S), "0.0"))
    config = write_config(ASYNC | {"grpo": {"max_num_steps": 12, "max_rollout_turns": 2}})
    hold(at=97)  # twice a sample, in two steps and a validation, and some more
    with Command("coordinator", "up", config) as run:
        await_hold(run, "step 2/12")
        victim = process_of(run, "rollout")
        victim.kill()
        go_on()
        run.wait_for(r"rollout-\d is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == list(range(1, 13))
