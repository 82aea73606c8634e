"""What is known by name of NeMo-RL 0.8's files: what it does here, and what is said of it where it does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import build_config, dump_yaml, load_config, notices
from tandem.config.dump import make_plain
from tandem.config.schema.algorithms import TeacherCfg

FILE = "grpo_math_1B.yaml"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "nemo_rl_08")
    monkeypatch.setenv("TANDEM_TEST_HOME", "/data")


def small(**over: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "grpo": {},
        "policy": {"model_name": "model", "generation": {}},
        "data": {"dataset_name": "gsm8k"},
        "env": {"exact_match": {}},
    }
    return {**base, **over}


def test_a_file_is_taken_with_notices_for_what_does_nothing_here(tmp_path: Path) -> None:
    config = load_config(FILE)
    assert sorted(line.partition(" ")[0] for line in config.ignored) == [
        "grpo.debug_payload_metrics",
        "grpo.deduplicate_multimodal_data",
        "policy.generation.vllm_cfg.http_refit_server_port",
        "telemetry",
    ]
    said = {line.partition(" ")[0] for line in notices(config) if " has no effect: " in line}
    assert said >= {
        "grpo.calculate_advantages_on_gpu",
        "grpo.async_grpo.max_generation_failures",
        "reward_penalties.penalize_unwanted_tokens",
        "policy.sequence_packing.microbatch_order",
        "policy.is_vlm",
        "policy.generation.refit_transport",
        "policy.generation.refit_cfg",
        "policy.generation.vllm_cfg.logprobs_mode",
        "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update",
    }
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert make_plain(load_config(tmp_path / "resolved.yaml")) == make_plain(config)


def test_values_have_the_names_that_they_have_here() -> None:
    config = load_config(FILE)
    assert config.policy.sequence_packing.algorithm == "modified_first_fit_decreasing"
    section, generation = config.grpo, config.policy.generation
    assert (section.val_start_at, section.num_val_generations_per_prompt) == (0, 4)
    assert (section.val_temperature, generation.validation_top_p, generation.validation_top_k) == (0.6, 0.95, None)
    assert (generation.top_p, generation.top_k) == (1.0, None)
    assert section.stop_at_validation_metric == "val_pass_k"
    assert section.leaves_out_equal_rewards
    for metric in ("accuracy", "val_accuracy", "val:accuracy"):
        given = {"stop_at_validation_metric": metric, "stop_at_validation_threshold": 1}
        assert build_config(small(grpo=given)).grpo.stop_at_validation_metric == "val_accuracy"
    for top_k, expected in ((-1, None), (0, None), (5, 5), (None, 7)):
        policy = {"model_name": "model", "generation": {"top_k": 7, "val_top_k": top_k}}
        assert build_config(small(policy=policy)).policy.generation.validation_top_k == expected


def test_a_file_of_asynchronous_ppo_is_taken() -> None:
    config = load_config("ppo_math_1B.yaml")
    assert sorted(line.partition(" ")[0] for line in config.ignored) == [
        "ppo.critic_ppo_epochs",
        "ppo.warm_start_value_checkpoint",
    ]
    assert (config.max_trajectory_age_steps, config.updates_in_flight) == (2, True)
    assert config.largest_logprob_error == 3
    said = [line for line in notices(config) if "async_ppo" in line]
    assert said == [
        "ppo.async_ppo.warmup_generation_lead_steps (4) has no effect: engines are ahead by up to "
        "max_trajectory_age_steps, whatever is trained"
    ]


def test_no_limit_and_nothing_asynchronous_may_be_written_out() -> None:
    config = build_config(small(grpo={"max_num_steps": -1, "async_grpo": None}))
    assert config == build_config(small())
    with pytest.raises(ConfigError, match=r"grpo\.max_num_steps: expected an integer at least 0, got -2"):
        build_config(small(grpo={"max_num_steps": -2}))


def test_the_usual_number_of_samples_gives_way() -> None:
    for older, newer, expected in ((1, 4, 4), (4, 1, 4), (4, 4, 4), (None, 2, 2), (3, None, 3)):
        given = {"num_val_generations_per_prompt": older, "val_num_generations_per_prompt": newer}
        grpo = {key: value for key, value in given.items() if value is not None}
        assert build_config(small(grpo=grpo)).grpo.num_val_generations_per_prompt == expected


def test_nothing_is_said_of_what_asks_for_nothing() -> None:
    generation = {"backend": "vllm", "vllm_cfg": {"logprobs_mode": "processed_logprobs"}, "refit_cfg": {}}
    policy = {"model_name": "model", "is_vlm": False, "generation": generation}
    grpo = {"calculate_advantages_on_gpu": False, "async_grpo": {"max_generation_failures": 0}, "val_start_at": -1}
    of_these = ("is_vlm", "logprobs_mode", "refit_", "advantages_on", "max_gen", "val_start", "penal", "zero_var")
    said = notices(build_config(small(policy=policy, grpo=grpo)))
    assert [line for line in said if any(each in line for each in of_these)] == []


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        (
            {"grpo": {"val_num_generations_per_prompt": 2, "num_val_generations_per_prompt": 3}},
            "grpo.val_num_generations_per_prompt: 2, but grpo.num_val_generations_per_prompt is 3: they are the same",
        ),
        (
            {"grpo": {"val_temperature": 1.0}, "policy": {"model_name": "m", "generation": {"val_temperature": 0.5}}},
            "policy.generation.val_temperature: 0.5, but grpo.val_temperature is 1.0: they are the same",
        ),
        (
            {"grpo": {"stop_at_validation_metric": "acuracy", "stop_at_validation_threshold": 1}},
            "grpo.stop_at_validation_metric: validation has no val_acuracy, only val_reward, val_accuracy; "
            "did you mean 'val_accuracy'?",
        ),
        (
            {"grpo": {"stop_at_validation_metric": "pass_k", "stop_at_validation_threshold": 1}},
            "grpo.stop_at_validation_metric: validation has no val_pass_k, only val_reward, val_accuracy; "
            "grpo.num_val_generations_per_prompt is 1",
        ),
        (
            {"grpo": {"stop_at_validation_metric": "accuracy"}},
            "grpo.stop_at_validation_threshold: null, but grpo.stop_at_validation_metric is val_accuracy",
        ),
        (
            {
                "grpo": {
                    "stop_at_validation_metric": "accuracy",
                    "stop_at_validation_threshold": 1,
                    "val_period": 0,
                    "val_at_end": True,
                }
            },
            "grpo.stop_at_validation_metric: val_accuracy is never measured before the end: grpo.val_period is 0",
        ),
        (
            {
                "grpo": {"stop_at_validation_metric": "accuracy", "stop_at_validation_threshold": 1},
                "data": {"dataset_name": "gsm8k", "num_validation": 0},
                "checkpointing": {"metric_name": "reward"},
            },
            "grpo.stop_at_validation_metric: val_accuracy is never measured: there is nothing to validate on "
            "(data.num_validation is 0, or data.validation null)",
        ),
        ({"grpo": {"val_start_at": -2}}, "grpo.val_start_at: expected an integer at least 0, got -2"),
    ],
)
def test_what_cannot_be_is_said(over: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(small(**over), "own.yaml")
    assert caught.value.problems == (f"own.yaml: {expected}",)


@pytest.mark.parametrize(
    ("grpo", "expected"),
    [
        ({"val_start_at": 5, "val_period": 0, "val_at_end": True}, "grpo.val_start_at (5) has no effect: "),
        ({"val_start_at": 5, "max_num_steps": 4}, "grpo.val_start_at (5) is after the last step (4)"),
        ({"stop_at_validation_threshold": 0.5}, "grpo.stop_at_validation_threshold (0.5) has no effect: "),
        (
            {"zero_variance_prompt_filtering": True, "use_dynamic_sampling": True},
            "grpo.zero_variance_prompt_filtering (true) has no effect: grpo.use_dynamic_sampling leaves",
        ),
    ],
)
def test_what_has_no_effect_is_said(grpo: dict[str, Any], expected: str) -> None:
    assert any(line.startswith(expected) for line in notices(build_config(small(grpo=grpo))))


def test_a_data_set_beside_those_that_are_listed_is_overruled_by_them() -> None:
    train = [{"dataset_name": "DeepScaler"}, {"dataset_name": "DAPOMath17K"}]
    config = build_config(small(data={"dataset_name": "gsm8k", "train": train}))
    assert config.data.dataset_name == "DeepScaler"
    assert [view.dataset_name for view in config.data.train_sets] == ["DeepScaler", "DAPOMath17K"]
    told = "data.dataset_name (gsm8k) has no effect: data.train says DeepScaler"
    assert config.ignored == (told,)
    assert notices(config)[0] == told
    again = build_config(make_plain(config))
    assert (again.ignored, again.data) == (config.ignored, config.data), "it is told once"


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("gsm8k", {}, "gsm8k"),
        ("ResponseDataset", {"data_path": "a.jsonl"}, "ResponseDataset"),
        ("PreferenceDataset", {"data_path": "a.jsonl"}, "PreferenceDataset"),
        ("gsm8k", {"data_path": "a.jsonl"}, "ResponseDataset"),
        ("gsm8k", {"dataset_name": "gsm8k"}, "gsm8k"),
    ],
)
def test_a_listed_data_set_without_a_name_has_the_one_beside_it(
    name: str, entry: dict[str, Any], expected: str
) -> None:
    algorithm = "dpo" if name == "PreferenceDataset" else "grpo"
    config = build_config(small(data={"dataset_name": name, "train": entry}, algorithm=algorithm))
    assert config.data.dataset_name == expected
    assert bool(config.ignored) == (name != expected)


MAIN = """
policy:
  model_name: model
  BACKEND: {enabled: true, tensor_parallel_size: 2, sequence_parallel: false}
  make_sequence_length_divisible_by: ${policy.BACKEND.tensor_parallel_size}
  generation: {}
