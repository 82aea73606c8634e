"""Every error in a configuration is one line: the file (or the command line), the key, the value, what would do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import Config, build_config, load_config
from tandem.config.installed.vllm_arguments import list_engine_arguments
from tandem.config.load import HOW_TO_IGNORE
from tandem.config.model_names import change_model_names, is_used

SMALL = """
grpo: {}
policy: {model_name: model}
data: {dataset_name: reasoning_gym, task: chain_sum}
"""

TOP = ", ".join(Config.__struct_encode_fields__)
FREE = "cannot be used here: expected text, a finite number, a list or a mapping"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def error_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2\n", "bad.yaml: line 2, column 2: not valid YAML: did not find expected ',' or ']'"),
        ("grpo: {}\ngrpo: {}\n", "bad.yaml: line 2, column 1: not valid YAML: found duplicate key grpo"),
        ("- 1\n", "bad.yaml: expected a mapping at the top, got a list"),
        (
            "",
            "bad.yaml: algorithm: required, but not set: expected distillation, dpo, grpo, off_policy_distillation, "
            "ppo, rm, sft",
        ),
        ("hello\n", f"bad.yaml: hello: unknown key; the top level knows {TOP}{HOW_TO_IGNORE}"),
        ("grpo:\n", "bad.yaml: grpo: expected a mapping, got null"),
        ("grpo: {seed: '${'}\n", "bad.yaml: grpo.seed: cannot be resolved: no viable alternative at input '${'"),
        ("grpo: {}\n", "bad.yaml: policy.model_name: required, but not set: expected text"),
        (
            "grpo: {}\npolicy: {model_name: m}\n",
            "bad.yaml: data.dataset_name: required, but not set: expected text; or set data.train_data_path, a file of "
            "your own",
        ),
        ("defaults: 3\n", "bad.yaml: defaults: expected a path or a list of paths, got 3"),
        ("defaults: absent.yaml\n", "bad.yaml: defaults: there is no file absent.yaml"),
        ("defaults: [3]\n", "bad.yaml: defaults: expected a path or a list of paths, got [3]"),
        ("env: {math: {_override_: 1}}\n", "bad.yaml: env.math._override_: expected true or false, got 1"),
        (
            "grpo: {}\npolicy: {_override_: true}\n",
            "bad.yaml: policy.model_name: required, but not set: expected text",
        ),
        ("defaults: bad.yaml\n", "bad.yaml: defaults: the file inherits from itself: bad.yaml -> bad.yaml"),
    ],
)
def test_files(here: Path, text: str, expected: str) -> None:
    (here / "bad.yaml").write_text(text)
    assert error_of("bad.yaml") == expected


def test_a_file_that_cannot_be_read(here: Path) -> None:
    (here / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert error_of("absent.yaml") == "absent.yaml: there is no such file"
    assert error_of("binary.yaml") == "binary.yaml: cannot be read: it does not hold YAML text"
    assert error_of(".") == ".: cannot be read: Is a directory"
    os.mkfifo(here / "fifo.yaml")
    assert error_of("fifo.yaml") == "fifo.yaml: cannot be read: it is a FIFO, not a file"
    (here / "zero.yaml").symlink_to("/dev/zero")
    assert error_of("zero.yaml") == "zero.yaml: cannot be read: it is a character device, not a file"
    (here / "child.yaml").write_text("defaults: [fifo.yaml]\n")
    assert error_of("child.yaml") == "child.yaml: defaults: there is no file fifo.yaml"


def test_a_cycle_of_defaults_is_named(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "a.yaml").write_text("defaults: sub/b.yaml\n")
    (here / "sub" / "b.yaml").write_text("defaults: ../a.yaml\n")
    assert error_of("a.yaml") == "a.yaml: defaults: the file inherits from itself: a.yaml -> sub/b.yaml -> a.yaml"


def test_the_file_that_set_the_key_is_blamed(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "base.yaml").write_text(SMALL + "logger: {log_dirr: logs}\n")
    (here / "leaf.yaml").write_text("defaults: sub/base.yaml\nloss_fn: {ratio_clip_min: low}\n")
    assert error_of("leaf.yaml") == "leaf.yaml: loss_fn.ratio_clip_min: " + (
        "expected a number at least 0 and at most 1, got 'low'"
    )
    assert error_of("leaf.yaml", "loss_fn.ratio_clip_min=0.1") == (
        "sub/base.yaml: logger.log_dirr: unknown key; did you mean 'log_dir'?"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.num_prompt_per_step=3", "grpo.num_prompt_per_step: unknown key; did you mean 'num_prompts_per_step'?"),
        ("grpoo.seed=3", "grpoo: unknown key; did you mean 'grpo'?"),
        ("grpo.temperature=1", "grpo.temperature: unknown key; did you mean 'policy.generation.temperature'?"),
        ("zzz=1", f"zzz: unknown key; the top level knows {TOP}{HOW_TO_IGNORE}"),
        ("cluster.launch={trainer: 1}", "cluster.launch.trainer: unknown key; did you mean 'trainers'?"),
        ("env.math.classs=a.B", "env.math.classs: unknown key; did you mean 'class'?"),
        ("grpo=3", "grpo: expected a mapping, got 3"),
        ("grpo.max_num_steps=ten", "grpo.max_num_steps: expected an integer at least 0, got 'ten'"),
        ("grpo.max_num_steps='10'", "grpo.max_num_steps: expected an integer at least 0, got '10'"),
        ("grpo.max_num_steps=1.5", "grpo.max_num_steps: expected an integer at least 0, got 1.5"),
        ("grpo.max_num_steps=true", "grpo.max_num_steps: expected an integer at least 0, got true"),
        ("grpo.max_num_steps=-2", "grpo.max_num_steps: expected an integer at least 0, got -2"),
        ("grpo.max_num_steps=.inf", "grpo.max_num_steps: expected an integer at least 0, got Infinity"),
        ("grpo.val_at_start=1", "grpo.val_at_start: expected true or false, got 1"),
        ("policy.model_name=7", "policy.model_name: expected text, got 7"),
        ("policy.model_name=''", "policy.model_name: is empty"),
        ("policy.model_name=", "policy.model_name: expected text, got null"),
        ("policy.max_grad_norm=0", "policy.max_grad_norm: expected a number greater than 0, got 0.0"),
        (
            "policy.generation.top_p=1.5",
            "policy.generation.top_p: expected a number greater than 0 and at most 1, got 1.5",
        ),
        (
            "policy.generation.top_p=0",
            "policy.generation.top_p: expected a number greater than 0 and at most 1, got 0.0",
        ),
        ("policy.generation.stop_strings=a", "policy.generation.stop_strings: expected a list of text, got 'a'"),
        ("policy.generation.stop_token_ids=[a]", "policy.generation.stop_token_ids[0]: expected an integer, got 'a'"),
        ("loss_fn.ratio_clip_c=1", "loss_fn.ratio_clip_c: expected a number greater than 1, got 1.0"),
        ("loss_fn.reference_policy_kl_type=k4", "loss_fn.reference_policy_kl_type: 'k4' is not one of k1, k2, k3"),
        (
            "policy.precision=bfloat",
            "policy.precision: 'bfloat' is not one of bfloat16, float32; did you mean 'bfloat16'?",
        ),
        ("cluster.trainers=0", "cluster.trainers: expected an integer at least 1, got 0"),
        ("cluster.launch=some", "cluster.launch: expected all, none or a mapping, got 'some'"),
        ("policy.optimizer.kwargs.lr=.nan", f"policy.optimizer.kwargs.lr: NaN {FREE}"),
        ("data.task_params={1: 2}", "data.task_params: the key 1 is not text; quote it"),
        ("grpo.seed=${grpo.sed}", "grpo.seed: cannot be resolved: Interpolation key 'grpo.sed' not found"),
        ("grpo.seed=${grpo.seed}", "grpo.seed: cannot be resolved: Recursive interpolation detected"),
        ("grpo.seed=${mul:2}", "grpo.seed: cannot be resolved: mul takes two numbers, got 2"),
        ("grpo.seed=${mul:2,a}", "grpo.seed: cannot be resolved: mul takes two numbers, got 2, 'a'"),
        ("grpo.seed=${div:2,0}", "grpo.seed: cannot be resolved: div cannot divide 2 by 0"),
        (
            "logger.log_dir=${oc.env:TANDEM_ABSENT}",
            "logger.log_dir: cannot be resolved: Environment variable 'TANDEM_ABSENT' not found",
        ),
        ("grpo.seed=${pow:2,3}", "grpo.seed: cannot be resolved: Unsupported interpolation type pow"),
        ("grpo.seed=*", "grpo.seed: '*' is not a YAML value; quote it if it is text"),
        ("grpo.seed", "'grpo.seed': expected key=value, such as grpo.max_num_steps=10"),
        ("~grpo.seed=1", "'~grpo.seed=1': expected key=value, such as grpo.max_num_steps=10"),
        (
            "algorithm=grpoo",
            "algorithm: 'grpoo' is not one of distillation, dpo, grpo, off_policy_distillation, ppo, rm, sft; "
            "did you mean 'grpo'?",
        ),
    ],
)
def test_single_keys(override: str, expected: str) -> None:
    assert error_of("small.yaml", override) == f"command line: {expected}"


def test_an_index_beyond_a_list() -> None:
    assert error_of("small.yaml", "policy.scheduler=[]", "policy.scheduler.0.name=a") == (
        "command line: 'policy.scheduler.0.name=a': '0' is not an index into a list of 0"
    )


def test_several_algorithms_need_a_choice() -> None:
    assert error_of("small.yaml", "sft.seed=1") == (
        "small.yaml: algorithm: required where several are configured (grpo, sft)"
    )


def test_a_long_value_is_shortened() -> None:
    line = error_of("small.yaml", f"grpo.seed={'x' * 500}")
    assert line == f"command line: grpo.seed: expected an integer at least 0, got '{'x' * 76}..."


JSONL = "data={dataset_name: jsonl, task: null, train_data_path: a.jsonl}"
SCHEDULE = "policy.scheduler: 2 schedules need 1 milestones between them, got 0"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["policy.dtensor_cfg.enabled=false"],
            "policy.dtensor_cfg.enabled: false, and policy.megatron_cfg.enabled is false too: nothing can train",
        ),
        (["policy.optimizer=null"], "policy.optimizer: null, but policy.dtensor_cfg needs an optimizer"),
        (["policy.scheduler=[{kwargs: {}}]"], "policy.scheduler[0]: expected either a name or milestones"),
        (["policy.scheduler=[{name: a.B}, {name: a.B}]"], SCHEDULE),
        (
            ["policy.scheduler=[{milestones: [1]}, {milestones: [2]}]"],
            "policy.scheduler: milestones are given more than once",
        ),
        (
            ["policy.scheduler=[{name: a.B}, {name: a.B}, {name: a.B}, {milestones: [5, 5]}]"],
            "policy.scheduler: milestones must rise, got [5, 5]",
        ),
        (
            ["policy.train_global_batch_size=100"],
            "policy.train_global_batch_size: 100 does not divide "
            "grpo.num_prompts_per_step * grpo.num_generations_per_prompt = 32 * 16 = 512 samples",
        ),
        (
            ["policy.train_micro_batch_size=64", "cluster.trainers=16", "policy.train_global_batch_size=512"],
            "policy.train_global_batch_size: 512 is not a multiple of "
            "policy.train_micro_batch_size * cluster.trainers = 64 * 16 = 1024",
        ),
        (
            ["algorithm=sft", "sft.val_global_batch_size=9", "sft.val_micro_batch_size=2"],
            "sft.val_global_batch_size: 9 is not a multiple of sft.val_micro_batch_size * cluster.trainers = 2 * 1 = 2",
        ),
        (
            ["policy.generation.max_stored_tokens=8000"],
            "policy.generation.max_stored_tokens: 8000 is less than grpo.num_generations_per_prompt * "
            "policy.max_total_sequence_length = 16 * 512 = 8192, which the samples of one prompt may have",
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"],
            "policy.dynamic_batching.enabled: true, but policy.sequence_packing.enabled is true too: rows are either "
            "padded or packed",
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=511"],
            "policy.sequence_packing.train_mb_tokens: 511 is less than policy.max_total_sequence_length (512)",
        ),
        (
            ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.logprob_mb_tokens=100"],
            "policy.dynamic_batching.logprob_mb_tokens: 100 is less than policy.max_total_sequence_length (512)",
        ),
        (
            ["algorithm=dpo", "policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=1023"],
            "policy.sequence_packing.train_mb_tokens: 1023 is less than a pair of policy.max_total_sequence_length "
            "(1024)",
        ),
        (
            ["policy.sequence_packing.algorithm=first_fit_decreasin"],
            "policy.sequence_packing.algorithm: 'first_fit_decreasin' is not one of concatenative, "
            "first_fit_decreasing, first_fit_shuffle, modified_first_fit_decreasing; did you mean "
            "'first_fit_decreasing'?",
        ),
        (
            ["policy.train_global_batch_size=32", "grpo.num_generations_per_prompt=1"],
            "grpo.num_generations_per_prompt: 1, but grpo.use_leave_one_out_baseline needs at least 2 samples of each "
            "prompt",
        ),
        (
            ["policy.generation.temperature=0"],
            "policy.generation.temperature: 0 draws the same sample every time, and GRPO learns from none",
        ),
        (
            ["policy.generation.max_new_tokens=513"],
            "policy.generation.max_new_tokens: 513 is greater than policy.max_total_sequence_length (512)",
        ),
        (["data.task=null"], "data.task: required where data.dataset_name is reasoning_gym, such as chain_sum"),
        (
            [JSONL, "data.val_data_paths={easy: b.jsonl}"],
            "data.val_data_paths: GRPO validates on one file: set data.val_data_path",
        ),
        ([JSONL.replace("a.jsonl", "null")], "data.train_data_path: required where data.dataset_name is jsonl"),
        (
            ["env.maths.num_workers=1"],
            "env.maths: not built in (reasoning_gym, math, math_multi_reward, exact_match, python_code, calculator, "
            "sliding_puzzle_game) and without a class, a command, a judge or a model_name; did you mean 'math'?",
        ),
        (
            ["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=0.5"],
            "grpo.advantage_clip_high: 0.5 is not more than grpo.advantage_clip_low (1)",
        ),
        (["env.mine.class=Mine"], "env.mine.class: 'Mine' is not a dotted path, such as package.Class"),
        (
            ["env.math.num_workers=1", "data.environment=exact_match"],
            "data.environment: 'exact_match' is not an entry of env (math)",
        ),
        (
            [JSONL, "env.reasoning_gym.num_workers=1", "data.environment=reasoning_gym"],
            "data.environment: reasoning_gym cannot score data.dataset_name jsonl",
        ),
        (
            [JSONL, "env.sliding_puzzle_game.num_workers=1", "data.environment=sliding_puzzle_game"],
            "data.environment: sliding_puzzle_game plays data.dataset_name sliding_puzzle, not jsonl",
        ),
        (
            [JSONL, "env.calculator.num_workers=1", "grpo.max_rollout_turns=1"],
            "grpo.max_rollout_turns: 1, but calculator replies, and the policy needs another turn after that",
        ),
        (
            ["checkpointing.metric_name=val_loss"],
            "checkpointing.metric_name: grpo has no val_loss, only val_reward, val_accuracy, reward, accuracy, loss",
        ),
        (["cluster.rollouts=0"], "cluster.rollouts: 0, but GRPO needs at least 1"),
        (["cluster.launch={trainers: 2}"], "cluster.launch.trainers: 2 is more than cluster.trainers (1)"),
        (
            ["env={mine: {class: a.B, judge: {}}}"],
            "env.mine.judge: env.mine.class is given too: a judge scores by itself",
        ),
        (
            ["env={mine: {judge: {}}}"],
            "env.mine.judge: without base_url it asks the run's own engine: set policy.generation.expose_http_server",
        ),
        (
            ["env={mine: {judge: {cache: c}}}"],
            "env.mine.judge.cache: given, but env.mine.judge.base_url is null: the run's own weights change every step",
        ),
        (
            ["env={mine: {judge: {base_url: here, model: m}}}"],
            "env.mine.judge.base_url: 'here', must be http://HOST:PORT/PATH",
        ),
        (
            ["env={mine: {judge: {base_url: 'http://a/v1'}}}"],
            "env.mine.judge: has a base_url but no model",
        ),
        (
            ["env={mine: {judge: {base_url: 'http://a/v1', model: m, score_pattern: '[0-9]+'}}}"],
            "env.mine.judge.score_pattern: '[0-9]+' has no group to capture the score",
        ),
        (
            ["env={mine: {judge: {base_url: 'http://a/v1', model: m, prompt: '{question}'}}}"],
            "env.mine.judge.prompt: has no {response}: the judge would not see what it grades",
        ),
        (
            ["env={mine: {judge: {base_url: 'http://a/v1', model: m, highest_score: -1}}}"],
            "env.mine.judge.highest_score: -1 is not more than env.mine.judge.lowest_score",
        ),
        (["cluster.launch={rollouts: 3}"], "cluster.launch.rollouts: 3 is more than cluster.rollouts (1)"),
        (["cluster.address=here"], "cluster.address: 'here' is not tcp://host:port or tcp://host:*"),
        (["refit.store=bucket"], "refit.store: 'bucket' is neither s3://BUCKET/FOLDER nor file:///FOLDER"),
        (["refit.store=s3://"], "refit.store: 's3://' is neither s3://BUCKET/FOLDER nor file:///FOLDER"),
        (
            ["refit.store=file://weights"],
            "refit.store: 'file://weights' is not an absolute path: file:///FOLDER has three slashes",
        ),
        (
            ["refit.store=nowhere://weights"],
            "refit.store: 'nowhere://weights' needs a client that is not installed: Protocol not known: nowhere",
        ),
        (["cluster.address=tcp://a:70000"], "cluster.address: 'tcp://a:70000' is not tcp://host:port or tcp://host:*"),
        (
            ["cluster.heartbeat_timeout_s=1.5"],
            "cluster.heartbeat_timeout_s: 1.5 is less than twice cluster.heartbeat_interval_s (1)",
        ),
        (
            ["policy.new_model={config: {model_type: qwen3}, characters: abca}"],
            "policy.new_model.characters: 'a' appears more than once",
        ),
        (
            ["policy.new_model={config: {model_type: qwen3, hidden_sise: 8}, characters: ab}"],
            "policy.new_model.config.hidden_sise: a qwen3 configuration has no such field; did you mean 'hidden_size'?",
        ),
    ],
)
def test_keys_that_do_not_fit_together(overrides: list[str], expected: str) -> None:
    assert error_of("small.yaml", *overrides) == f"command line: {expected}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.dataset_name=squad"], "data.task: only reasoning_gym has tasks, and data.dataset_name is squad"),
        (
            [JSONL],
            "env: required: GRPO needs an environment, such as reasoning_gym, math, math_multi_reward, exact_match, "
            "python_code, calculator, sliding_puzzle_game",
        ),
        (
            ["env.math.num_workers=1", "env.exact_match.num_workers=1"],
            "data.environment: required where env has several entries (math, exact_match)",
        ),
        (
            ["policy.new_model={config: {}, characters: ab}"],
            "policy.new_model.config.model_type: required: the Hugging Face model type, such as qwen3",
        ),
        (
            ["cluster.trainers=3"],
            "policy.train_global_batch_size: 512 is not a multiple of "
            "policy.train_micro_batch_size * cluster.trainers = 4 * 3 = 12",
        ),
    ],
)
def test_keys_that_no_override_set_are_blamed_on_the_file(overrides: list[str], expected: str) -> None:
    assert error_of("small.yaml", *overrides) == f"small.yaml: {expected}"


def test_a_missing_prerequisite(here: Path) -> None:
    (here / "leaf.yaml").write_text("defaults: small.yaml\nprerequisite: sft.yaml\n")
    assert error_of("leaf.yaml") == f"leaf.yaml: prerequisite: there is no file {here / 'sft.yaml'}"


VLLM = "policy.generation.backend=vllm"
VLLM_CFG = "policy.generation.vllm_cfg"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([VLLM, "policy.generation.vllm_cfg.precision=int8"], f"{VLLM_CFG}.precision (int8)"),
        (
            [VLLM, f"{VLLM_CFG}.tensor_parallel_size=4", f"{VLLM_CFG}.expert_parallel_size=2"],
            f"{VLLM_CFG}.expert_parallel_size (2: neither 1 nor tensor_parallel_size, which is 4)",
        ),
        (
            [VLLM, "policy.generation.vllm_kwargs={speculative_config: {method: medusa}}"],
            "policy.generation.vllm_kwargs.speculative_config (medusa)",
        ),
    ],
)
def test_what_is_not_built_is_refused_when_switched_on(overrides: list[str], expected: str) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        load_config("small.yaml", overrides)
    assert str(caught.value) == f"small.yaml: not supported yet: {expected}"


def test_experts_are_spread_over_the_ranks_that_share_a_layer() -> None:
    sizes = [VLLM, f"{VLLM_CFG}.tensor_parallel_size=4"]
    for size in (1, 4):
        load_config("small.yaml", [*sizes, f"{VLLM_CFG}.expert_parallel_size={size}"])


RESOURCES = "policy.generation.colocated.resources"
DISJOINT = ["policy.generation.colocated.enabled=false", "cluster.gpus_per_node=8", "cluster.trainers=1"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{RESOURCES}.gpus_per_node=8"], f"{RESOURCES}.gpus_per_node: 8 of cluster.gpus_per_node (8) leaves none to"),
        ([f"{RESOURCES}.num_nodes=2"], f"{RESOURCES}.num_nodes: 2, but with cluster.num_nodes 1 it must be 1 or null"),
        (
            ["cluster.num_nodes=4", f"{RESOURCES}.num_nodes=1", f"{RESOURCES}.gpus_per_node=4"],
            f"{RESOURCES}.gpus_per_node: 4, but with cluster.num_nodes 4 it must be 8 or null",
        ),
        (
            ["cluster.num_nodes=4", f"{RESOURCES}.num_nodes=4"],
            f"{RESOURCES}.num_nodes: 4 of cluster.num_nodes (4) leaves none to training",
        ),
        (
            [VLLM, f"{RESOURCES}.gpus_per_node=2", "cluster.rollouts=3"],
            f"cluster.rollouts: needs 3 GPUs, and {RESOURCES}.gpus_per_node (2) leaves it 2",
        ),
        (
            [f"{RESOURCES}.gpus_per_node=5", "cluster.trainers=4"],
            f"cluster.trainers: needs 4 GPUs, and {RESOURCES}.gpus_per_node (5) leaves it 3",
        ),
        (
            ["cluster.num_nodes=2", f"{RESOURCES}.num_nodes=1", "cluster.trainers=16"],
            f"cluster.trainers: needs 16 GPUs, and {RESOURCES}.num_nodes (1) leaves it 8",
        ),
    ],
)
def test_gpus_set_aside_for_generation_are_part_of_the_cluster(overrides: list[str], expected: str) -> None:
    assert error_of("small.yaml", *DISJOINT, *overrides).startswith(f"command line: {expected}")
    load_config("small.yaml", [*DISJOINT, *overrides, "policy.generation.colocated.enabled=true"])


def test_gpus_set_aside_for_generation() -> None:
    load_config("small.yaml", ["policy.generation.colocated.enabled=false"])
    load_config("small.yaml", [*DISJOINT, VLLM, f"{RESOURCES}.gpus_per_node=2", "cluster.rollouts=2"])
    load_config("small.yaml", [*DISJOINT, "cluster.num_nodes=2", f"{RESOURCES}.num_nodes=1", "cluster.trainers=8"])


def test_vllm_is_an_engine() -> None:
    config = load_config("small.yaml", [VLLM, "policy.generation.vllm_kwargs={max_num_seqs: 8}"])
    assert config.policy.generation.vllm_kwargs == {"max_num_seqs": 8}
    assert config.policy.generation.vllm_cfg.max_model_len == config.policy.max_total_sequence_length


def test_arguments_of_vllm_are_checked_by_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from the source of vLLM, which is not installed here."""
    folder = tmp_path / "site" / "vllm" / "engine"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('it takes seconds')\n")
    (folder / "arg_utils.py").write_text("class EngineArgs:\n    max_num_seqs: int | None = None\n    seed: int = 0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    list_engine_arguments.cache_clear()
    try:
        load_config("small.yaml", [VLLM, "policy.generation.vllm_kwargs={max_num_seqs: 8}"])
        expected = "vLLM's engine has no such argument; did you mean 'max_num_seqs'?"
        found = error_of("small.yaml", VLLM, "policy.generation.vllm_kwargs={max_num_seq: 8}")
        assert found == f"command line: policy.generation.vllm_kwargs.max_num_seq: {expected}"
    finally:
        list_engine_arguments.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["policy.generation.vllm_kwargs={seed: 1}"], "vllm_kwargs.seed: Tandem sets it itself"),
        (
            ["policy.generation.vllm_kwargs={logits_processors: [own.Bias]}"],
            "vllm_kwargs.logits_processors: trainers cannot score the distribution that it makes",
        ),
        (
            ["policy.generation.vllm_kwargs={dtype: half}"],
            f"vllm_kwargs.dtype: set {VLLM_CFG}.precision instead",
        ),
        (
            [f"{VLLM_CFG}.max_model_len=1"],
            "vllm_cfg.max_model_len: 1 is less than policy.max_total_sequence_length (",
        ),
    ],
)
def test_arguments_that_tandem_sets(overrides: list[str], expected: str) -> None:
    assert error_of("small.yaml", VLLM, *overrides).startswith(f"command line: policy.generation.{expected}")


