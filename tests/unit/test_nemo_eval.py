"""NeMo-RL's configurations of evaluations, read as Tandem's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.errors import ConfigError, DataError, NotSupportedYet
from tandem.config import Config, load_evaluation
from tandem.coordinator.cli import main
from tandem.samples.data_sets import load_problems
from tandem.samples.data_sets.sources import csv_rows

EVAL = """
eval:
  metric: "pass@k" # pass@k and cons@k are supported
  num_tests_per_prompt: 1
  seed: 42
  k_value: 1
  save_path: null
generation:
  backend: "vllm"
  max_new_tokens: ${generation.vllm_cfg.max_model_len}
  temperature: 0.0
  top_p: 1.0
  top_k: -1 # -1 means disable
  num_prompts_per_step: -1 # -1 means pass all prompts at once
  model_name: "Qwen/Qwen2.5-Math-1.5B-Instruct"
  stop_token_ids: null
  stop_strings: null
  vllm_cfg:
    async_engine: false
    precision: "bfloat16"
    tensor_parallel_size: 1
    pipeline_parallel_size: 1
    expert_parallel_size: 1
    gpu_memory_utilization: 0.9
    max_model_len: 2048
    enforce_eager: False
  colocated:
    enabled: true
    resources:
      gpus_per_node: null
      num_nodes: null
tokenizer:
  name: ${generation.model_name}
  chat_template: "default"
  chat_template_kwargs: null
data:
  max_input_seq_length: ${generation.vllm_cfg.max_model_len}
  prompt_file: null
  system_prompt_file: null
  dataset_name: "aime2024"
env:
  math:
    num_workers: 8
cluster:
  gpus_per_node: 1
  num_nodes: 1
"""
"""evals/eval.yaml of NeMo-RL."""
LOCAL = """
defaults: "eval.yaml"
generation:
  model_name: "Qwen/Qwen2.5-7B-Instruct"
data:
  dataset_name: "held_out.csv"
  problem_key: "Question"
  solution_key: "Answer"
  split: "train"
  file_format: "csv"
"""
"""evals/local_eval.yaml, with a file that is here."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("eval.yaml").write_text(EVAL)
    Path("local_eval.yaml").write_text(LOCAL)
    return tmp_path


def read(*overrides: str, name: str = "eval.yaml") -> Config:
    return load_evaluation(name, overrides)


def test_its_keys_are_those_of_a_run_without_steps() -> None:
    config = read("generation.top_k=20", "eval.num_tests_per_prompt=4", "generation.temperature=0.6")
    generation = config.policy.generation
    assert config.policy.model_name == config.policy.tokenizer.name == "Qwen/Qwen2.5-Math-1.5B-Instruct"
    assert (config.policy.max_total_sequence_length, generation.max_new_tokens) == (2048, 2048)
    assert (generation.backend, generation.temperature, generation.top_k) == ("vllm", 0.6, 20)
    assert generation.vllm_cfg.gpu_memory_utilization == 0.9
    assert (config.eval.num_tests_per_prompt, config.eval.seed) == (4, 42)
    assert config.evaluates
    assert config.grpo.max_val_samples >= 1_000_000, "all of them"
    assert (config.data.environment, config.env["math"].num_workers) == ("math", 8)
    data = config.data
    assert (data.dataset_name, data.val_split) == ("HuggingFaceH4/aime_2024", "train")
    assert (data.input_key, data.output_key) == ("problem", "answer")
    assert read().policy.generation.top_k is None
    assert read("+generation.val_temperature=0.3").policy.generation.temperature == 0.3, "as later releases have it"


