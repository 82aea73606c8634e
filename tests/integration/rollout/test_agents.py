"""Whole runs whose episodes the user's own programs play."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers
import yaml

from tandem.samples.recorded_shards import read_step
from tests.harness.runs.agent_run_harness import AGENT, LR, branches_of, configure, model_after
from tests.harness.runs.pages_harness import ROOT
from tests.harness.runs.running import (
    Command,
    all_gone,
    coordinator,
    copy_examples,
    deterministic,
    process_of,
    steps_of,
    wait_until,
)
from tests.harness.trainers.reference import logprobs_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a run of three steps."""
    folder = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = coordinator("up", configure())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture
def run(recorded: Path) -> Path:
    """Copy that folder to the working directory."""
    shutil.copytree(recorded, ".", dirs_exist_ok=True, symlinks=True)
    return Path("run")


def test_tokens_of_every_branch_are_those_of_the_version_that_they_say(run: Path) -> None:
    for step in (2, 3):  # the weights that it begins with are in no checkpoint
        model = model_after(step - 1)
        samples = read_step(run / "samples", step)
        assert len(samples) == 8
        for sample in samples:
            assert len(sample.scored.branches) == 2
            assert (sample.scored.oldest_version, sample.scored.newest_version) == (step - 1, step - 1)
            assert sample.scored.num_turns == 3
            for token_ids, mask, logprobs in branches_of(sample):
                with torch.no_grad():
                    torch.testing.assert_close(logprobs[mask], logprobs_of(model, token_ids)[mask], atol=2e-5, rtol=0)
    metrics = [step.metrics for step in steps_of()]
    assert {step["avg_branches_per_sample"] for step in metrics} == {2.0}
    assert {step["avg_turns_per_sample"] for step in metrics} == {3.0}


