"""How files, inheritance, interpolation and overrides become a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.config import build_config, load_config, notices
from tandem.config.schema import LaunchConfig

SMALL = """
grpo: {}
policy: {model_name: model}
data: {dataset_name: reasoning_gym, task: chain_sum}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_three_lines_are_enough(here: Path) -> None:
    config = load_config("small.yaml")
    assert config.algorithm == "grpo"
    assert config.algorithm_section is config.grpo
    assert config.policy.train_global_batch_size == 512
    assert config.policy.tokenizer.name == "model"
    assert config.policy.generation.max_new_tokens == config.policy.max_total_sequence_length == 512
    assert config.policy.generation.transformers_cfg.num_slots == 32
    assert config.data.max_input_seq_length == 512
    assert (config.data.num_train, config.data.num_validation) == (10_000, 256)
    assert (list(config.env), config.data.environment) == (["reasoning_gym"], "reasoning_gym")
    assert config.checkpointing.checkpoint_dir == "logs/checkpoints"
    assert (config.checkpointing.metric_name, config.checkpointing.higher_is_better) == ("val_reward", True)


def test_sft_derives_its_own_defaults(here: Path) -> None:
    config = load_config("small.yaml", ["algorithm=sft", "logger.log_dir=run"])
    assert config.algorithm_section is config.sft
    assert config.policy.train_global_batch_size == 32
    assert (config.checkpointing.metric_name, config.checkpointing.higher_is_better) == ("val_loss", False)
    assert config.checkpointing.checkpoint_dir == "run/checkpoints"


def test_files_inherit_in_chains_and_the_last_word_wins(here: Path) -> None:
    write(
        here,
        {
            "base/root.yaml": SMALL + "sft: {seed: 1}\nlogger: {log_dir: a}\n",
            "base/middle.yaml": "defaults: root.yaml\nalgorithm: grpo\ngrpo: {seed: 2, val_period: 2}\n",
            "other.yaml": "grpo: {seed: 3}\npolicy: {optimizer: {kwargs: {lr: 1e-3}}}\n",
            "leaf.yaml": "defaults: [base/middle.yaml, other.yaml]\nlogger: {log_dir: b}\n",
        },
    )
    config = load_config("leaf.yaml")
    assert (config.grpo.seed, config.grpo.val_period, config.sft.seed) == (3, 2, 1)
    assert config.logger.log_dir == "b"
    assert config.policy.optimizer is not None
    assert config.policy.optimizer.kwargs == {"lr": 1e-3}


def test_null_replaces_a_mapping_and_a_mapping_replaces_null(here: Path) -> None:
    write(
        here,
        {
            "base.yaml": SMALL + "loss_fn: {ratio_clip_c: 3}\n",
            "leaf.yaml": "defaults: base.yaml\nloss_fn: {ratio_clip_c: null}\n"
            "policy: {new_model: {config: {model_type: qwen3}, characters: ab}}\n",
        },
    )
    config = load_config("leaf.yaml")
    assert config.loss_fn.ratio_clip_c is None
    assert config.policy.new_model is not None
    assert load_config("leaf.yaml", ["policy.new_model=null"]).policy.new_model is None


def test_a_mapping_may_replace_the_inherited_one(here: Path) -> None:
    write(
        here,
        {
            "base.yaml": SMALL.replace("model_name: model", "model_name: m, precision: float32")
            + "loss_fn: {ratio_clip_max: 0.3}\n",
            "leaf.yaml": "defaults: base.yaml\ndata: {_override_: true, dataset_name: owner/name}\n"
            "loss_fn: {_override_: false, ratio_clip_min: 0.1}\nenv: {math: {kwargs: {_override_: true}}}\n",
            "last.yaml": "defaults: [leaf.yaml]\npolicy: {_override_: true, model_name: other}\n",
        },
    )
    config = load_config("leaf.yaml", ["env.math.num_workers=2"])
    assert (config.data.dataset_name, config.data.task) == ("owner/name", None)
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.1, 0.3)
    assert config.env["math"].kwargs == {}
    config = load_config("last.yaml", ["grpo={_override_: true, seed: 3}"])
    assert (config.policy.model_name, config.policy.precision, config.grpo.seed) == ("other", "bfloat16", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${policy.max_total_sequence_length}", 512),
        ("${mul:${policy.train_micro_batch_size}, 8}", 32),
        ("${div:${policy.max_total_sequence_length}, 2}", 256),
        ("${add:1,2}", 3),
        ("${sub:3,2}", 1),
        ("${max:3,${.top_k}}", 7),
        ("${mul:${mul:2, 1.5}, ${div:${.top_k}, 3.5}}", 6),
    ],
)
def test_interpolation(here: Path, text: str, expected: int) -> None:
    config = load_config("small.yaml", ["policy.generation.top_k=7", f"policy.generation.max_new_tokens={text}"])
    assert config.policy.generation.max_new_tokens == expected


def test_interpolation_sees_what_a_child_file_overrides(here: Path) -> None:
    write(
        here,
        {
            "base.yaml": SMALL + "logger: {log_dir: 'runs/${policy.precision}', wandb: {name: '${..log_dir}'}}\n",
            "leaf.yaml": "defaults: base.yaml\npolicy: {precision: float32}\n",
        },
    )
    config = load_config("leaf.yaml")
    assert config.logger.wandb.name == "runs/float32"


