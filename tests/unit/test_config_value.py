"""The configuration of PPO's value model: what follows from the policy, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config, notices
from tandem.config.dump import config_from_json, config_to_json, make_plain, resume_differences

POLICY: dict[str, Any] = {"model_name": "model", "max_total_sequence_length": 32, "train_global_batch_size": 16}
DATA = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
NO_PENALTY = {"reference_policy_kl_penalty": 0.0}


def ppo(policy: dict[str, Any] | None = None, **sections: Any) -> Config:
    settings: dict[str, Any] = {"ppo": {}, "loss_fn": NO_PENALTY, "policy": POLICY | (policy or {}), "data": DATA}
    return build_config(settings | sections)


def test_a_value_model_is_one_like_the_policy_unless_its_section_says_otherwise() -> None:
    config = ppo({"precision": "float32", "train_micro_batch_size": 2, "dtensor_cfg": {"tensor_parallel_size": 1}})
    assert config.algorithm == "ppo"
    value, policy = config.settings_of("value"), config.policy
    assert value is config.value
    for key in ("model_name", "precision", "train_global_batch_size", "train_micro_batch_size", "dtensor_cfg"):
        assert getattr(value, key) == getattr(policy, key), key
    own = ppo(value={"model_name": "critic", "precision": "float32", "sequence_packing": {"enabled": True}})
    assert (own.settings_of("value").model_name, own.policy.model_name) == ("critic", "model")
    assert own.settings_of("reference") is own.settings_of("policy") is own.policy
    assert own.settings_of("value").sequence_packing.train_mb_tokens == 32 * 4
    assert build_config({"grpo": {}, "policy": POLICY, "data": DATA}).value is None


def test_it_travels_and_is_written_whole() -> None:
    config = ppo(value={"train_micro_batch_size": 8})
    assert config_from_json(config_to_json(config)) == config
    plain = make_plain(config)
    assert plain["value"]["train_micro_batch_size"] == 8
    assert build_config(plain) == config
    assert resume_differences(config, ppo(value={"train_micro_batch_size": 8, "max_grad_norm": 2})) == [
        "value.max_grad_norm"
    ]
    assert resume_differences(config, ppo(value={"train_micro_batch_size": 8}, ppo={"max_num_steps": 3})) == []
    sharded = {"dtensor_cfg": {"tensor_parallel_size": 2}}
    resharded = ppo(sharded, value={"train_micro_batch_size": 8}, cluster={"trainers": 2})
    assert resharded.settings_of("value").dtensor_cfg.tensor_parallel_size == 2
    assert resume_differences(config, resharded) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"value": {"dtensor_cfg": {"tensor_parallel_size": 2}}},
            "cluster.trainers: 1 is not a multiple of 2, the product of value.dtensor_cfg.tensor_parallel_size (2)",
        ),
        (
            {"value": {"train_global_batch_size": 8}},
            "value.train_global_batch_size: 8, but policy.train_global_batch_size is 16: they must be equal",
        ),
        ({"value": {"optimizer": None}}, "value.optimizer: null, but the value model is trained"),
        (
            {"value": {"optimizer": {"name": "torch.optim.AdmW"}}},
            "value.optimizer.name: 'torch.optim.AdmW' is no Optimizer class; did you mean 'AdamW'?",
        ),
        (
            {"value": {"optimizer": {"kwargs": {"rl": 0.1}}}},
            "value.optimizer.kwargs: AdamW takes no 'rl'",
        ),
        (
            {"value": {"train_micro_batch_size": 3}},
            "value.train_global_batch_size: 16 is not a multiple of value.train_micro_batch_size * cluster.trainers = "
            "3 * 1 = 3",
        ),
        (
            {"value": {"sequence_packing": {"enabled": True, "train_mb_tokens": 16}}},
            "value.sequence_packing.train_mb_tokens: 16 is less than value.max_total_sequence_length (32)",
        ),
        ({"value": {"optimiser": {}}}, "value.optimiser: unknown key; did you mean 'optimizer'?"),
        (
            {"ppo": {"skip_reference_policy_logprobs_calculation": True}, "loss_fn": {}},
            "ppo.skip_reference_policy_logprobs_calculation: true, but loss_fn.reference_policy_kl_penalty is 0.01",
        ),
        (
            {"ppo": {"ppo_epochs": 2}, "loss_fn": NO_PENALTY | {"force_on_policy_ratio": True}},
            "loss_fn.force_on_policy_ratio: true needs one optimizer step a rollout batch: "
            "policy.train_global_batch_size is 16, ppo.num_prompts_per_step * ppo.num_generations_per_prompt 512, and "
            "it passes over it 2 times",
        ),
        (
            {"ppo": {"seq_logprob_error_threshold": 2}, "cluster": {"processes_of": {"value": 1}}},
            "ppo.seq_logprob_error_threshold: 2, but cluster.processes_of.value is 1: the policy's processes find the "
            "sequences to exclude, and the value model's would not know them",
        ),
        (
            {"policy": POLICY | {"generation": {"temperature": 0}}},
            "policy.generation.temperature: 0 draws the same sample every time, and PPO learns from none",
        ),
    ],
)
def test_what_is_wrong_is_one_line(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(**sections)
    assert caught.value.args == (f"configuration: {expected}",)


MEGATRON: dict[str, Any] = {"enabled": True, "optimizer": {"lr": 1e-6, "min_lr": 0.0}}
LEARNS = {"optimizer": {"lr": 1e-5, "min_lr": 0.0}}


def test_megatron_core_trains_both_models_or_none() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    policy = {"megatron_cfg": MEGATRON | sizes}
    config = ppo(policy, value={"megatron_cfg": LEARNS}, cluster={"trainers": 4})
    value = config.settings_of("value").megatron_cfg
    assert value.enabled
    assert {key: getattr(value, key) for key in sizes} == sizes
    assert value.optimizer["lr"] == 1e-5
    alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    own = ppo(policy, value={"megatron_cfg": LEARNS | alone}, cluster={"trainers": 4}).settings_of("value")
    assert {key: getattr(own.megatron_cfg, key) for key in alone} == alone, "it may divide the ranks otherwise"
    for wrong, expected in (
        ({"megatron_cfg": {"enabled": False}}, "value.megatron_cfg.enabled: false, but policy.megatron_cfg.enabled is"),
        (
            {"megatron_cfg": {**LEARNS, "tensor_model_parallel_size": 3}},
            "cluster.trainers: 4 is not a multiple of 6, the product of value.megatron_cfg.tensor_model_parallel_size",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            ppo(policy, value=wrong, cluster={"trainers": 4})
        assert str(caught.value).startswith(f"configuration: {expected}")


def test_columns_of_values_are_for_algorithms_that_have_them() -> None:
    loss = {"class": "mine.Loss", "columns": {"values": {"source": "value"}, "returns": {"source": "trainer"}}}
    assert [*ppo(loss_fn=NO_PENALTY | loss).loss_fn.custom_columns] == ["values", "returns"]
    with pytest.raises(ConfigError) as caught:
        build_config({"grpo": {}, "policy": POLICY, "data": DATA, "loss_fn": loss})
    assert caught.value.args[0] == "configuration: loss_fn.columns.values.source: value, but GRPO has no value model"


def test_a_value_model_of_another_algorithm_has_no_effect() -> None:
    config = build_config({"grpo": {}, "policy": POLICY, "data": DATA, "value_loss_fn": {"scale": 0.5}})
    assert "value_loss_fn (scale) has no effect: algorithm is grpo" in notices(config)
