"""Which GPUs processes take, where training and generation share them and where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import build_config
from tandem.config.placement import (
    VISIBLE,
    find_first_gpu_of_engines,
    select_visible_to_engine,
    select_visible_to_reward_models,
)
from tandem.config.schema import Config


def config_of(cluster: dict[str, Any], *, backend: str = "vllm", **colocated: Any) -> Config:
    return build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model", "generation": {"backend": backend, "colocated": colocated}},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            "cluster": {"gpus_per_node": 8, **cluster},
        }
    )


@pytest.mark.parametrize(
    ("cluster", "colocated", "expected"),
    [
        ({"trainers": 4}, {"enabled": True}, 0),
        ({"trainers": 4}, {"enabled": False}, 4),
        ({"trainers": 4}, {"enabled": False, "resources": {"gpus_per_node": 2}}, 6),
        ({"trainers": 4}, {"enabled": False, "resources": {"gpus_per_node": 2, "num_nodes": 1}}, 6),
        ({"trainers": 4, "num_nodes": 3}, {"enabled": False, "resources": {"num_nodes": 1}}, 16),
        ({"trainers": 4, "num_nodes": 3}, {"enabled": False, "resources": {"num_nodes": 2, "gpus_per_node": 8}}, 8),
        ({"trainers": 4, "num_nodes": 3}, {"enabled": True, "resources": {"num_nodes": 1}}, 0),
    ],
)
def test_engines_begin_where_trainers_end(cluster: dict[str, Any], colocated: dict[str, Any], expected: int) -> None:
    assert find_first_gpu_of_engines(config_of(cluster, **colocated)) == expected


def test_an_engine_sees_its_own_gpus_first_and_the_others_of_its_node_too() -> None:
    disjoint = config_of({"trainers": 4, "rollouts": 4}, enabled=False)
    assert select_visible_to_engine(disjoint, 0, {}) == "4,5,6,7,0,1,2,3"
    assert select_visible_to_engine(disjoint, 3, {}) == "7,0,1,2,3,4,5,6"
    colocated = config_of({"trainers": 4, "rollouts": 4}, enabled=True)
    assert select_visible_to_engine(colocated, 3, {}) == "3,4,5,6,7,0,1,2"
    # What the environment says is visible is numbered from zero, like a whole node.
    assert select_visible_to_engine(disjoint, 1, {VISIBLE: "9,a,b,c,d,e,f,g"}) == "e,f,g,9,a,b,c,d"
    assert select_visible_to_engine(disjoint, 1, {VISIBLE: "GPU-5"}) == "GPU-5"
    assert select_visible_to_engine(disjoint, 1, {VISIBLE: ""}) == ""
    on_cpus = config_of({"trainers": 4, "rollouts": 4, "gpus_per_node": 0}, enabled=False)
    assert select_visible_to_engine(on_cpus, 1, {}) == ""


def with_reward_model(gpus: int, cluster: dict[str, Any], **colocated: Any) -> Config:
    entry = {"model_name": "rm", "resources": {"gpus_per_node": gpus}}
    config = {
        "grpo": {},
        "policy": {"model_name": "model", "generation": {"backend": "vllm", "colocated": colocated}},
        "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
        "env": {"reward_model": entry},
        "cluster": {"gpus_per_node": 8, **cluster},
    }
    return build_config(config)


def of_reward_model(config: Config, index: int, environment: dict[str, str]) -> str:
    (visible,) = select_visible_to_reward_models(config, index, environment).values()
    return visible


def test_reward_models_have_the_last_gpus_that_are_set_aside_for_them_or_those_of_their_engines() -> None:
    aside = with_reward_model(4, {}, enabled=True)
    assert (aside.cluster.trainers, aside.cluster.rollouts) == (4, 4)
    assert [of_reward_model(aside, index, {}) for index in range(5)] == ["4", "5", "6", "7", "4"]
    assert of_reward_model(aside, 1, {VISIBLE: "a,b,c,d,e,f,g,h"}) == "f"
    assert select_visible_to_engine(aside, 1, {}) == "1,2,3,4,5,6,7,0"
    disjoint = with_reward_model(1, {}, enabled=False, resources={"gpus_per_node": 3})
    assert (disjoint.cluster.trainers, disjoint.cluster.rollouts) == (4, 3)
    assert find_first_gpu_of_engines(disjoint) == 4
    assert of_reward_model(disjoint, 2, {}) == "7"
    shared = with_reward_model(0, {}, enabled=True)
    assert shared.cluster.trainers == 8
    assert [of_reward_model(shared, index, {}) for index in (0, 5)] == ["0", "5"]
    assert of_reward_model(shared, 0, {VISIBLE: ""}) == ""
    with pytest.raises(ConfigError, match=r"cluster\.trainers: needs 5 GPUs"):
        with_reward_model(1, {"trainers": 5}, enabled=False, resources={"gpus_per_node": 3})


def test_each_of_several_reward_models_has_gpus_of_its_own() -> None:
    sets = [{"data_path": f"{name}.jsonl", "env_name": name} for name in ("kind", "right", "short")]
    entries = {
        name: {"model_name": name, "resources": {"gpus_per_node": gpus}}
        for name, gpus in (("kind", 1), ("right", 2), ("short", 0))
    }
    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model", "generation": {"backend": "vllm"}},
            "data": {"train": sets},
            "env": entries,
            "cluster": {"gpus_per_node": 7},
        }
    )
    assert (config.cluster.trainers, config.cluster.rollouts) == (4, 4)
    found = [select_visible_to_reward_models(config, index, {}) for index in range(3)]
    assert [tuple(each.values()) for each in found] == [("4", "5", "0"), ("4", "6", "1"), ("4", "5", "2")]
    assert [*found[0]] == ["kind", "right", "short"]
    named = select_visible_to_reward_models(config, 1, {VISIBLE: "a,b,c,d,e,f,g"})
    assert named == {"kind": "e", "right": "g", "short": "b"}
    few = {VISIBLE: "a,b"}  # fewer than are set aside
    assert select_visible_to_reward_models(config, 1, few) == dict.fromkeys(entries, "b")


def test_on_several_nodes_engines_count_on() -> None:
    config = config_of({"num_nodes": 3, "rollouts": 9}, enabled=False, resources={"num_nodes": 2})
    assert select_visible_to_engine(config, 0, {}) == "0,1,2,3,4,5,6,7"
    assert select_visible_to_engine(config, 8, {}) == "0,1,2,3,4,5,6,7"
    assert select_visible_to_engine(config, 2, {}) == "2,3,4,5,6,7,0,1"