def test_the_gradient_is_that_of_all_tokens_each_once_with_the_advantage_of_their_episode(run: Path) -> None:
    """A whole second step, made again by a plain loop: two optimizer steps of four episodes each."""
    samples = read_step(run / "samples", 2)
    rewards = np.array([sample.scored.reward for sample in samples]).reshape(2, 4)
    others = np.array([[np.delete(group, place) for place in range(4)] for group in rewards])
    spread = others.std(axis=-1)
    expected = (rewards - others.mean(axis=-1)) / np.where(np.ptp(others, axis=-1) > 0, spread + 1e-6, 1.0)
    advantages = [sample.advantage for sample in samples]
    np.testing.assert_allclose(advantages, expected.reshape(-1), atol=1e-5)
    model = model_after(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with torch.no_grad():
        before = [[logprobs_of(model, tokens) for tokens, *_ in branches_of(sample)] for sample in samples]
    for first in (0, 4):
        total, count = torch.zeros(()), 0
        for row in range(first, first + 4):
            for (token_ids, mask, _), old in zip(branches_of(samples[row]), before[row], strict=True):
                ratio = (logprobs_of(model, token_ids) - old).exp()[mask]
                advantage = float(advantages[row] or 0.0)
                clipped = ratio.clamp(0.8, 1.2)
                total = total - torch.minimum(ratio * advantage, clipped * advantage).sum()
                count += int(mask.sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    found = model_after(2).state_dict()
    moved = max(float((found[name] - weight).abs().max()) for name, weight in model_after(1).state_dict().items())
    assert moved > 1e-3
    torch.testing.assert_close(found, model.state_dict(), atol=2e-6, rtol=0)


def test_a_replay_makes_the_same_weights_of_the_recorded_branches(run: Path) -> None:
    ended = coordinator("replay", run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.rstrip().endswith("weights are equal to the bit to those of step 3 of run")
    for mine, theirs in zip(steps_of("run-replay"), steps_of(run), strict=True):
        metrics = deterministic(mine.metrics)
        assert metrics == {name: theirs.metrics[name] for name in metrics}


def test_two_trainers_and_packed_rows_make_the_same_steps_of_them(run: Path) -> None:
    """However ranks and rows share the branches: step for step, an optimizer step has the same episodes."""
    packing = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=48"]
    ended = coordinator(
        "replay", run, "--to", "1", "cluster.trainers=2", *packing, "policy.sequence_packing.logprob_mb_tokens=48"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected, found = (
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoints/step_1/policy").state_dict()
        for folder in ("run", "run-replay")
    )
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)


def test_kill_9_leaves_no_program_of_an_agent() -> None:
    source = AGENT.replace("again = ", "import time; time.sleep(600)\nagain = ")
    with Command("coordinator", "up", configure(source=source)) as run:
        wait_until(
            lambda: Path("pids").exists() and len(Path("pids").read_text().split()) >= 8,
            lambda: "programs to start",
            died=lambda: run.process.poll() is not None,
        )
        programs = [psutil.Process(int(pid)) for pid in Path("pids").read_text().split()]
        process_of(run, "rollout").kill()
        run.wait_for("another is launched in its place")
        assert all_gone(programs, 30.0) == []
        wait_until(
            lambda: len(Path("pids").read_text().split()) >= 16,
            lambda: "episodes to be played again",
            died=lambda: run.process.poll() is not None,
        )
        programs = [psutil.Process(int(pid)) for pid in Path("pids").read_text().split()[8:]]
        run.process.kill()
        assert all_gone(programs, 30.0) == []


def test_a_program_that_is_edited_during_a_run_ends_it_with_the_line_and_resume_continues_with_it() -> None:
    config = configure({"grpo": {"max_num_steps": 1000}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 1/1000")
        Path("agent.py").write_text(AGENT.replace("again = ask(question)", "again = first"))
        assert run.wait() == 1, run.output()
        line = 1 + AGENT.splitlines().index("again = ask(question)")
        refusal = (
            f"the agent's program has changed since the run began: {Path('agent.py').absolute()}:{line}: put it back"
        )
        assert refusal in run.output()
        assert "Traceback" not in run.output()
    again = coordinator("up", config, "--resume", f"grpo.max_num_steps={len(steps_of()) + 1}")
    assert again.returncode == 0, again.stderr
    assert steps_of()[-1].metrics["avg_branches_per_sample"] == 1.0, "the program as it is now"


def test_the_program_of_the_page_plays_as_it_stands() -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    settings, program = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "python"))
    assert settings is not None
    assert program is not None
    config = configure({"grpo": {"max_num_steps": 1, "num_generations_per_prompt": 2}}, source=program[1])
    whole, written = yaml.safe_load(config.read_text()), yaml.safe_load(settings[1])
    config.write_text(yaml.safe_dump({**whole, "data": {**whole["data"], **written["data"]}, "env": written["env"]}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = steps_of()
    assert "environment_failures" not in step.metrics
    assert step.metrics["avg_turns_per_sample"] == 1.0
    assert {sample.scored.reward for sample in read_step(Path("run/samples"), 1)} <= {0.0, 1.0}


def test_a_program_that_is_not_there_is_said_before_anything_starts() -> None:
    ended = coordinator("check", configure(command=["no-such-agent"]))
    assert ended.returncode == 2
    assert ended.stderr.rstrip().endswith("env.agent.command: there is no program 'no-such-agent'")


@pytest.mark.parametrize("name", ["calculator_agent", "tools_agent", "verifiers_agent"])
def test_the_examples_run(name: str) -> None:
    if name == "verifiers_agent":
        pytest.importorskip("verifiers")
    copy_examples()
    # Each sample is a program that imports a client for seconds of a core.
    small = ["grpo.num_prompts_per_step=1", "grpo.max_num_steps=2", "grpo.max_val_samples=2"]
    small.append("grpo.num_generations_per_prompt=4")
    batches = ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=4"]
    key = "verifiers" if name == "verifiers_agent" else "agent"
    ended = coordinator("up", f"examples/{name}.yaml", *small, *batches, f"env.{key}.timeout_s=200")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of(f"results/{name}")
    assert [step.step for step in steps] == [0, 1, 2]
    assert "environment_failures" not in steps[-1].metrics
    assert "reward/called" in steps[-1].metrics
    assert steps[-1].metrics["avg_branches_per_sample"] >= 1


def test_a_run_counts_the_turns_that_it_may_penalise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = coordinator("up", configure({"grpo": {"invalid_tool_call_advantage": -5.0, "max_num_steps": 2}}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of():
        metrics = step.metrics
        assert metrics["num_assistant_messages"] == 2 * 4 * 3, "episodes of three responses"
        assert metrics["num_invalid_tool_calls"] == 0, "no tag is spelt by chance"
        assert metrics["invalid_tool_call_rate"] == metrics["malformed_thinking_rate"] == 0
