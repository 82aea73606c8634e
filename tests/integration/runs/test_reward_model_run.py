"""A run whose rewards a sequence classifier gives: in a process of its own, which may die, and to the bit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tandem.observe.run_folder.journal import read_journal
from tests.harness.processes.slow_trainer import training_file
from tests.harness.reward_models import plain_reward, write_reward_model
from tests.harness.runs.by_hand import assert_same_metrics
from tests.harness.runs.record_harness import record_of
from tests.harness.runs.running import (
    SUMS,
    coordinator,
    copy_examples,
    merged,
    processes_of,
    steps_of,
    titled,
    wait_until,
    weights_of,
    write_config,
)
from tests.harness.runs.slow_disks import BY_HAND, run_with_slow_disk

SCORED: dict[str, Any] = {
    "grpo": {"max_num_steps": 4},
    "data": {"prompt_template": "{question} = ", "system_prompt": "0"},
    "env": {
        "reward_model": {
            "model_name": "classifier",
            "tokenizer": {"name": "${env.reward_model.model_name}"},
            "precision": "float32",
            "batch_size": 3,
            "correct_from": 0.5,
        }
    },
    "logger": {"samples": "all"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, with the reward model beside it."""
    folder = tmp_path_factory.mktemp("scored")
    write_reward_model(folder / "classifier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = coordinator("up", write_config(SCORED))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_rewards_are_those_of_plain_transformers(whole: Path) -> None:
    questions = {f"{problem['input']} = " for problem in SUMS}
    record = record_of(whole / "run")
    samples = [sample for samples in record.values() for sample in samples]
    assert len(samples) == 4 * 16
    for sample in samples:
        asked = sample.prompt.removeprefix("<bos>0")
        assert asked in questions
        conversation = (("system", "0"), ("user", asked), ("assistant", sample.scored.response))
        assert sample.scored.reward == pytest.approx(plain_reward(whole / "classifier", *conversation), abs=1e-5)
        assert sample.scored.correct == (sample.scored.reward >= 0.5)
    assert len({sample.scored.reward for sample in samples}) > 16
    assert all("environment_failures" not in step.metrics for step in steps_of(whole / "run"))


def test_a_run_whose_reward_model_is_killed_and_that_is_resumed_is_the_same_to_the_bit(whole: Path) -> None:
    shutil.copytree(whole / "classifier", "classifier")
    config = write_config(merged(merged(SCORED, BY_HAND), {"cluster": {"deadlines": {"generate_s": 200.0}}}))
    for step in (2, 4):
        training_file(step).touch()
    with run_with_slow_disk(config) as (run, _):
        run.wait_for(r"step 1\b")
        rollout = processes_of(run, "rollout")[0]
        wait_until(lambda: bool(find_scores(rollout)), run.output)
        (scores,) = find_scores(rollout)
        scores.kill()
        training_file(2).unlink()
        wait_until(lambda: last_step() >= 3, run.output, died=lambda: run.process.poll() is not None)
        below = rollout.children(recursive=True)
        run.process.kill()
        run.process.wait(60)
        assert not psutil.wait_procs(below, timeout=60)[1], "nothing is left behind"
    resumed = coordinator("up", write_config(SCORED), "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    pairs = zip(steps_of("run"), steps_of(whole / "run"), strict=True)
    for ours, theirs in pairs:
        assert_same_metrics(ours.metrics, theirs.metrics)
    assert weights_of("run/checkpoints/step_4") == weights_of(whole / "run/checkpoints/step_4")


def last_step() -> int:
    """Return the last step in the journal, 0 where there is none."""
    with read_journal(Path("run")) as journal:
        return journal.last_step() or 0


def find_scores(rollout: psutil.Process) -> list[psutil.Process]:
    """Return the process that has the reward model, among guardians and processes that fork others."""
    return titled(rollout.children(recursive=True), "rollout: scores with ")


def test_what_is_no_reward_model_is_refused_before_anything_starts() -> None:
    folder = write_reward_model(Path("classifier"))
    config = write_config(merged(SCORED, {"env": {"reward_model": {"tokenizer": None}}}))
    refused: list[tuple[tuple[str, ...], str]] = [
        (("env.reward_model.model_name=nothing",), "env.reward_model.model_name: 'nothing' does not exist"),
        (("env.reward_model.max_model_len=65",), "max_model_len: 65 is more than the 64 positions of the model"),
        (("env.reward_model.batch_size=0",), "env.reward_model.batch_size: expected an integer at least 1, got 0"),
        (("env.reward_model.model_nam=x",), "env.reward_model.model_nam: unknown key; did you mean 'model_name'?"),
        (("env.reward_model.model_name=null",), "env.reward_model.model_name: required"),
        (("env.reward_model.enabled=false",), "env.reward_model.enabled: false, but the environment scores"),
        (("env.reward_model.checkpoint_path=x",), "env.reward_model.checkpoint_path: not supported"),
        (("env.reward_model.dtensor_cfg.tensor_parallel_size=2",), "tensor_parallel_size: 2, but a reward model is on"),
        (("+env.reward_model.class=digits.Digits",), "env.reward_model.model_name: a class, an agent or a judge is"),
        (
            ("env.reward_model.resources.gpus_per_node=2", "cluster.gpus_per_node=2"),
            "env.reward_model.resources.gpus_per_node: 2 of cluster.gpus_per_node (2) leaves none to training",
        ),
    ]
    for overrides, expected in refused:
        assert expected in refusal(config, *overrides)
    write_reward_model(Path("two"), num_labels=2)
    assert "'two' has 2 labels, must have one" in refusal(config, "env.reward_model.model_name=two")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("Qwen3ForSequenceClassification", "Qwen3ForCausalLM"))
    assert "'classifier' is Qwen3ForCausalLM, not a sequence classifier" in refusal(config)
    (folder / "config.json").write_text(text)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != "score.weight"}, folder / "model.safetensors")
    assert "'classifier' has no weights for the head of a classifier" in refusal(config)
    (folder / "model.safetensors").unlink()
    assert "'classifier' holds no *.safetensors" in refusal(config)
    save_file(tensors, folder / "model.safetensors")
    for template in folder.glob("chat_template*"):
        template.unlink()
    assert "env.reward_model.tokenizer: the tokenizer of 'classifier' has no chat template" in refusal(config)