SPECULATES = "policy.generation.vllm_kwargs.speculative_config"
NGRAM = "method: ngram, num_speculative_tokens: 3"


@pytest.mark.parametrize(
    ("settings", "others", "expected"),
    [
        ("{num_speculative_tokens: 3}", [], ".method: missing; these are: ngram, draft_model, eagle3"),
        ("{method: ngram}", [], ".num_speculative_tokens: missing: how many tokens are drafted at once"),
        ("{method: ngram, num_speculative_tokens: 0}", [], ".num_speculative_tokens: 0 is not an integer at least 1"),
        ("{method: draft_model, num_speculative_tokens: 3}", [], ".model: missing; a draft model is a folder or"),
        (f"{{{NGRAM}, prompt_lookup_maxx: 3}}", [], ".prompt_lookup_maxx: Tandem passes no such setting; did you mean"),
        ("[1]", [], ": must be a mapping"),
        (f"{{{NGRAM}}}", [f"{VLLM_CFG}.precision=fp8"], f": cannot be combined with {VLLM_CFG}.precision: fp8"),
        (
            f"{{{NGRAM}}}",
            [f"{VLLM_CFG}.pipeline_parallel_size=2"],
            f": cannot be combined with {VLLM_CFG}.pipeline_parallel_size",
        ),
        (
            f"{{{NGRAM}}}",
            ["policy.generation.min_p=0.1"],
            ": cannot be combined with policy.generation.top_p, top_k, min_p or bad_words",
        ),
        (
            f"{{{NGRAM}, draft_tensor_parallel_size: 2}}",
            [],
            ".draft_tensor_parallel_size: 2, but vLLM shares a draft as the policy: tensor_parallel_size is 1",
        ),
    ],
)
def test_settings_of_speculative_decoding(settings: str, others: list[str], expected: str) -> None:
    found = error_of("small.yaml", VLLM, *others, f"policy.generation.vllm_kwargs={{speculative_config: {settings}}}")
    assert f"{SPECULATES}{expected}" in found