data: {dataset_name: gsm8k}
env:
  reward_model: {model_name: scorer, BACKEND: {cpu_offload: false}}
cluster: {gpus_per_node: 2}
grpo: {}
"""


def test_the_backend_of_the_main_branch_is_that_of_the_releases(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.yaml" for name in ("automodel_cfg", "dtensor_cfg")}
    for name, file in files.items():
        file.write_text(MAIN.replace("BACKEND", name))
    overrides = ["policy.{}.expert_parallel_size=1", "policy.{}={{sequence_parallel: true}}"]
    newer, earlier = (
        load_config(file, [override.format(name) for override in overrides]) for name, file in files.items()
    )
    assert newer == earlier
    section = newer.policy.dtensor_cfg
    assert (section.tensor_parallel_size, section.sequence_parallel) == (2, True)
    assert newer.policy.make_sequence_length_divisible_by == 2
    child = tmp_path / "child.yaml"
    child.write_text("defaults: dtensor_cfg.yaml\npolicy: {automodel_cfg: {sequence_parallel: true}}\n")
    assert load_config(child) == newer, "files of both kinds inherit from each other"


def test_problems_with_the_backend_have_the_name_that_the_file_has(tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    file.write_text(
        MAIN.replace("BACKEND", "automodel_cfg").replace("sequence_parallel: false", "tensor_paralel_size: 2")
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["policy.automodel_cfg.cpu_offload=3", "policy.dtensor_cfg.activation_checkpointing=3"])
    assert sorted(line.split(": ")[1] for line in caught.value.problems) == [
        "policy.automodel_cfg.cpu_offload",
        "policy.automodel_cfg.tensor_paralel_size",
        "policy.dtensor_cfg.activation_checkpointing",
    ]
    file.write_text(MAIN.replace("BACKEND", "automodel_cfg").replace("sequence_parallel: false", "quorum: 2"))
    ignored = load_config(file, ["nemo_rl_version=newer"]).ignored
    assert [line.partition(" ")[0] for line in ignored] == ["policy.automodel_cfg.quorum"]
    both = small(policy={"model_name": "model", "automodel_cfg": {}, "dtensor_cfg": {}, "generation": {}})
    with pytest.raises(ConfigError, match=r"policy\.automodel_cfg: unknown key"):
        build_config(both)


DISTILLED: dict[str, Any] = {
    "distillation": {"num_prompts_per_step": 4, "val_period": 0},
    "policy": {"model_name": "model"},
    "data": {"train": {"dataset_name": "arrow_text", "data_files": "a.txt"}, "validation": None},
}


def test_the_map_to_a_teachers_tokens_is_read_where_the_main_branch_places_it() -> None:
    """NeMo-RL's `xtoken_off_policy_distillation.yaml` (0bd743f3) has it in `teachers[].aligner`."""
    same = {"projection_matrix_path": None, "drop_first_assistant_chunk_kl": False, "pseudo_target_path": None}
    config = build_config({**DISTILLED, "teachers": [{"model_name": "a", "aligner": same}]})
    assert config == build_config({**DISTILLED, "teachers": [{"model_name": "a"}]})
    for place in ({"projection_matrix_path": "map.pt"}, {"aligner": {**same, "projection_matrix_path": "map.pt"}}):
        teachers = [{"model_name": "a", **place}, {"model_name": "b"}]
        with pytest.raises(NotSupportedYet, match=r"teachers\[0\]\.projection_matrix_path \(map\.pt\)"):
            build_config({**DISTILLED, "teachers": teachers})


