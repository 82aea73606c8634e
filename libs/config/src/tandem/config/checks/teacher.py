"""Rules for models beside the policy: what a teacher or a value model must share with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.common.errors import nearest
from tandem.config.checks import megatron, model, sizes
from tandem.config.models.model_sizes import find_vocabulary, read_model_config
from tandem.config.problem import InvalidValue, ProblemCollector, Rule, shown
from tandem.config.schema import Config

_TRAINING = (
    "train_global_batch_size",
    "train_micro_batch_size",
    "optimizer",
    "warmup_steps",
    "scheduler",
    "max_grad_norm",
)
"""Training keys, which are not read of a model that is not trained."""
_SHARED = ("train_global_batch_size", "max_total_sequence_length")
"""Keys that must be equal in ``value`` and ``policy``: both see the same batches."""


def check_has_value_model(config: Config) -> None:
    """Check that there is a value model."""
    if config.value is None:
        raise InvalidValue("value", "null, but PPO needs a value model: leave it out for one like the policy")


def check_value_inputs(config: Config) -> None:
    """Check that value model and policy share batches, and a backend unless it has processes of its own."""
    of_ranks = () if "value" in config.processes_of else ("megatron_cfg.enabled",)
    check_same_tokens(config, "value", (*_SHARED, *of_ranks))


def check_same_tokens(config: Config, section: str, keys: tuple[str, ...]) -> None:
    """Raise `InvalidValue` for the first of these keys with another value than the policy's."""
    for key in keys:
        value, policy_value = (_find_value(getattr(config, name), key) for name in (section, "policy"))
        if value != policy_value:
            raise InvalidValue(
                f"{section}.{key}", f"{shown(value)}, but policy.{key} is {shown(policy_value)}: they must be equal"
            )


def check_excluded_sequences(config: Config) -> None:
    """Check that sequences are excluded by their errors only where the policy's processes train both models."""
    if config.largest_logprob_error is not None and (num_processes := config.cluster.processes_of.value):
        raise InvalidValue(
            "ppo.seq_logprob_error_threshold",
            f"{config.largest_logprob_error:g}, but cluster.processes_of.value is {num_processes}: the policy's "
            "processes find the sequences to exclude, and the value model's would not know them",
        )


def check_value_section(config: Config) -> None:
    """Check the value model's section by the rules for the policy's."""
    assert config.value is not None, "checked before"
    if config.value.optimizer is None and not config.value.megatron_cfg.enabled:
        raise InvalidValue("value.optimizer", "null, but the value model is trained")
    check_section(config, "value", {})


def check_section(config: Config, section: str, replaced: Mapping[str, Any]) -> None:
    """Check a model's section by the rules for the policy's, with `replaced` replacing some keys."""
    as_policy, num_processes = (
        config.replace_policy(getattr(config, section), **replaced),
        getattr(config.cluster.processes_of, section),
    )
    if num_processes:
        cluster = msgspec.structs.replace(config.cluster, trainers=num_processes)
        as_policy = msgspec.structs.replace(as_policy, cluster=cluster)
    problems = ProblemCollector()
    for rules in ((*model.RULES, *megatron.RULES, *sizes.RULES, *sizes.DTENSOR_RULES), sizes.BATCH_RULES):
        for rule in () if problems.found else rules:  # a batch is divided by whole replicas
            with problems.collected():
                rule(as_policy)

    def renamed(text: str) -> str:
        text = re.sub(r"\bpolicy\.", f"{section}.", text)
        return re.sub(r"\bcluster\.trainers\b", f"cluster.processes_of.{section}", text) if num_processes else text

    problems.found = [InvalidValue(renamed(problem.key), renamed(problem.text)) for problem in problems.found]
    problems.complain()


def _find_value(node: object, key: str) -> object:
    for part in key.split("."):
        node = getattr(node, part)
    return node


VALUE_RULES: tuple[Rule, ...] = (
    check_has_value_model,
    check_value_inputs,
    check_excluded_sequences,
    check_value_section,
)


def check_has_teacher(config: Config) -> None:
    """Check that there is a teacher."""
    if config.teacher is None and not config.teachers and config.routes is None:
        raise InvalidValue("teacher", f"null, but {config.declaration.title} needs a model to learn from")


def check_teacher_backend(config: Config) -> None:
    """Check that teacher and policy use the same backend, which arranges their ranks, unless they share none."""
    teacher = None if "teacher" in config.processes_of else config.teacher
    if teacher is not None and teacher.megatron_cfg.enabled != config.policy.megatron_cfg.enabled:
        value = str(teacher.megatron_cfg.enabled).lower()
        raise InvalidValue("teacher.megatron_cfg.enabled", f"{value}, but policy.megatron_cfg.enabled is not")


def check_teacher_inputs(config: Config) -> None:
    """Check that sequences have the same limit for both, since each rank has the same sequences."""
    if config.teacher is not None:
        check_same_tokens(config, "teacher", ("max_total_sequence_length",))


def check_teacher_section(config: Config) -> None:
    """Check the teacher's section by the rules for the policy's, except the keys of training."""
    if config.teacher is not None:
        check_section(config, "teacher", {name: getattr(config.policy, name) for name in _TRAINING})


