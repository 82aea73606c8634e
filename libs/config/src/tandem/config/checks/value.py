"""Rules for a value model: what it must share with the policy and its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.config.checks import batches, dtensor, megatron, model, parallelism
from tandem.config.checks.rule import Rule
from tandem.config.problem import InvalidValue, ProblemCollector, shown
from tandem.config.schema import Config

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
    for rules in ((*model.RULES, *megatron.RULES, *parallelism.RULES, *dtensor.RULES), batches.RULES):
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


RULES: tuple[Rule, ...] = (
    check_has_value_model,
    check_value_inputs,
    check_excluded_sequences,
    check_value_section,
)
