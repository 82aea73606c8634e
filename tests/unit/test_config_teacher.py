"""The configuration of distillation: what a teacher has from the policy, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import Config, build_config, dump_yaml, load_config, notices

POLICY: dict[str, Any] = {"model_name": "model", "train_global_batch_size": 64}
DATA = {"dataset_name": "reasoning_gym", "task": "chain_sum"}


def config_of(teacher: dict[str, Any] | None, policy: dict[str, Any] | None = None, **sections: Any) -> Config:
    settings: dict[str, Any] = {"algorithm": "distillation", "distillation": {}, "data": DATA}
    return build_config({**settings, "policy": POLICY | (policy or {}), "teacher": teacher, **sections})


def test_a_teacher_is_like_the_policy_unless_its_section_says_otherwise() -> None:
    config = config_of({"model_name": "larger", "logprob_batch_size": 7}, {"precision": "float32"})
    teacher = config.teacher
    assert teacher is not None
    assert config.teacher_sections == {"teacher.model_name": teacher}
    assert config.settings_of("teacher") is teacher
    assert (teacher.model_name, teacher.tokenizer.name, teacher.logprob_batch_size) == ("larger", "larger", 7)
    assert teacher.precision == "float32"
    assert teacher.max_total_sequence_length == config.policy.max_total_sequence_length
    assert teacher.optimizer is not None, "which is not read: nothing is said of it"
    assert config.declaration.trains == ("policy",)


@pytest.mark.parametrize("name", ["distillation", "off_policy_distillation"])
def test_it_is_written_and_read_back(name: str, tmp_path: Path) -> None:
    sections = {"algorithm": name, name: {"topk_logits_k": 9}, "loss_fn": {"kl_type": "jsd", "mixed_kl_weight": 0.2}}
    config = build_config({"policy": POLICY, "data": DATA, "teacher": {"model_name": "larger"}, **sections})
    assert config.topk_logits_k == 9
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def recorded(*teachers: dict[str, Any], loss: dict[str, Any] | None = None) -> dict[str, Any]:
    """NeMo-RL v0.7's file of distillation over recorded text."""
    section = {
        "num_prompts_per_step": 16,
        "max_num_steps": 5,
        "max_num_epochs": 1,
        "val_period": 0,
        "topk_logits_k": 64,
    }
    return {
        "distillation": {**section, "val_at_start": False, "val_batch_size": 8, "max_rollout_turns": 1},
        "teacher": None,
        "teachers": list(teachers),
        "loss_fn": {"kl_type": "mixed", "reverse_kl": False, "vocab_topk": 32, "ce_loss_scale": 0.1, **(loss or {})},
        "policy": {"model_name": "model"},
        "data": {"train": {"data_path": "chats.jsonl", "chat_key": "messages"}, "validation": None},
        "checkpointing": {"metric_name": "train:loss"},
    }


def test_a_list_of_teachers_is_distillation_over_recorded_text(tmp_path: Path) -> None:
    config = build_config(recorded({"model_name": "larger", "projection_matrix_path": None, "weight": 1.0}))
    section = config.off_policy_distillation
    assert config.algorithm == "off_policy_distillation"
    assert (section.max_num_steps, section.val_period, section.val_at_start) == (5, 0, False)
    assert (section.topk_logits_k, section.val_global_batch_size) == (32, 8)
    assert config.policy.train_global_batch_size == 16
    assert (config.loss_fn.kl_type, config.loss_fn.ce_loss_scale) == ("forward", 0.1)
    assert config.teachers is None
    assert [each.model_name for each in config.teacher_sections.values()] == ["larger"]
    assert notices(config) == []
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert build_config(recorded({"model_name": "larger"}, loss={"reverse_kl": True})).loss_fn.kl_type == "reverse"


@pytest.mark.parametrize(
    ("teachers", "loss", "expected"),
    [
        ([{"model_name": "a", "projection_matrix_path": "map.pt"}], {}, "teachers[0].projection_matrix_path (map.pt)"),
        (
            [{"model_name": "a", "gold_loss": True}, {"model_name": "b", "projection_matrix_path": "map.pt"}],
            {},
            "teachers[0].gold_loss (true), teachers[1].projection_matrix_path (map.pt)",
        ),
        (
            [{"model_name": "a"}, {"model_name": "b"}],
            {"kd_loss_mode": "averaged_logits"},
            "loss_fn.kd_loss_mode (averaged_logits)",
        ),
        ([{"model_name": "a", "gold_loss": True}], {}, "teacher.gold_loss (true)"),
        ([{"model_name": "a"}], {"temperature": 2.0}, "loss_fn.temperature (2.0)"),
        ([{"model_name": "a"}], {"xtoken_loss": True}, "loss_fn.xtoken_loss (true)"),
    ],
)
def test_what_is_not_built_of_it_is_refused_by_name(
    teachers: list[dict[str, Any]], loss: dict[str, Any], expected: str
) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        build_config(recorded(*teachers, loss=loss))
    assert str(caught.value) == f"configuration: not supported yet: {expected}"


