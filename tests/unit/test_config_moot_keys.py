"""Notices about keys of NeMo-RL's files that something else decides here."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import inspect

from tandem.common.errors import ConfigError
from tandem.config import build_config, notices
from tandem.config.derive import DERIVED
from tandem.config.schema import GenerationConfig, RefitConfig

SETTINGS = {"policy": {"model_name": "model", "max_total_sequence_length": 64}}
GYM = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
FILE = {"train": [{"data_path": "a.jsonl"}], "validation": None}


def lines(**settings: Any) -> list[str]:
    given = {**SETTINGS, "data": GYM, **settings}
    if "distillation" in given or "off_policy_distillation" in given:
        given.setdefault("teacher", {"model_name": "teacher"})
    return notices(build_config(given))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "distillation"])
def test_validation_goes_as_engines_have_room(algorithm: str) -> None:
    section = {"num_prompts_per_step": 512 if algorithm != "distillation" else 64, "num_generations_per_prompt": 1}
    section |= (
        {"use_leave_one_out_baseline": False, "val_batch_size": 3} if algorithm == "grpo" else {"val_batch_size": 3}
    )
    expected = f"{algorithm}.val_batch_size (3) has no effect: engines take validation problems as they have room"
    assert expected in lines(**{algorithm: section})
    del section["val_batch_size"]
    assert not any("val_batch_size" in line for line in lines(**{algorithm: section}))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("kd_loss_mode", "averaged_logits", "each sample has one teacher"),
        ("normalize_teacher_by_vocab", True, "every teacher has the policy's tokens"),
        ("sum_weights_metric", "entropy", "each sample has one teacher"),
        ("alpha", 2.0, "each sample has one teacher"),
        ("exact_token_match_only", True, "every teacher has the policy's tokens"),
        ("uncommon_topk", 64, "every teacher has the policy's tokens"),
    ],
)
def test_what_several_teachers_of_a_sample_would_read(key: str, value: object, why: str) -> None:
    shown = "true" if value is True else value
    settings = {
        "off_policy_distillation": {"val_at_start": False, "val_period": 0},
        "data": FILE,
        "loss_fn": {key: value},
    }
    assert f"loss_fn.{key} ({shown}) has no effect: {why}" in lines(**settings)
    assert lines(**{**settings, "loss_fn": {}}) == []


def test_the_keys_of_another_loss_are_told_of() -> None:
    assert lines(grpo={}, loss_fn={"kl_type": "reverse", "ratio_clip_c": 3.0}) == [
        "loss_fn (kl_type) has no effect: algorithm is grpo"
    ]
    settings = {"off_policy_distillation": {"val_at_start": False, "val_period": 0}, "data": FILE}
    assert lines(**settings, loss_fn={"kl_type": "reverse", "ratio_clip_c": 3.0}) == [
        "loss_fn (ratio_clip_c) has no effect: algorithm is off_policy_distillation"
    ]
    assert lines(grpo={}, loss_fn={"kl_type": "reverse", "class": "mine.Loss"}) == [], "it may read what it likes"


def test_the_keys_of_raw_text_are_told_of() -> None:
    entry = {
        "data_path": "a.jsonl",
        "text_key": "text",
        "characters_per_sample": 9,
        "seed": 3,
        "split_validation_size": 4,
    }
    settings = {"sft": {"val_at_start": False, "val_period": 0}, "data": {"train": [entry]}}
    assert lines(**settings) == [
        "data.train[0].seed (3) has no effect: prompts decide what is held out",
        "data.train[0].text_key (text) has no effect: only arrow_text is raw text",
        "data.train[0].characters_per_sample (9) has no effect: only arrow_text is raw text",
    ]


@pytest.mark.parametrize("section", ["policy", "teacher"])
@pytest.mark.parametrize("algorithm", ["distillation", "grpo"])
def test_every_model_of_the_run_is_told_of(algorithm: str, section: str) -> None:
    settings = {**SETTINGS, "teacher": {"model_name": "teacher"}}
    settings[section] = {**settings[section], "offload_optimizer_for_logprob": True}
    told = [line for line in lines(**settings, **{algorithm: {}}) if "offload_optimizer_for_logprob" in line]
    is_held = section == "policy" or algorithm == "distillation"
    assert [line.partition(" ")[0] for line in told] == [f"{section}.offload_optimizer_for_logprob"] * is_held


SUPERVISED = ["sft", "dpo", "rm", "off_policy_distillation"]


def supervised(algorithm: str, **sections: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": {"model_name": "model"},
        "data": {"dataset_name": "HelpSteer3" if algorithm in ("dpo", "rm") else "gsm8k"},
    }
    if algorithm == "off_policy_distillation":
        settings["teacher"] = {"model_name": "model"}
    policy = settings["policy"] | sections.pop("policy", {})
    return {**settings, **sections, "policy": policy}


def other_values(described: inspect.Type) -> list[Any]:
    """Return some values of a type, of which one is not its default."""
    match described:
        case inspect.UnionType():
            return [value for each in described.types for value in other_values(each)]
        case inspect.BoolType():
            return [True, False]
        case inspect.LiteralType():
            return list(described.values)
        case inspect.IntType():
            return [2, 3]
        case inspect.FloatType():
            return [0.5, 0.25]
        case inspect.StrType():
            return ["other"]
    return []


@pytest.mark.parametrize("algorithm", SUPERVISED)
@pytest.mark.parametrize("section", [GenerationConfig, RefitConfig])
def test_every_key_of_engines_has_a_notice_where_nothing_is_generated(algorithm: str, section: type) -> None:
    described = inspect.type_info(section)
    assert isinstance(described, inspect.StructType)
    derived, silent, num_tried = {rule.key for rule in DERIVED}, [], 0
    for field in described.fields:
        name = field.encode_name
        if f"policy.generation.{name}" in derived:
            continue
        for value in other_values(field.type):
            own = {name: value}
            over = {"policy": {"generation": own}} if section is GenerationConfig else {"refit": own}
            try:
                said = notices(build_config(supervised(algorithm, **over)))
            except ConfigError:
                continue
            is_default = value == field.default
            num_tried += not is_default
            told = [line for line in said if " generates nothing" in line and name in line]
            if bool(told) == is_default:
                silent.append(f"{name}: {value!r}: {said}")
    assert num_tried > (10 if section is GenerationConfig else 3)
    assert not silent, "\n".join(silent)


def test_no_section_of_engines_is_told_of_unless_it_is_given() -> None:
    for algorithm in SUPERVISED:
        assert not any("generates nothing" in line for line in notices(build_config(supervised(algorithm))))
    rolled = {"algorithm": "grpo", "env": {"math": {}}, "data": {"dataset_name": "gsm8k"}}
    config = build_config({**rolled, "policy": {"model_name": "m", "generation": {"top_p": 0.9}}})
    assert not any("generates nothing" in line for line in notices(config))