def test_arguments_of_megatron_core_that_nemo_rl_always_sets_ask_for_nothing() -> None:
    """NeMo-RL sets both whatever a file says (`nemo_rl/models/megatron/setup.py`); `mopd.yaml` (0e14faa7) repeats one.

    The fused log-probabilities have another name on its main branch (a04abc40).
    """
    always = {"calculate_per_token_loss": True, "perform_initialization": True}
    renamed = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 128}
    plain, newer = (
        build_config(small(policy={"model_name": "m", "generation": {}, "megatron_cfg": {"enabled": True, **given}}))
        for given in (
            {"use_linear_ce_fusion_loss": True, "linear_ce_fusion_chunk_size": 128},
            {**always, **renamed},
        )
    )
    assert newer == plain
    off = {"enabled": True, "calculate_per_token_loss": False}
    with pytest.raises(ConfigError, match=r"calculate_per_token_loss: cannot be set here: Tandem sets it itself"):
        build_config(small(policy={"model_name": "m", "generation": {}, "megatron_cfg": off}))


@pytest.mark.parametrize(("size", "of_megatron", "of_dtensor"), [(None, 4, 1), (2, 2, 2)])
def test_teachers_have_expert_parallelism_of_their_own(size: int | None, of_megatron: int, of_dtensor: int) -> None:
    """NeMo-RL's `mopd.yaml` (0e14faa7) sets it in `default_teacher_cfg`."""
    policy = {"model_name": "m", "generation": {}, "megatron_cfg": {"expert_model_parallel_size": 4}}
    model = build_config(small(policy=policy)).policy
    sizes = TeacherCfg(expert_model_parallel_size=size)
    enabled = msgspec.structs.replace(model, megatron_cfg=msgspec.structs.replace(model.megatron_cfg, enabled=True))
    assert sizes.applied_to(enabled).megatron_cfg.expert_model_parallel_size == of_megatron
    assert sizes.applied_to(model).dtensor_cfg.expert_parallel_size == of_dtensor


