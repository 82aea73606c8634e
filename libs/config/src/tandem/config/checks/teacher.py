"""Rules for distillation: what a teacher must share with the policy and its ranks."""

from __future__ import annotations

import re

import msgspec

from tandem.common.errors import nearest
from tandem.config.checks.rule import Rule
from tandem.config.checks.value import check_same_tokens, check_section
from tandem.config.models.model_sizes import find_vocabulary, read_model_config
from tandem.config.problem import InvalidValue, ProblemCollector, shown
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