def test_the_draft_model_is_named_and_found_as_other_models_are() -> None:
    given = "{method: draft_model, model: org/draft, num_speculative_tokens: 3}"
    overrides = [VLLM, f"policy.generation.vllm_kwargs={{max_num_seqs: 8, speculative_config: {given}}}"]
    config = load_config("small.yaml", overrides)
    names: dict[str, str] = {}

    def change(key: str, name: str, _: object) -> str:
        names[key] = name
        return f"/cache/{name}"

    changed = change_model_names(config, change)
    assert names[f"{SPECULATES}.model"] == "org/draft"
    assert is_used(config, f"{SPECULATES}.model")
    assert not is_used(load_config("small.yaml"), f"{SPECULATES}.model")
    settings = changed.policy.generation.vllm_kwargs["speculative_config"]
    assert settings == {"method": "draft_model", "model": "/cache/org/draft", "num_speculative_tokens": 3}
    assert config.policy.generation.vllm_kwargs["speculative_config"]["model"] == "org/draft"
    assert changed.policy.generation.vllm_kwargs["max_num_seqs"] == 8


def test_an_engine_is_async_by_either_key() -> None:
    for key in ("policy.generation.async_engine", "policy.generation.vllm_cfg.async_engine"):
        timeout = "policy.generation.generation_timeout=3"
        config = load_config("small.yaml", [f"{key}=true", timeout])
        assert config.policy.generation.is_async
        assert config.policy.generation.generation_timeout == 3
        assert error_of("small.yaml", timeout) == (
            "command line: policy.generation.generation_timeout: needs policy.generation.async_engine"
        )