def test_layers_that_stay_as_they_are_in_float8_have_a_newer_key() -> None:
    """It replaces `quantization_ignored_layer_kws` in NeMo-RL 0.8, and is as little built."""
    vllm = {"precision": "fp8", "quantization_ignore_patterns": ["mtp.*"]}
    policy = {"model_name": "m", "generation": {"backend": "vllm", "vllm_cfg": vllm}}
    with pytest.raises(NotSupportedYet, match=r"vllm_cfg\.quantization_ignore_patterns"):
        build_config(small(policy=policy))


def test_the_template_of_vllms_own_server_is_that_of_the_agents_prompts() -> None:
    """NeMo-RL's `grpo_qwen3_30ba3b_thinking_swe2.yaml` (06f9783e) gives the server another one than the tokenizer's."""
    arguments = {"chat_template": "{{ messages }}", "default_chat_template_kwargs": {"enable_thinking": True}}
    policy: dict[str, Any] = {
        "model_name": "m",
        "generation": {"backend": "vllm", "vllm_cfg": {"http_server_serving_chat_kwargs": arguments}},
    }
    rows = {"train": {"dataset_name": "NemoGymDataset", "data_path": "a.jsonl"}}
    gym = small(policy=policy, data=rows, env={"should_use_nemo_gym": True, "nemo_gym": {"config_paths": ["a.yaml"]}})
    tokenizer = build_config(gym).policy.tokenizer
    assert (tokenizer.chat_template, tokenizer.chat_template_kwargs) == ("{{ messages }}", {"enable_thinking": True})
    policy["tokenizer"] = {"chat_template": "own", "chat_template_kwargs": {"enable_thinking": False, "tools": 1}}
    tokenizer = build_config(gym).policy.tokenizer
    assert tokenizer.chat_template == "own"
    assert tokenizer.chat_template_kwargs == {"enable_thinking": False, "tools": 1}
    alone = build_config(small(policy={**policy, "tokenizer": {}})).policy.tokenizer
    assert alone.chat_template == "default", "no agent asks the server"


def test_conversations_for_distillation_have_a_processor_of_that_name() -> None:
    """NeMo-RL's recipe of native chat (88ec9953) names it."""
    train = {"dataset_name": "openai_format", "data_path": "a.jsonl", "processor": "chat_kd_processor"}
    config = build_config(
        {**DISTILLED, "data": {"train": train, "validation": None}, "teachers": [{"model_name": "a"}]}
    )
    assert not any("processor" in line for line in notices(config))