def test_a_local_file_is_held_out_whole() -> None:
    Path("held_out.csv").write_text('Question,Answer,Note\n"What is 1, and 1?",2,x\n"a\nb",3,\n')
    config = read(name="local_eval.yaml")
    assert (config.data.val_data_path, config.data.train_data_path) == ("held_out.csv", None)
    problems = load_problems(config)
    assert problems.train == []
    found = [(problem.question, problem.answer, problem.metadata) for problem in problems.validation]
    assert found == [("What is 1, and 1?", "2", {"Note": "x"}), ("a\nb", "3", {"Note": ""})]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "data.dataset_name=aime",
            "data.dataset_name: 'aime' is unknown: expected aime2024, math500, a local file",
        ),
        ("data.dataset_name=math50", "did you mean 'math500'?"),
        (  # of its `nemo_gym_eval.yaml` (adfd2bd3)
            "data.dataset_name=NemoGymDataset",
            "data.dataset_name: NemoGymDataset: a run validates NeMo Gym's rows (data.validation), not this form",
        ),
        (
            "data.repeat=16",
            "command line: data.repeat: 16: set the number of samples in eval.num_tests_per_prompt instead",
        ),
        ("generation.model_name=null", "command line: generation.model_name: required, but not set: expected text"),
        ("eval.metric=pass@2", "eval.metric: 'pass@2' is not one of cons@k, pass@k; did you mean 'pass@k'?"),
        ("generation.temperatur=1", "command line: generation.temperatur: unknown key; did you mean 'temperature'?"),
    ],
)
def test_what_it_cannot_be_is_said_on_one_line(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(override)
    assert len(caught.value.problems) == 1
    assert expected in caught.value.problems[0]


def test_data_sets_that_are_not_built_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedYet) as caught:
        read("data.dataset_name=GPQA")
    assert str(caught.value) == "eval.yaml: not supported yet: data.dataset_name (GPQA)"


def test_a_slip_in_an_evaluation_is_not_ignored() -> None:
    """The command line sets nothing but the slip, and the file sets the key that is meant."""
    with pytest.raises(ConfigError) as caught:
        read("generation.temperatur=1", "nemo_rl_version=newer")
    assert caught.value.problems == ("command line: generation.temperatur: unknown key; did you mean 'temperature'?",)


def test_the_settings_of_an_environment_that_is_not_built_are_not_told_of() -> None:
    """NeMo-RL's `bfcl_eval.yaml` (2e9b607f): `enable` is no slip of a key that every environment has."""
    with pytest.raises(NotSupportedYet) as caught:
        read("data.dataset_name=bfcl_multiturn", "env={bfcl_multiturn: {enable: true, max_turns: 4}}")
    assert caught.value.problems == ("eval.yaml: not supported yet: data.dataset_name (bfcl_multiturn)",)


def test_check_takes_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "eval.yaml", "cluster.threads_per_process=1", "generation.backend=transformers"]) in (1, 2)
    assert "error: policy.model_name: " in capsys.readouterr().err


def test_a_data_set_of_the_hub_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot load 'HuggingFaceH4/MATH-500', split 'test'"):
        load_problems(read("data.dataset_name=math500"))


def test_a_run_s_configuration_is_read_as_it_is() -> None:
    Path("run.yaml").write_text(
        "grpo: {seed: 3}\npolicy: {model_name: model}\neval: {num_tests_per_prompt: 2}\n"
        "data: {dataset_name: reasoning_gym, task: chain_sum}\n"
    )
    config = read("eval.top_p=0.5", name="run.yaml")
    assert (config.grpo.seed, config.eval.num_tests_per_prompt, config.eval.top_p) == (3, 2, 0.5)
    assert not config.evaluates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1\n", r"x\.csv:2 has not as many fields as the first line names: a, b"),
        ("a,b\n1,2,3\n", r"x\.csv:2 has not as many fields"),
        ("a,b\n", r"'x\.csv' holds no problem"),
        ('a,b\n"1,2\n', r"cannot read 'x\.csv'"),
    ],
)
def test_csv_that_is_none_is_named(text: str, expected: str) -> None:
    Path("x.csv").write_text(text)
    with pytest.raises(DataError, match=expected):
        csv_rows("x.csv")
