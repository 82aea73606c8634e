"""Evaluation through the console command: a model, checkpoints of a run, and what comes of them."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import signal
import string
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.config.schema import NewModel
from tandem.observe.run_folder.journal import read_journal
from tandem.samples.model_files import write_new_model
from tests.harness.runs.by_hand import in_folder, undisturbed_run
from tests.harness.runs.running import SUMS, Command, all_gone, coordinator, steps_of, write_config

VALIDATED: dict[str, Any] = {
    "grpo": {
        "max_num_steps": 2,
        "val_period": 1,
        "num_val_generations_per_prompt": 2,
        "val_temperature": 0.7,
        "val_seed": 3,
    },
    "policy": {"optimizer": {"kwargs": {"lr": 0.05}}},
    "checkpointing": {"save_period": 1},
}
NEMO = """
eval: {metric: "pass@k", num_tests_per_prompt: 1, seed: 42, k_value: 1, save_path: results}
generation:
  backend: "vllm"
  max_new_tokens: ${generation.vllm_cfg.max_model_len}
  temperature: 0.0
  top_p: 1.0
  top_k: -1
  num_prompts_per_step: -1
  model_name: "Qwen/Qwen2.5-Math-1.5B-Instruct"
  stop_token_ids: null
  stop_strings: null
  vllm_cfg: {async_engine: false, precision: "bfloat16", tensor_parallel_size: 1, pipeline_parallel_size: 1,
             expert_parallel_size: 1, gpu_memory_utilization: 0.9, max_model_len: 2048, enforce_eager: False}
  colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
tokenizer: {name: "${generation.model_name}", chat_template: "default", chat_template_kwargs: null}
data:
  max_input_seq_length: ${generation.vllm_cfg.max_model_len}
  prompt_file: null
  system_prompt_file: null
  dataset_name: "held_out.csv"
  problem_key: "Question"
  solution_key: "Answer"
  split: "train"
  file_format: "csv"