def test_defaults_that_only_fill_gaps_do_not_mix_with_given_mappings(here: Path) -> None:
    config = load_config("small.yaml", ["policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}}"])
    assert config.policy.optimizer is not None
    assert config.policy.optimizer.kwargs == {"lr": 0.1}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_overrides(here: Path, prefix: str) -> None:
    overrides = [
        f"{prefix}grpo.seed=7",
        f"{prefix}policy.generation.stop_strings=[';', 'a=b']",
        f"{prefix}policy.scheduler=[{{name: a.B, kwargs: {{total_iters: 3}}}}]",
        f"{prefix}policy.scheduler.0.kwargs.total_iters=5",
        f"{prefix}policy.scheduler[0].kwargs.factor=0.5",
        f"{prefix}cluster.launch={{trainers: 1, refit: true}}",
        f"{prefix}cluster.address=tcp://127.0.0.1:5555",
    ]
    config = load_config("small.yaml", overrides)
    assert config.grpo.seed == 7
    assert config.policy.generation.stop_strings == (";", "a=b")
    assert config.policy.scheduler[0].kwargs == {"total_iters": 5, "factor": 0.5}
    assert config.cluster.launch == LaunchConfig(trainers=1, rollouts=0, refit=True)
    assert config.cluster.address == "tcp://127.0.0.1:5555"


def test_one_scheduler_needs_no_list(here: Path) -> None:
    config = load_config("small.yaml", ["policy.scheduler={name: a.B}"])
    assert [entry.name for entry in config.policy.scheduler] == ["a.B"]
    assert load_config("small.yaml", ["policy.scheduler=null"]).policy.scheduler == ()


@pytest.mark.parametrize("text", ["1e-8", "'1e-8'", "1.0e-8", "'1E-08'"])
def test_numbers_written_as_text(here: Path, text: str) -> None:
    config = load_config(
        "small.yaml",
        [
            f"policy.optimizer.kwargs.eps={text}",
            f"policy.scheduler.kwargs.start_factor={text}",
            "policy.scheduler.name=a.B",
            f"policy.max_grad_norm={text}",
            "cluster.heartbeat_timeout_s='20'",
            f"policy.new_model={{config: {{model_type: m, rms_norm_eps: {text}}}, characters: '1e-8'}}",
        ],
    )
    assert config.policy.optimizer is not None
    assert config.policy.optimizer.kwargs["eps"] == 1e-8
    assert config.policy.scheduler[0].kwargs["start_factor"] == 1e-8
    assert config.policy.max_grad_norm == 1e-8
    assert config.cluster.heartbeat_timeout_s == 20
    assert config.policy.new_model is not None
    assert config.policy.new_model.config["rms_norm_eps"] == 1e-8
    assert config.policy.new_model.characters == "1e-8"


def test_whole_numbers_may_be_written_as_floats(here: Path) -> None:
    num_steps = load_config("small.yaml", ["grpo.max_num_steps=1e6"]).grpo.max_num_steps
    assert num_steps == 1_000_000
    assert isinstance(num_steps, int)


def test_a_prerequisite_is_relative_to_the_file_that_names_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        here,
        {
            "stages/sft.yaml": SMALL,
            "stages/base.yaml": SMALL + "prerequisite: sft.yaml\n",
            "leaf.yaml": "defaults: stages/base.yaml\n",
        },
    )
    assert load_config("leaf.yaml").prerequisite == str(here / "stages" / "sft.yaml")
    assert load_config("leaf.yaml", ["prerequisite=small.yaml"]).prerequisite == str(here / "small.yaml")
    monkeypatch.chdir("stages")
    assert load_config("../leaf.yaml").prerequisite == str(here / "stages" / "sft.yaml")
    assert load_config("../leaf.yaml", ["prerequisite=null"]).prerequisite is None


def test_a_mapping_is_checked_as_a_file_is() -> None:
    settings: dict[str, Any] = {
        "sft": {"max_num_steps": 5},
        "policy": {"model_name": "model"},
        "data": {"dataset_name": "jsonl", "train_data_path": "problems.jsonl"},
    }
    config = build_config(settings)
    assert (config.algorithm, config.sft.max_num_steps) == ("sft", 5)
    assert (config.data.num_train, config.data.num_validation) == (None, None)
    assert settings["sft"] == {"max_num_steps": 5}


def test_num_validation_follows_from_where_validation_problems_come_from(here: Path) -> None:
    overrides = ["data={dataset_name: jsonl, task: null, train_data_path: a.jsonl}", "env.math.num_workers=2"]
    assert load_config("small.yaml").data.num_validation == 256
    assert load_config("small.yaml", overrides).data.num_validation is None, "a share of what is read"
    assert load_config("small.yaml", [*overrides, "data.val_data_path=b.jsonl"]).data.num_validation is None


def test_what_has_no_effect_yet_is_accepted_with_a_notice(here: Path) -> None:
    assert notices(load_config("small.yaml")) == []
    assert notices(load_config("small.yaml", ["data.add_system_prompt=true"])) == [
        "data.add_system_prompt (true) has no effect yet"
    ]
    assert notices(load_config("small.yaml", ["logger.monitor_gpus=true"])) == []


def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys, tandem.config, tandem.config.describe;"
        "print(sorted({'torch', 'transformers', 'numpy', 'zmq', 'datasets'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_a_local_file_needs_no_name_of_its_data_set(here: Path, algorithm: str) -> None:
    Path("own.yaml").write_text(
        f"{algorithm}: {{}}\n"
        "policy: {model_name: model}\ndata: {train_data_path: a.jsonl}\nenv: {exact_match: {}}\n"
    )
    assert load_config("own.yaml").data.dataset_name == "jsonl"
    assert load_config("own.yaml", ["data.dataset_name=null"]).data.dataset_name == "jsonl"
    if algorithm == "grpo":
        evaluated = ["grpo.max_num_steps=0", "data.train_data_path=null", "data.val_data_path=b.jsonl"]
        assert load_config("own.yaml", evaluated).data.dataset_name == "jsonl"
