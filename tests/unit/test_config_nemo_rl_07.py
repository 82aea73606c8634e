"""Files in the form of NeMo-RL v0.7's, one of each kind (``nemo_rl_07/``): each is taken, or refused by exact names.

They are written from its list of keys; between them they set every section that it has.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import dump_yaml, load_config, notices
from tandem.config.dump import make_plain
from tandem.config.installed.vllm_arguments import select_forwarded
from tandem.coordinator.cli import main

FILES = Path(__file__).parent / "nemo_rl_07"
NAMES = sorted(str(path.relative_to(FILES)) for path in FILES.rglob("*.yaml"))

REFUSED = {
    "audio_grpo_3B.yaml": [
        "policy.tokenizer.video",
        "policy.generation.vllm_cfg.limit_mm_per_prompt.audio (1)",
        "data.dataset_name (avqa: audio)",
    ],
    "grpo_nemo_gym.yaml": [
        "policy.draft.enabled (true)",
        "policy.generation.backend (sglang)",
        "logger.swanlab_enabled (true)",
    ],
}
"""Files that switch on what is not built, with its names."""

NOT_HERE = {
    "recipes/sft-llama3.1-8b-1n8g-megatron-lora.yaml": (
        "transformer_engine",
        "policy.megatron_cfg.fp8_cfg.enabled: true needs Transformer Engine, which is not installed here",
    ),
}
"""Files that need a package, with its module and the error without it."""

NOTICED = {
    "dapo_math_7B.yaml": ["cluster.segment_size (16)", "policy.dtensor_cfg._v2 (false)"],
    "grpo_math_1B.yaml": ["policy.generation.port_range_low (11001)", "policy.generation.port_range_high (15000)"],
    "grpo_nemo_gym.yaml": [
        "checkpointing.save_optimizer (false)",
        "cluster.segment_size (8)",
        "cluster.master_port_range_low (25000)",
        "cluster.master_port_range_high (28000)",
        "data_plane.enabled (true)",
        "policy.logprob_chunk_size (2048)",
        "policy.refit_buffer_size_gb (4.0)",
    ],
    "vlm_grpo_3B.yaml": ["policy.generation.vllm_cfg.limit_mm_per_prompt.image (2)"],
    "recipes/grpo-qwen3-30ba3b-4n8g-megatron.yaml": [
        "policy.megatron_cfg.moe_router_enable_expert_bias (true)",
        "policy.generation.vllm_cfg.enable_expert_parallel (true)",
        "policy.generation.vllm_cfg.env_vars",
    ],
}
"""Some of what is taken, and decided elsewhere."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    monkeypatch.setenv("TANDEM_TEST_HOME", "/data")


def test_every_kind_is_here() -> None:
    assert len(NAMES) == 22
    assert set(REFUSED) | set(NOTICED) | set(NOT_HERE) <= set(NAMES)


def error_here(name: str) -> str | None:
    """Return the error of a file that needs a package which is not installed; None for others."""
    module, error = NOT_HERE.get(name, (None, None))
    return None if module is None or importlib.util.find_spec(module) is not None else error


