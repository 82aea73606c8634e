"""A configuration leaves the process and comes back equal; a resumed run may change only what does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.errors import ConfigError
from tandem.config import (
    Config,
    build_config,
    config_from_json,
    config_to_json,
    dump_yaml,
    fingerprint,
    load_config,
    make_plain,
    resume_differences,
)


def settings(**sections: Any) -> dict[str, Any]:
    return {
        "grpo": {"seed": 2**63 - 1},
        "policy": {
            "model_name": "model",
            "tokenizer": {"chat_template": "{% for m in messages %}\n\\${not.a.key} {{ m['content'] }}\n{% endfor %}"},
            "optimizer": {"kwargs": {"lr": 0.1 + 0.2, "betas": [0.9, 0.95], "eps": "1e-8", "fused": None}},
            "scheduler": [{"name": "a.B", "kwargs": {"total_iters": 10**10}}, {"name": "a.C"}, {"milestones": [3]}],
            "megatron_cfg": {"moe_per_layer_logging": True},
            "new_model": {"config": {"model_type": "qwen3"}, "characters": "0123+- ="},
            "generation": {"stop_strings": ["\n", "yes", "1e-8", "null"], "stop_token_ids": [1, 2]},
        },
        "data": {
            "dataset_name": "reasoning_gym",
            "task": "chain_sum",
            "task_params": {"deep": {"list": [1, "2", None]}},
        },
        "env": {"mine": {"class": "a.Mine", "kwargs": {"text": "on", "number": 1.0}}},
        "cluster": {"launch": {"trainers": 1}},
        **sections,
    }


@pytest.fixture
def config() -> Config:
    return build_config(settings())


def test_json_round_trip_is_exact(config: Config) -> None:
    assert config.policy.tokenizer.chat_template is not None
    assert "\n${not.a.key} " in config.policy.tokenizer.chat_template
    again = config_from_json(config_to_json(config))
    assert again == config
    assert config_to_json(again) == config_to_json(config)
    assert again.policy.optimizer is not None
    assert again.policy.optimizer.kwargs["lr"] == 0.1 + 0.2


def test_yaml_round_trip_is_exact(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resolved.yaml").write_text(dump_yaml(config))
    assert load_config("resolved.yaml") == config


@pytest.mark.parametrize(
    "text",
    [
        "${a}",
        "\\${a}",
        "\\\\${a}",
        "a\\ ${mul:1,2} \\n",
        "$ {a}",
        "$${a}",
        "${",
        "'",
        '"',
        "\\",
        "1e-8",
        "yes",
        "~",
        " a ",
    ],
)
def test_no_text_is_taken_for_something_else(config: Config, text: str, tmp_path: Path) -> None:
    data = msgspec.structs.replace(config.data, prompt_template=text, task_params={"text": text})
    changed = msgspec.structs.replace(config, data=data)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(changed))
    assert load_config(tmp_path / "resolved.yaml") == changed


def test_an_sft_configuration_shows_no_other_algorithm(tmp_path: Path) -> None:
    config = build_config(settings(algorithm="sft"))
    assert {"grpo", "dpo", "loss_fn"}.isdisjoint(make_plain(config))
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert resume_differences(config, load_config(tmp_path / "resolved.yaml")) == []


def test_json_that_is_no_configuration_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_json(b'{"algorithm": "grpo"}')
    assert str(caught.value) == ("configuration received from the coordinator: Object missing required field `policy`")


def test_a_configuration_cannot_be_changed(config: Config) -> None:
    with pytest.raises(AttributeError):
        config.grpo.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"grpo": {"seed": 2**63 - 1, "max_num_steps": 3, "val_period": 1, "max_val_samples": 2}}, []),
        ({"logger": {"log_dir": "elsewhere"}, "checkpointing": {"save_period": 1}}, []),
        ({"cluster": {"trainers": 2, "deadlines": {"train_s": 1}}, "refit": {"alias": "never"}}, []),
        ({"sft": {"seed": 1}, "algorithm": "grpo"}, []),
        ({"grpo": {"seed": 1}}, ["grpo.seed"]),
        ({"loss_fn": {"reference_policy_kl_type": "k1"}}, ["loss_fn.reference_policy_kl_type"]),
        ({"env": {"mine": {"class": "a.Mine", "kwargs": {"text": "on"}}}}, ["env.mine.kwargs.number"]),
        ({"env": {"math": {}}}, None),
    ],
)
def test_resume_names_what_differs_and_matters(
    config: Config, sections: dict[str, Any], expected: list[str] | None
) -> None:
    other = build_config(settings(**sections))
    differences = resume_differences(config, other)
    if expected is None:
        assert {"data.environment", "env.mine.class", "env.math.num_workers"} <= set(differences)
    else:
        assert differences == expected
    assert (fingerprint(config) == fingerprint(other)) == (not differences)


def test_a_free_mapping_that_becomes_empty_is_a_difference(config: Config) -> None:
    emptied = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, task_params={}))
    assert resume_differences(config, emptied) == ["data.task_params.deep.list", "data.task_params"]


def test_a_resumed_run_may_share_the_model_out_otherwise(config: Config) -> None:
    dtensor = msgspec.structs.replace(config.policy.dtensor_cfg, tensor_parallel_size=2, cpu_offload=True)
    megatron = msgspec.structs.replace(config.policy.megatron_cfg, pipeline_model_parallel_size=2)
    policy = msgspec.structs.replace(config.policy, dtensor_cfg=dtensor, megatron_cfg=megatron)
    assert resume_differences(config, msgspec.structs.replace(config, policy=policy)) == []
