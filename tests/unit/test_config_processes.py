"""The configuration of models with processes of their own: who holds what, and what is refused before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config
from tandem.config.dump import make_plain, resume_differences
from tandem.config.placement import ModelGroup, find_model_group, list_model_groups
from tandem.coordinator.forecast import plan_json
from tandem.coordinator.loop.spec import run_spec
from tandem.launch.nodes import expected_processes, nodes_of
from tandem.samples.batch_sharding import data_parallel_ranks, scoring_trainers

POLICY: dict[str, Any] = {"model_name": "model", "max_total_sequence_length": 32, "train_global_batch_size": 16}
DATA = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
KL = {"reference_policy_kl_penalty": 0.1}
TP2 = {"dtensor_cfg": {"tensor_parallel_size": 2}}
MEGATRON: dict[str, Any] = {"enabled": True, "optimizer": {"optimizer": "adam", "lr": 1e-3}}
ROUTES: dict[str, Any] = {
    "enabled": True,
    "teacher_model_by_agent_name": {"math": "one", "code": "two", "chat": "one"},
    "default_teacher_alias": "code",
}


def config_of(processes_of: dict[str, int], algorithm: str = "ppo", **sections: Any) -> Config:
    settings: dict[str, Any] = {"algorithm": algorithm, algorithm: {}, "loss_fn": KL, "policy": POLICY, "data": DATA}
    cluster = {"trainers": 2, **sections.pop("cluster", {}), "processes_of": processes_of}
    return build_config(settings | sections | {"cluster": cluster})


def test_each_model_with_processes_is_a_world_and_the_rest_is_the_policys() -> None:
    together = config_of({})
    (only,) = list_model_groups(together)
    assert only == ModelGroup(models=("policy", "reference", "value"), first=0, size=2)
    config = config_of({"value": 4, "reference": 1}, value={**TP2, "train_micro_batch_size": 4})
    assert list_model_groups(config) == (
        ModelGroup(models=("policy",), first=0, size=2),
        ModelGroup(models=("reference",), first=2, size=1),
        ModelGroup(models=("value",), first=3, size=4),
    )
    assert [find_model_group(config, index).name for index in range(7)] == ["policy"] * 2 + ["reference"] + [
        "value"
    ] * 4
    assert data_parallel_ranks(config, "value") == [0, 0, 1, 1]
    assert scoring_trainers(config, "value") == [0, 2]
    assert expected_processes(config) == {"refit": 1, "trainer": 7, "rollout": 1}
    spec = run_spec(config, first_step=1, last_step=2, num_validation=0, resume_from="", checkpoint_folder="")
    assert spec.without_policy == {f"trainer-{index}" for index in range(2, 7)}
    assert build_config(make_plain(config)) == config
    ranks = "2 trainer ranks, and beside them 1 of the reference and 4 of the value"
    assert plan_json.ranks_of_training(config) == ranks
    assert resume_differences(together, config_of({"value": 2})) == [], "a run may go on with others"


def test_a_run_without_a_step_has_the_policy_alone() -> None:
    config = config_of({"reference": 1}, "grpo", grpo={"max_num_steps": 0})
    assert config.num_trainers == 2


def test_gpus_are_the_policys_first_and_engines_keep_out_of_the_others() -> None:
    cluster = {"num_nodes": 2, "gpus_per_node": 4, "trainers": None}
    vllm = {"generation": {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 2}}}
    config = config_of({"value": 4}, cluster=cluster, policy=POLICY | vllm)
    assert (config.cluster.trainers, config.cluster.rollouts) == (4, 2)
    assert [node.trainers for node in nodes_of(config)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [node.rollouts for node in nodes_of(config)] == [(0, 1), ()]


def test_nemo_rls_keys_give_each_teacher_its_gpus_and_sizes() -> None:
    sizes = {"tensor_model_parallel_size": 2, "gpus_per_node": 4, "micro_batch_size": 3, "precision": "fp32"}
    routes = ROUTES | {"non_colocated_teachers": {"enabled": True, "default_teacher_cfg": sizes}}
    cluster = {"num_nodes": 1, "gpus_per_node": 16, "trainers": None}
    opd = {"adv_estimator": {"name": "opd"}, "num_prompts_per_step": 16, "num_generations_per_prompt": 1}
    settings = {
        "grpo": opd,
        "loss_fn": {},
        "policy": POLICY | {"train_micro_batch_size": 1},
        "data": DATA,
        "cluster": cluster,
    }
    config = build_config(settings | {"on_policy_distillation": routes})
    assert (config.cluster.trainers, config.processes_of["teacher"]) == (8, 8), "two teachers"
    teacher = config.settings_of("teacher", 1)
    assert (teacher.model_name, teacher.dtensor_cfg.tensor_parallel_size) == ("two", 2)
    assert (teacher.logprob_batch_size, teacher.precision) == (3, "float32")
    assert config.policy.dtensor_cfg.tensor_parallel_size == 1
    sizes["pipeline_model_parallel_size"] = 2
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size: 2, but policy\.megatron_cfg\.enabled is "):
        build_config(settings | {"on_policy_distillation": routes})


@pytest.mark.parametrize(
    ("processes_of", "algorithm", "sections", "expected"),
    [
        ({"value": 1}, "grpo", {}, "cluster.processes_of.value: 1, but GRPO holds no value"),
        (
            {"reference": 1},
            "grpo",
            {"loss_fn": {"reference_policy_kl_penalty": 0.0}},
            "cluster.processes_of.reference: 1, but GRPO holds no reference: loss_fn.reference_policy_kl_penalty is 0",
        ),
        ({"valu": 1}, "grpo", {}, "cluster.processes_of.valu: unknown key; did you mean 'value'?"),
        ({"value": -1}, "ppo", {}, "cluster.processes_of.value: expected an integer at least 0, got -1"),
        (
            {"value": 3},
            "ppo",
            {"value": TP2},
            "cluster.processes_of.value: 3 is not a multiple of 2, the product of "
            "value.dtensor_cfg.tensor_parallel_size (2)",
        ),
        (
            {"reference": 1},
            "grpo",
            {"policy": POLICY | TP2},
            "cluster.processes_of.reference: 1 is not a multiple of 2, the product of "
            "policy.dtensor_cfg.tensor_parallel_size (2)",
        ),
        (
            {"value": 3},
            "ppo",
            {},
            "value.train_global_batch_size: 16 is not a multiple of value.train_micro_batch_size * "
            "cluster.processes_of.value = 4 * 3 = 12",
        ),
        (
            {"value": 3},
            "ppo",
            {"cluster": {"gpus_per_node": 4}},
            "cluster.processes_of.value: 3 processes beside cluster.trainers (2) need 5 GPUs, and the cluster has 4",
        ),
        (
            {"reference": 1},
            "grpo",
            {"policy": POLICY | {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}}}},
            "cluster.processes_of.reference: 1, but policy trains adapters: without them it is its own reference",
        ),
        (
            {"value": 1},
            "ppo",
            {"cluster": {"launch": {"trainers": 4}}},
            "cluster.launch.trainers: 4 is more than cluster.trainers and cluster.processes_of (3)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(
    processes_of: dict[str, int], algorithm: str, sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(processes_of, algorithm, **sections)
    assert expected in str(raised.value)


def test_a_backend_of_its_own_needs_processes_of_its_own() -> None:
    config = config_of({"value": 1}, value={"megatron_cfg": MEGATRON})
    assert config.settings_of("value").megatron_cfg.enabled
    assert not config.policy.megatron_cfg.enabled
    with pytest.raises(ConfigError, match=r"value\.megatron_cfg\.enabled: true, but policy\.megatron_cfg\.enabled is"):
        config_of({}, value={"megatron_cfg": MEGATRON})