def test_several_teachers_teach_every_sequence(tmp_path: Path) -> None:
    config = build_config(recorded({"model_name": "a", "weight": 0.5}, {"model_name": "b"}))
    assert [(each.model_name, each.weight) for each in config.joint_teachers] == [("a", 0.5), ("b", 1.0)]
    assert list(config.teacher_sections) == ["teachers[0].model_name", "teachers[1].model_name"]
    assert [config.settings_of("teacher", number).tokenizer.name for number in range(2)] == ["a", "b"]
    read = {column.name: column.num_each and column.num_each(config) for column in config.all_columns(1)}
    assert read == {"teacher_topk_logits": 64, "teacher_topk_indices": 64, "teacher_weights": 2}, "32 tokens of each"
    assert (config.table_columns, notices(config)) == ({}, [])
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    alone = build_config(recorded({"model_name": "a", "weight": 0.5}))
    assert [each.weight for each in alone.joint_teachers] == [0.5], "one with a weight is not as if it were alone"


@pytest.mark.parametrize(
    ("loss", "by", "notes"),
    [
        ({"sum_weights_metric": "entropy", "alpha": 2.0}, "entropy", "sum_weights_metric"),
        ({"kd_loss_mode": "select_teacher"}, "ce", "kd_loss_mode"),
    ],
)
def test_teachers_may_be_weighed_by_the_batch(loss: dict[str, Any], by: str, notes: str) -> None:
    config = build_config(recorded({"model_name": "a", "weight": 0.5}, {"model_name": "b"}, loss=loss))
    assert config.weighs_teachers_by == by
    assert "teacher_confidence" in [column.name for column in config.all_columns(1)]
    assert notices(config) == [f"teachers[0].weight (0.5) has no effect: loss_fn.{notes} decides"]


def test_a_sharpness_that_nothing_reads_is_told_of() -> None:
    config = build_config(recorded({"model_name": "a"}, {"model_name": "b"}, loss={"alpha": 2.0}))
    assert notices(config) == ["loss_fn.alpha (2.0) has no effect: loss_fn.sum_weights_metric is null"]