def refusal(config: Path, *overrides: str) -> str:
    ended = coordinator("check", config, *overrides)
    assert ended.returncode in (1, 2), ended.stdout
    assert re.match("error: ", ended.stderr)
    return ended.stderr


def test_the_example_trains_a_reward_model_and_uses_it() -> None:
    copy_examples()
    stage = Path("examples/arithmetic_rm.yaml")
    text, count = re.subn(r"^  max_num_steps: \d+$", "  max_num_steps: 5", stage.read_text(), flags=re.MULTILINE)
    assert count == 1
    stage.write_text(text)
    config, model = "examples/arithmetic_reward_model.yaml", Path("results/arithmetic_rm/checkpoints/latest/policy")
    short = ["grpo.max_num_steps=2", "grpo.num_prompts_per_step=4", "grpo.max_val_samples=16", "logger.samples=all"]
    batches = ["policy.train_global_batch_size=64", "policy.train_micro_batch_size=64"]
    ended = coordinator("up", config, *short, *batches)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert re.search(rf"^prerequisite \S*arithmetic_rm\.yaml: making .*{model}$", ended.stdout, re.MULTILINE)
    run = "results/arithmetic_reward_model"
    assert [step.step for step in steps_of(run)] == [0, 1, 2]
    samples = [sample for samples in record_of(run).values() for sample in samples]
    assert len(samples) == 2 * 64
    for sample in samples[:: len(samples) // 16]:
        conversation = ("user", sample.prompt.removeprefix("<bos>")), ("assistant", sample.scored.response)
        assert sample.scored.reward == pytest.approx(plain_reward(model, *conversation), abs=1e-5)
