"""Whole runs in which the policy plays several roles: advantages by role, kills, the page's program and commands."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tandem.coordinator.algorithms.advantages import group_advantages
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.agent_run_harness import configure
from tests.harness.runs.pages_harness import ROOT
from tests.harness.runs.running import Command, coordinator, copy_examples, deterministic, steps_of, weights_of

DUEL = """
import json, sys, urllib.request

order = json.load(sys.stdin)

def ask(player, text):
    chat = [{"role": "user", "content": text}]
    body = json.dumps({"model": order["roles"][player], "messages": chat}).encode()
    url, headers = order["base_url"] + "/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def digits(text):
    return sum(map(str.isdigit, text))

first = ask("first", order["problem"]["question"])
second = ask("second", order["problem"]["question"])
again = ask("first", "1 + 1 = ")
print(json.dumps({"rewards": {"first": digits(first + again), "second": digits(second) - digits(first)}}))
"""
OVER: dict[str, Any] = {"grpo": {"max_num_steps": 4, "num_generations_per_prompt": 4}, "logger": {"samples": "all"}}
ROLES = {"roles": ["first", "second"], "max_concurrency": 1}


def test_roles_learn_from_their_own_rewards_and_a_killed_run_and_a_replay_have_the_same_bits() -> None:
    config = configure(OVER, source=DUEL, **ROLES)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    steps = steps_of("whole")
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        samples = read_step(Path("whole/samples"), step.step)
        rewards_GNR = np.array([sample.scored.role_rewards for sample in samples]).reshape(2, 4, 2)
        assert step.metrics["reward/first"] == np.mean(rewards_GNR[..., 0])
        for place, sample in enumerate(samples):
            assert sample.scored.roles == (1, 0, 0) or sample.scored.roles == (0, 1, 0), "three chats, three branches"
            role = sample.scored.roles[-1]
            of_role = group_advantages(rewards_GNR[place // 4, None, :, role], leave_one_out=True, normalize=True)[0]
            assert sample.advantage is not None
            assert abs(sample.advantage - of_role[place % 4]) < 1e-6
    assert any(step.metrics["grad_norm"] > 0 for step in steps)
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 3/4")
        run.signal(signal.SIGKILL)
        run.wait()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert weights_of("run/checkpoints/step_4") == weights_of("whole/checkpoints/step_4")
    for one, other in zip(steps_of("run"), steps, strict=True):
        assert deterministic(one.metrics) == deterministic(other.metrics)
    replayed = coordinator("replay", "whole")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.rstrip().endswith("weights are equal to the bit to those of step 4 of whole")


def test_the_program_of_the_page_plays_as_it_stands() -> None:
    page = (ROOT / "docs" / "self_play.md").read_text()
    settings, program = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "python"))
    assert settings is not None
    assert program is not None
    config = configure({"grpo": {"max_num_steps": 1, "num_generations_per_prompt": 2}}, source="")
    Path("duel.py").write_text(program[1])
    whole, written = yaml.safe_load(config.read_text()), yaml.safe_load(settings[1])
    written["env"]["duel"]["timeout_s"] = 240
    config.write_text(yaml.safe_dump({**whole, "data": {**whole["data"], **written["data"]}, "env": written["env"]}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = steps_of()
    assert step.metrics["reward/first"] + step.metrics["reward/second"] == 1
    assert step.metrics["avg_branches_per_sample"] == 2


def test_the_commands_of_the_page_run() -> None:
    copy_examples()
    page = (ROOT / "docs" / "self_play.md").read_text()
    up, report = re.findall(r"^coordinator (\w+) (\S+)$", page, re.MULTILINE)
    small = ["grpo.num_prompts_per_step=1", "grpo.max_num_steps=13", "grpo.max_val_samples=2", "grpo.val_period=6"]
    small += ["policy.train_global_batch_size=16", "policy.train_micro_batch_size=16", "checkpointing.save_period=2"]
    agent = ["python", "examples/agents/nim.py", "results/nim_sft/checkpoints/latest/policy", "results/nim/checkpoints"]
    small += [f"env.nim.command=[{','.join(agent)},'2']"]
    ended = coordinator(*up, *small)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    metrics = steps_of("results/nim")[-1].metrics
    assert "environment_failures" not in metrics
    assert metrics["avg_branches_per_sample"] > 1
    assert coordinator(*report).returncode == 0