@pytest.mark.parametrize(
    ("second", "loss", "expected"),
    [
        (
            {"dtensor_cfg": {"tensor_parallel_size": 2}},
            {},
            "cluster.trainers: 1 is not a multiple of 2, the product of "
            "teachers[1].dtensor_cfg.tensor_parallel_size (2)",
        ),
        (
            {"max_total_sequence_length": 64},
            {},
            "teachers[1].max_total_sequence_length: 64, but policy.max_total_sequence_length is 512: they must be "
            "equal",
        ),
        (
            {"logprob_batch_size": 7},
            {},
            "teachers[1].logprob_batch_size: differs from teachers[0].logprob_batch_size: the same ranks score with "
            "each of them",
        ),
        (
            {},
            {"kd_loss_mode": "select_teacher", "sum_weights_metric": "ce"},
            "loss_fn.sum_weights_metric: ce, but loss_fn.kd_loss_mode is select_teacher: only a sum has weights",
        ),
        (
            {},
            {"kd_loss_mode": "mean"},
            "loss_fn.kd_loss_mode: 'mean' is not one of averaged_logits, select_teacher, sum",
        ),
    ],
)
def test_what_several_teachers_cannot_be(second: dict[str, Any], loss: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(recorded({"model_name": "a"}, {"model_name": "b", **second}, loss=loss))
    assert caught.value.problems[0].startswith(f"configuration: {expected}")


ROUTES = {
    "enabled": True,
    "teacher_model_by_agent_name": {"math": "one", "code": "two", "chat": "one"},
    "default_teacher_alias": "code",
}


def test_samples_find_their_teachers_by_the_names_of_environments_and_data_sets() -> None:
    config = config_of({"logprob_batch_size": 3}, on_policy_distillation=ROUTES)
    sections = config.teacher_sections
    assert [(each.model_name, each.logprob_batch_size) for each in sections.values()] == [("one", 3), ("two", 3)]
    assert list(sections)[1] == "on_policy_distillation.teacher_model_by_agent_name.code"
    assert [config.settings_of("teacher", number).tokenizer.name for number in range(2)] == ["one", "two"]
    assert config.table_columns == {"teacher_S": "int32"}
    found = [config.teacher_of(*names) for names in (("math", "code"), ("elsewhere", "chat"), ("elsewhere",))]
    assert found == [0, 0, 1]
    strict = config_of({}, on_policy_distillation=ROUTES | {"strict_agent_name_match": True})
    assert [strict.teacher_of("math"), strict.teacher_of("elsewhere")] == [0, None]
    apart = config_of({}, on_policy_distillation=ROUTES | {"deduplicate_shared_teacher_checkpoints": False})
    assert apart.num_of("teacher") == 3


def test_grpo_has_teachers_only_for_their_log_probabilities() -> None:
    grpo = {"adv_estimator": {"name": "opd"}, "num_prompts_per_step": 64, "num_generations_per_prompt": 1}
    opd: dict[str, Any] = {"algorithm": "grpo", "grpo": grpo}
    config = config_of(None, on_policy_distillation=ROUTES, **opd)
    assert config.scored_by(1) == ("policy", "reference", "teacher")
    assert config.topk_logits_k == 0
    with pytest.raises(ConfigError, match=r"grpo.adv_estimator.name: grpo, but on_policy_distillation.enabled is true"):
        config_of(None, algorithm="grpo", grpo={}, on_policy_distillation=ROUTES)
    with pytest.raises(ConfigError, match=r"grpo.adv_estimator.name: opd, but on_policy_distillation.enabled is false"):
        config_of(None, **opd)


def test_a_teacher_of_another_algorithm_has_no_effect() -> None:
    config = build_config({"grpo": {}, "policy": {"model_name": "model"}, "data": DATA, "teacher": {}})
    assert config.holds == ("policy", "reference")
    assert config.teacher_sections == {}
    assert "teacher has no effect: algorithm is grpo" in notices(config)


@pytest.mark.parametrize(
    ("teacher", "sections", "said"),
    [
        (None, {}, "teacher: null, but distillation needs a model to learn from"),
        (
            {"max_total_sequence_length": 100},
            {},
            "teacher.max_total_sequence_length: 100, but policy.max_total_sequence_length is 512: they must be equal",
        ),
        (
            {},
            {"loss_fn": {"kl_type": "jsd", "mixed_kl_weight": 1.0}},
            "loss_fn.mixed_kl_weight: 1, but loss_fn.kl_type jsd needs 0 < it < 1",
        ),
        (
            {},
            {"on_policy_distillation": ROUTES | {"default_teacher_alias": "maths"}},
            "on_policy_distillation.default_teacher_alias: 'maths' is not one of math, code, chat; did you mean 'math'",
        ),
        (
            {},
            {"on_policy_distillation": {"enabled": True}},
            "on_policy_distillation.teacher_model_by_agent_name: empty",
        ),
        (
            {"megatron_cfg": {"enabled": True}},
            {},
            "teacher.megatron_cfg.enabled: true, but policy.megatron_cfg.enabled",
        ),
        (
            {"new_model": {"config": {"model_type": "qwen3", "hiden_size": 3}, "characters": "ab"}},
            {},
            "teacher.new_model.config.hiden_size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(teacher: dict[str, Any] | None, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(teacher, **sections)
    assert any(problem.startswith(f"configuration: {said}") for problem in caught.value.problems), caught.value


def test_a_teacher_with_another_vocabulary_or_fewer_tokens_than_are_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("model", 50), ("larger", 50), ("stranger", 51)):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    with pytest.raises(ConfigError, match=r"topk_logits_k: 64 is more than the teacher's 50 tokens"):
        config_of({"model_name": "larger"})
    with pytest.raises(
        ConfigError, match=r"teacher.model_name: stranger has 51 tokens, but model has 50: distillation"
    ):
        config_of({"model_name": "stranger"}, distillation={"topk_logits_k": 5})
    assert config_of({"model_name": "larger"}, distillation={"topk_logits_k": 5}).topk_logits_k == 5


@pytest.mark.parametrize(
    ("teacher", "sections", "said"),
    [
        ({"projection_matrix_path": "map.pt"}, {}, "teacher.projection_matrix_path (map.pt)"),
        (
            {},
            {"loss_fn": {"xtoken_loss": True, "gold_loss": True}},
            "loss_fn.gold_loss (true), loss_fn.xtoken_loss (true)",
        ),
        (
            None,
            {"teachers": [{}, {"projection_matrix_path": "map.pt"}]},
            "teachers[1].projection_matrix_path (map.pt)",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    teacher: dict[str, Any] | None, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        config_of(teacher, **sections)
    assert f"not supported yet: {said}" in str(caught.value)