def test_what_the_run_does_not_read_is_not_refused() -> None:
    load_config("small.yaml", ["policy.generation.vllm_cfg.tensor_parallel_size=2"])
    load_config("small.yaml", ["algorithm=sft", "policy.generation.backend=vllm", "grpo.max_rollout_turns=9"])
    load_config("small.yaml", ["algorithm=sft", "cluster.rollouts=0", "policy.generation.temperature=0"])


def test_a_mapping_is_blamed_by_the_name_it_was_given() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"grpo": {}, "policy": {"model_nam": "m"}, "data": {}}, source="request")
    assert str(caught.value) == "request: policy.model_nam: unknown key; did you mean 'model_name'?"


DTENSOR = "policy.dtensor_cfg"
TP2 = [f"{DTENSOR}.tensor_parallel_size=2", "cluster.trainers=2"]
EP2 = [f"{DTENSOR}.expert_parallel_size=2", "cluster.trainers=2"]
EXPERTS = (
    "{config: {model_type: qwen3_moe, num_attention_heads: 6, num_key_value_heads: 3, num_experts: %d}, "
    "characters: abc}"
)
MODEL = "{config: {model_type: %s, num_attention_heads: 6, num_key_value_heads: 3}, characters: abc}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [*TP2, f"policy.new_model={MODEL % 'stablelm'}"],
            f"{DTENSOR}.tensor_parallel_size: 2, but there is no plan for stablelm, only for llama, qwen2, qwen3, "
            "qwen3_moe, mistral, gemma3_text, phi3, gpt_oss, glm4_moe, and those that Transformers cuts like Llama; "
            f"{DTENSOR}.custom_parallel_plan may name one",
        ),
        (
            ["policy.hf_config_overrides={rope_teta: 10}", f"policy.new_model={MODEL % 'llama'}"],
            "policy.hf_config_overrides.rope_teta: a llama has no such field; did you mean 'rope_theta'?",
        ),
        (
            ["policy.hf_config_overrides={model_type: qwen3}", f"policy.new_model={MODEL % 'llama'}"],
            "policy.hf_config_overrides.model_type: the model type cannot be overridden: it comes with the weights",
        ),
        (
            ["policy.hf_config_overrides={max_position_embeddings: 8}", f"policy.new_model={MODEL % 'llama'}"],
            "policy.max_total_sequence_length: 512 is more than the 8 positions of the model",
        ),
        (
            ["policy.megatron_cfg.enabled=true", f"policy.new_model={MODEL % 'gemma3_text'}"],
            "policy.megatron_cfg.enabled: true, but Megatron-Core trains llama, qwen2, qwen3, qwen3_moe, deepseek_v3, "
            "mistral, phi3, glm4_moe here, not gemma3_text",
        ),
        (
            [VLLM, f"{VLLM_CFG}.precision=fp8", f"policy.new_model={MODEL % 'gpt_oss'}"],
            f"{VLLM_CFG}.precision: fp8, but blocks with scales are known of llama, qwen2, qwen3, qwen3_moe, mistral, "
            "gemma3_text, phi3, glm4_moe, not of gpt_oss",
        ),
        (
            [VLLM, f"policy.new_model={MODEL % 'minimax_m2'}"],
            "policy.new_model.config.rotary_dim: missing, but vLLM reads it of a minimax_m2: the model's files have it",
        ),
        (
            [
                VLLM,
                f"policy.new_model={MODEL % 'deepseek_v3'}",
                "policy.new_model.config.topk_method=noaux_tc",
            ],
            "policy.new_model.config.scoring_func: missing, but vLLM reads it of a deepseek_v3: the model's files have "
            "it",
        ),
        (
            [*TP2, f"policy.new_model={MODEL % 'llama'}"],
            f"{DTENSOR}.tensor_parallel_size: 2 does not divide 3 key-value heads",
        ),
        (
            [f"{DTENSOR}.tensor_parallel_size=4", "cluster.trainers=4", f"policy.new_model={MODEL % 'llama'}"],
            f"{DTENSOR}.tensor_parallel_size: 4 does not divide 6 attention heads",
        ),
        (
            [f"{DTENSOR}.context_parallel_size=3", "cluster.trainers=4"],
            f"cluster.trainers: 4 is not a multiple of 3, the product of {DTENSOR}.context_parallel_size (3)",
        ),
        (
            [*EP2, f"policy.new_model={MODEL % 'llama'}"],
            f"{DTENSOR}.expert_parallel_size: 2, but the model has no experts",
        ),
        (
            [*EP2, f"policy.new_model={EXPERTS % 3}"],
            f"{DTENSOR}.expert_parallel_size: 2 does not divide 3 experts",
        ),
        (
            [*EP2, f"policy.new_model={EXPERTS % 4}", f"{DTENSOR}.dp_replicate_size=2"],
            f"{DTENSOR}.expert_parallel_size: 2 * dp_replicate_size (2) does not divide 2, the data-parallel and "
            "context ranks",
        ),
        (
            [*TP2, f"{DTENSOR}.dp_replicate_size=2"],
            f"{DTENSOR}.dp_replicate_size: 2 does not divide 1, the data-parallel and context ranks",
        ),
        (
            [*TP2, f"{DTENSOR}.custom_parallel_plan=plan"],
            f"{DTENSOR}.custom_parallel_plan: 'plan' is not a dotted path, such as package.plan",
        ),
        (
            [f"{DTENSOR}.custom_parallel_plan=my.plan"],
            f"{DTENSOR}.custom_parallel_plan: there is a plan, but {DTENSOR}.tensor_parallel_size is 1",
        ),
    ],
)
def test_a_model_can_be_cut_over_its_ranks(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("small.yaml", overrides)
    assert str(caught.value).endswith(f": {expected}")


def test_a_plan_of_ones_own_may_be_for_any_model() -> None:
    own = [*TP2, f"policy.new_model={MODEL % 'gemma2'}", f"{DTENSOR}.custom_parallel_plan=my.plan"]
    assert load_config("small.yaml", own).policy.model_parallel_size == 2