@pytest.mark.parametrize("name", NAMES)
def test_it_is_taken_or_refused_by_these_names(name: str, tmp_path: Path) -> None:
    config = load_config(name, to_run=False)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    # What is inherited of another algorithm's section is not written.
    assert make_plain(load_config(tmp_path / "resolved.yaml", to_run=False)) == make_plain(config)
    said = notices(config)
    for begin in NOTICED.get(name, []):
        assert any(line.startswith(f"{begin}") and " has no effect: " in line for line in said), (begin, said)
    if (error := error_here(name)) is not None:
        with pytest.raises(ConfigError) as missing:
            load_config(name)
        assert str(missing.value) == f"{name}: {error}"
        return
    if name not in REFUSED:
        assert load_config(name) == config
        return
    with pytest.raises(NotSupportedYet) as caught:
        load_config(name)
    begin, _, listed = str(caught.value).partition(": not supported yet: ")
    assert begin == name
    rest = listed
    for expected in REFUSED[name]:
        assert rest.startswith(expected), (expected, listed)
        _, _, rest = rest[len(expected) :].partition(", " if expected != REFUSED[name][-1] else "$")
    assert rest == "", listed


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_check_finds_nothing_wrong_but_what_is_not_on_this_machine(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--resolved", name, "cluster.threads_per_process=1"]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out.startswith("algorithm: ") == (error_here(name) is None)
    missing = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    begin = "error: policy.model_name: " if error_here(name) is None else f"error: {name}: policy.model_name: "
    assert any(line.startswith(begin) and "does not exist" in line for line in missing)
    assert all(" does not exist" in line or " is not installed" in line for line in missing), printed.err


def test_data_sets_are_those_of_the_file() -> None:
    data = load_config("grpo_multiple_datasets.yaml").data
    assert [view.dataset_name for view in data.train_sets] == ["OpenMathInstruct-2", "DeepScaler"]
    assert [(each.dataset_name, each.split, each.repeat) for each in data.validation] == [
        ("AIME2024", "train", 16),
        ("DAPOMathAIME2024", "train", 1),
    ]
    assert data.environment == "math"
    data = load_config("recipes/dpo-llama3.1-8b-1n8g-sets.yaml").data
    assert [(each.dataset_name, each.prompt_key) for each in data.train] == [
        ("BinaryPreferenceDataset", "context"),
        ("Tulu3Preference", "prompt"),
    ]
    assert [each.title for each in data.validation] == ["easy", "hard"]


def test_metrics_have_our_names() -> None:
    for name, metric in (
        ("grpo_math_1B.yaml", "val_accuracy"),
        ("sft.yaml", "val_loss"),
        ("dpo.yaml", "val_loss"),
    ):
        assert load_config(name).checkpointing.metric_name == metric
    assert load_config("dpo.yaml", ["checkpointing.metric_name=train:loss"]).checkpointing.metric_name == "loss"


def test_validation_of_all_and_of_nothing_and_the_metric_of_nemo_gym() -> None:
    overrides = [
        "grpo.max_val_samples=null",
        "grpo.val_batch_size=null",
        "checkpointing.metric_name=val:total_reward/mean",
    ]
    config = load_config("grpo_math_1B.yaml", overrides)
    assert config.grpo.max_val_samples == 1_000_000
    assert config.checkpointing.metric_name == "val_reward"
    config = load_config("grpo_math_1B.yaml", ["grpo.val_period=-1", "checkpointing.enabled=false"])
    assert config.grpo.val_period == 0


def test_a_key_that_only_interpolations_read_is_no_section(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        f"defaults: {FILES}/grpo_math_1B.yaml\nroot_dir: /models\npolicy: {{model_name: '${{root_dir}}/one'}}\n"
    )
    assert load_config(tmp_path / "own.yaml").policy.model_name == "/models/one"
    with pytest.raises(ConfigError, match="root_dir: unknown key"):
        load_config(tmp_path / "own.yaml", ["policy.model_name=two"])


def test_nemo_gym_scores_everything_where_it_is_asked_for() -> None:
    config = load_config("grpo_nemo_gym.yaml", ["data.default.env_name=math"], to_run=False)
    assert config.environments == ("nemo_gym",)
    (settings,) = (entry.nemo_gym for entry in config.env.values() if entry.nemo_gym is not None)
    assert settings.config["code_gen"]["resources_servers"]["code_gen"]["num_processes"] == 1024
    assert settings.config["config_paths"] == ["responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"]
    assert settings.config["uv_venv_dir"] == "/opt/gym"


@pytest.mark.parametrize(
    ("arguments", "own", "parser"),
    [
        ("{enable_auto_tools: true, tool_parser: hermes}", "null", "hermes"),
        ("{enable_auto_tools: true, tool_parser: qwen3_coder, reasoning_parser: nano_v3}", "null", "qwen3_coder"),
        ("{enable_auto_tools: true, tool_parser: nemotron_json}", "null", "auto"),
        ("{enable_auto_tools: true, tool_parser: hermes}", "mistral", "mistral"),
        ("{enable_auto_tools: false, tool_parser: hermes}", "null", None),
        ("{reasoning_parser: deepseek_r1}", "null", None),
        ("null", "null", None),
    ],
)
def test_agents_of_nemo_gym_get_tool_calls_as_files_tell_vllms_server(
    arguments: str, own: str, parser: str | None
) -> None:
    """NeMo-RL's files have no key for it but the argument of vLLM's own server."""
    given = [
        f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs={arguments}",
        f"policy.generation.tool_call_parser={own}",
    ]
    config = load_config("grpo_nemo_gym.yaml", given, to_run=False)
    assert config.policy.generation.tool_call_parser == parser
    alone = load_config("grpo_math_1B.yaml", given)
    assert alone.policy.generation.tool_call_parser == (None if own == "null" else own), "no agent asks for it"


def test_rows_of_nemo_gym_are_taken_in_the_earlier_form_too(tmp_path: Path) -> None:
    """NeMo-RL's `grpo_workplace_assistant_nemotron_nano_v2_9b.yaml` had these keys before its lists of data sets."""
    agent = "workplace_assistant_simple_agent"
    own = {
        "defaults": str(FILES / "grpo_math_1B.yaml"),
        "data": {
            "_override_": True,
            "train_jsonl_fpath": "train.jsonl",
            "validation_jsonl_fpath": "validation.jsonl",
            "agent_name": agent,
            "shuffle": True,
            "num_workers": 0,
        },
        "logger": {"wandb": {"name": "own"}},
        "env": {
            "_override_": True,
            "should_use_nemo_gym": True,
            "nemo_gym": {
                "config_paths": ["resources_servers/workplace_assistant/configs/workplace_assistant.yaml"],
                agent: {"responses_api_agents": {"simple_agent": {"max_steps": 6}}},
            },
        },
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    config = load_config(tmp_path / "own.yaml", to_run=False)
    assert config.environments == ("nemo_gym",)
    settings = config.env["nemo_gym"].nemo_gym
    assert settings is not None
    assert settings.agent == agent
    assert sorted(settings.config) == ["config_paths", agent]
    assert [each.data_path for each in (*config.data.train, *config.data.validation)] == [
        "train.jsonl",
        "validation.jsonl",
    ]
    assert {each.dataset_name for each in (*config.data.train, *config.data.validation)} == {"NemoGymDataset"}
    with pytest.raises(ConfigError, match=r"data\.train_jsonl_fpath: unknown key"):
        load_config("grpo_math_1B.yaml", ["data.train_jsonl_fpath=train.jsonl"], to_run=False)


def test_arguments_of_vllm_that_are_taken_and_not_handed_on() -> None:
    given = "policy.generation.vllm_kwargs={enable_chunked_prefill: false, tokenizer: other, max_num_seqs: 8}"
    config = load_config("grpo_math_1B.yaml", [given])
    assert select_forwarded(config.policy.generation.vllm_kwargs) == {"max_num_seqs": 8}
    said = [line for line in notices(config) if ".vllm_kwargs." in line]
    assert said == [
        "policy.generation.vllm_kwargs.enable_chunked_prefill (false) has no effect: prompts are computed whole",
        "policy.generation.vllm_kwargs.tokenizer (other) has no effect: engines are given tokens",
    ]


def test_a_reward_model_has_gpus_of_its_own_and_what_it_does_not_read_is_said() -> None:
    config = load_config("grpo_rm_1B.yaml")
    assert config.data.environment == "reward_model"
    assert config.env["reward_model"].batch_size == config.policy.train_micro_batch_size
    assert (config.cluster.gpus_per_node, config.cluster.trainers, config.cluster.rollouts) == (2, 1, 1)
    keys = ("sequence_packing.enabled=true", "dynamic_batching.enabled=true", "max_grad_norm=1.0")
    overrides = [*(f"env.reward_model.{key}" for key in keys), "cluster.num_nodes=2"]
    said = [line for line in notices(load_config("grpo_rm_1B.yaml", overrides)) if line.startswith("env.reward_model")]
    assert [line.split()[0].removeprefix("env.reward_model.") for line in said] == [
        *(key.partition("=")[0] for key in keys),
        "resources.gpus_per_node",
    ]
    other = load_config("grpo_rm_1B.yaml", ["data.default.env_name=math"])
    assert other.cluster.trainers == 2, "one that scores nothing takes no GPU"


def test_environment_variables_reach_the_trainers_of_either_backend() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert load_config("sft.yaml").policy.environment == variables
    name = "recipes/grpo-qwen3-30ba3b-4n8g-megatron.yaml"
    assert load_config(name, to_run=False).policy.environment == {"NRL_REFIT_NUM_BUFFERS": "1"}