env: {math: {num_workers: 1}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
"""NeMo-RL's evals/eval.yaml with the data of its evals/local_eval.yaml."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps, validated after each, which tests only read."""
    folder = tmp_path_factory.mktemp("trained")
    undisturbed_run(folder, VALIDATED)
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside the run's configuration, with results of one's own."""
    monkeypatch.chdir(trained)
    return tmp_path


def test_no_step_at_all_validates_the_model_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config({"grpo": {"max_num_steps": 0, "val_period": 0, "num_val_generations_per_prompt": 2}})
    checked = coordinator("check", config)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "no step, but a validation on 8 problems x 2" in checked.stdout
    planned = coordinator("plan", config)
    assert "no step: validation on at most 8 problems × 2 samples, temperature 1" in planned.stdout, planned.stderr
    done = coordinator("up", config)
    assert done.returncode == 0, done.stderr
    (step,) = steps_of()
    assert (step.step, step.version) == (0, 0)
    assert f"val_accuracy  {step.metrics['val_accuracy']:.4f}" in done.stdout
    assert not [*Path("run/checkpoints").glob("step_*")]
    again = coordinator("up", config, "--resume")
    assert again.returncode == 0
    assert "nothing to do: run has been evaluated" in again.stdout
    assert steps_of() == [step], "what was found stays"


def test_checkpoints_score_as_the_runs_own_validation_did_to_the_bit(here: Path) -> None:
    done = coordinator("eval", "config.yaml", f"eval.save_path={here}/out", "--model", "run/checkpoints/step_*")
    assert done.returncode == 0, done.stderr
    table = json.loads((here / "out/results.json").read_text())
    assert [row["model"] for row in table["models"]] == ["run/checkpoints/step_1", "run/checkpoints/step_2"]
    assert (table["num_tests_per_prompt"], table["temperature"], table["seed"]) == (2, 0.7, 3)
    for row, step in zip(table["models"], steps_of("run"), strict=True):
        assert row["model"] in done.stdout
        assert row["accuracy"]["mean"] == step.metrics["val_accuracy"]
        assert row["mean_reward"] == step.metrics["val_reward"], "also where no answer is right"
        assert row["mean_length"] == step.metrics["val_mean_generation_length"]
        problems = pq.read_table(here / f"out/{row['model'].replace('/', '-')}.parquet").to_pylist()
        assert len(problems) == row["num_problems"] == 8
        for problem in problems:
            assert problem["n"] == len(problem["responses"]) == len(problem["rewards"]) == 2
            assert problem["correct"] == sum(problem["is_correct"])
            assert problem["prompt"] == f"<bos>{problem['question']}", "as the model saw it"
            assert problem["problem_id"].startswith("sums.jsonl:")
            assert eval(problem["question"]) == int(problem["reference"])
    assert "no majority vote: env.digits extracts no answer" in done.stdout
    first, second = (row["mean_reward"] for row in table["models"])
    assert first != second, "the weights are the checkpoint's"


def test_greedy_samples_are_those_of_hugging_face_in_nemo_rls_form(here: Path) -> None:
    with (here / "held_out.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Question", "Answer"])
        writer.writerows([row["input"], row["output"]] for row in SUMS[:40])
    (here / "eval.yaml").write_text(NEMO)
    model = "run/checkpoints/step_2/policy"
    settings = (
        f"generation.model_name={model}",
        "generation.backend=transformers",
        "generation.vllm_cfg.max_model_len=24",
        "generation.vllm_cfg.precision=float32",
        f"data.dataset_name={here}/held_out.csv",
        "env.exact_match.num_workers=1",
        "data.env_name=exact_match",
        f"eval.save_path={here}/out",
        f"logger.log_dir={here}/log",
        "cluster.gpus_per_node=0",
    )
    done = coordinator("eval", here / "eval.yaml", *settings)
    assert done.returncode == 0, done.stderr
    problems = pq.read_table(here / "out/run-checkpoints-step_2-policy.parquet").to_pylist()
    assert [problem["question"] for problem in problems] == [row["input"] for row in SUMS[:40]]
    assert [problem["responses"][0] for problem in problems] == greedy(Path(model), problems)
    assert all(p["answers"][0] == (p["responses"][0].strip() or None) for p in problems), "as exact_match extracts them"
    (row,) = json.loads((here / "out/results.json").read_text())["models"]
    assert row["accuracy"]["mean"] == sum(problem["correct"] for problem in problems) / 40
    assert row["majority_at"]["1"]["mean"] == row["accuracy"]["mean"]
    assert f"pass@1 = {row['accuracy']['mean']:.4f}" in done.stdout
    assert "no majority vote" not in done.stdout


def greedy(folder: Path, problems: list[dict[str, Any]]) -> list[str]:
    """Return what Hugging Face generates for each prompt, one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for problem in problems:
        prompt = tokenizer(problem["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        whole = model.generate(prompt, do_sample=False, max_length=24, eos_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True))
    return texts


def test_interrupting_leaves_no_process_and_says_how_to_begin_again(here: Path) -> None:
    words = ("eval", "config.yaml", f"eval.save_path={here}/out", "data.num_validation=100", "grpo.max_val_samples=100")
    with Command("coordinator", *words, "eval.num_tests_per_prompt=1000", "--model", "run") as run:
        run.wait_for("trainer-0 holds a model")
        processes = run.children()
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert "interrupted; begin again with: coordinator eval config.yaml" in run.output()
    assert all_gone(processes, 30.0) == []
    assert not (here / "out/results.json").exists()


def test_a_run_folder_is_its_newest_checkpoint_or_its_best(here: Path) -> None:
    from tandem.coordinator.evaluation.evaluate import find_models

    assert [model.label for model in find_models(["run"], "newest")] == ["run/checkpoints/step_2"]
    rewards = {step.step: step.metrics["val_reward"] for step in steps_of("run")}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert [model.label for model in find_models(["run"], "best")] == [f"run/checkpoints/step_{best}"]
    every = find_models(["run", "run/checkpoints/step_*/policy", "run/checkpoints"], "all")
    assert [model.label for model in every] == ["run/checkpoints/step_1", "run/checkpoints/step_2"], "each once"
    with read_journal(Path("run")) as journal:
        assert journal.last_step() == 2, "nothing was written to it"


def broken(model: Path, **config: Any) -> Path:
    """Copy the model of the run, and change its configuration."""
    shutil.copytree("run/checkpoints/step_2/policy", model)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return model


def test_what_cannot_be_evaluated_is_said_on_one_line_before_anything_starts(here: Path) -> None:
    strange = broken(here / "strange", model_type="qwen33")
    small = broken(here / "small", vocab_size=4)
    larger = here / "larger"
    write_new_model(larger, NewModel(config={"model_type": "qwen3"}, characters=string.printable))
    (here / "other/tokens").mkdir(parents=True)
    cases = {
        ("--model", "run/checkpoints/step_22"): "there is no such folder; did you mean 'step_2'?",
        ("--model", str(here / "other")): "holds no model: no config.json, no checkpoint",
        ("--model", "config.yaml"): "it is a file",
        ("--model", str(strange)): "transformers has no model type 'qwen33' (config.json: model_type); did you mean",
        ("--model", str(small)): "model.embed_tokens.weight has shape",
        (f"policy.tokenizer.name={larger}",): "does not fit the model: it makes token",
        ("algorithm=sft",): "algorithm: sft generates nothing to evaluate",
        ("eval.k_value=3",): "eval.k_value: 3 is more than the 2 samples of each problem",
        ("eval.temperature=0",): "eval.temperature: 0 draws the same sample 2 times",
        ("eval.num_tests_prompt=1",): "eval.num_tests_prompt: unknown key; did you mean 'num_tests_per_prompt'?",
    }
    for words, expected in cases.items():
        done = coordinator("eval", "config.yaml", f"eval.save_path={here}/none", *words)
        assert (done.returncode in (1, 2), done.stderr.count("\n")) == (True, 1), (words, done.stdout, done.stderr)
        assert expected in done.stderr, words
        assert "launched" not in done.stdout
    assert not (here / "none").exists()


def test_results_that_are_there_are_set_aside_and_strange_folders_refused(here: Path) -> None:
    from tandem.common.errors import RunFolderError
    from tandem.coordinator.evaluation.evaluate import prepare_folder
    from tandem.observe.run_folder.journal_writer import Journal

    said: list[str] = []
    with in_folder(here):
        prepare_folder(Path("out"), said.append)
        Path("out/runs").mkdir()
        prepare_folder(Path("out"), said.append)
        assert said == ["out moved to out.1"]
        held = contextlib.closing(Journal.create(Path("out/runs/step_2"), b"{}", "grpo"))
        with held, pytest.raises(RunFolderError, match=r"out/runs/step_2 is in use by process"):
            prepare_folder(Path("out"), said.append)
        prepare_folder(Path("out"), said.append)
        assert said[1:] == ["out moved to out.2"]
        Path("mine").mkdir()
        Path("mine/thesis.txt").touch()
        with pytest.raises(RunFolderError, match=r"eval\.save_path: 'mine' holds something else"):
            prepare_folder(Path("mine"), said.append)