def check_teacher_vocabulary(config: Config) -> None:
    """Check that teacher and policy have the same vocabulary, since token ids are compared."""
    for key, teacher in config.teacher_sections.items():
        teacher_tokens, policy_tokens = (
            find_vocabulary(read_model_config(model) or {}) for model in (teacher, config.policy)
        )
        if teacher_tokens is not None and policy_tokens is not None and teacher_tokens != policy_tokens:
            raise InvalidValue(
                key,
                f"{teacher.model_name} has {teacher_tokens} tokens, but {config.policy.model_name} has "
                f"{policy_tokens}: distillation needs the same tokenizer",
            )
        num_tokens = teacher_tokens or policy_tokens
        if num_tokens is not None and config.topk_logits_k > num_tokens:
            raise InvalidValue(
                f"{config.algorithm}.topk_logits_k",
                f"{config.topk_logits_k} is more than the teacher's {num_tokens} tokens",
            )


_ALIKE = (
    "logprob_batch_size",
    "dtensor_cfg",
    "megatron_cfg",
    "sequence_packing",
    "dynamic_batching",
    "make_sequence_length_divisible_by",
)
"""Keys in which joint teachers agree, because the ranks and micro-batches that score are the same for all."""


def check_joint_teachers_fit(config: Config) -> None:
    """Check each of several teachers of every sequence as the only one, and that they are divided alike."""
    for index, teacher in enumerate(config.joint_teachers):
        problems, alone = ProblemCollector(), msgspec.structs.replace(config, teacher=teacher, teachers=None)
        for rule in (check_teacher_backend, check_teacher_inputs, check_teacher_section):
            with problems.collected():
                rule(alone)
        prefix, first = f"teachers[{index}].", config.joint_teachers[0]
        problems.found = [
            InvalidValue(re.sub(r"\bteacher\.", prefix, problem.key), re.sub(r"\bteacher\.", prefix, problem.text))
            for problem in problems.found
        ]
        problems.complain()
        for key in _ALIKE:
            if getattr(teacher, key) != getattr(first, key):
                raise InvalidValue(
                    f"{prefix}{key}", f"differs from teachers[0].{key}: the same ranks score with each of them"
                )
    loss = config.loss_fn
    if config.joint_teachers and loss.sum_weights_metric is not None and loss.kd_loss_mode != "sum":
        text = f"{loss.sum_weights_metric}, but loss_fn.kd_loss_mode is {loss.kd_loss_mode}: only a sum has weights"
        raise InvalidValue("loss_fn.sum_weights_metric", text)


def check_teachers_have_names(config: Config) -> None:
    """Check that each sample finds its teacher by name, or else the default."""
    routes, key = config.routes, "on_policy_distillation"
    if routes is None:
        return
    models, default = routes.teacher_model_by_agent_name, routes.default_teacher_alias
    if not models:
        raise InvalidValue(f"{key}.teacher_model_by_agent_name", "empty, but on_policy_distillation.enabled is true")
    if default is not None and default not in models:
        raise InvalidValue(
            f"{key}.default_teacher_alias",
            f"{shown(default)} is not one of {', '.join(models)}{nearest(default, list(models))}",
        )
    if config.replay is not None and len(models) > 1:
        raise InvalidValue(
            "replay.run", f"{config.replay.run}, but the rollout log does not say which teacher a sample has"
        )
    if not config.declaration.rolls_out:
        raise InvalidValue(f"{key}.enabled", f"true, but {config.declaration.title} rolls nothing out")


def check_advantages_have_teacher(config: Config) -> None:
    """Check that teachers are given if and only if the advantage estimator is opd, which alone reads them."""
    name, routes = config.rollout_section.group_estimator, config.routes
    if name is not None and (name.name == "opd") != (routes is not None):
        raise InvalidValue(
            f"{config.algorithm}.adv_estimator.name",
            f"{name.name}, but on_policy_distillation.enabled is {'true' if routes is not None else 'false'}: "
            "opd needs it, and no other estimator reads it",
        )


def check_mixture_is_one(config: Config) -> None:
    """Check the mixture weight of the Jensen-Shannon divergence, which lies between the two models."""
    loss = config.loss_fn
    if loss.kl_type == "jsd" and not 0 < loss.mixed_kl_weight < 1:
        raise InvalidValue(
            "loss_fn.mixed_kl_weight", f"{loss.mixed_kl_weight:g}, but loss_fn.kl_type jsd needs 0 < it < 1"
        )


_OF_ALL: tuple[Rule, ...] = (
    check_teacher_backend,
    check_teacher_inputs,
    check_teacher_section,
    check_joint_teachers_fit,
    check_teachers_have_names,
    check_teacher_vocabulary,
)


def check_teachers_fit(config: Config) -> None:
    """Check the same for teachers that provide advantages by their log-probabilities."""
    if config.learns_from_logprobs:
        for rule in _OF_ALL:
            rule(config)


RULES: tuple[Rule, ...] = (check_has_teacher, *_OF_ALL, check_mixture_is_one)
GRPO_RULES: tuple[Rule, ...] = (check_advantages_have_teacher, check_teachers_fit)
