"""Rules of parallel sizes: that ranks, layers, heads, experts and sequences can be shared out evenly."""

from __future__ import annotations

import msgspec

from tandem.common.config.checks.rule import Rule
from tandem.common.config.problem import Invalid
from tandem.common.config.schema import Config


def trainers_make_whole_replicas(config: Config) -> None:
    """The trainers are a whole number of copies of the model."""
    trainers, each = config.cluster.trainers, config.policy.model_parallel_size
    if trainers % each:
        raise Invalid("cluster.trainers", f"{trainers} is not a multiple of {each}, the product of {_factors(config)}")


def _factors(config: Config) -> str:
    """Say which sizes decide how many trainers share a copy of the model."""
    policy = config.policy
    if policy.megatron_cfg.enabled:
        section: msgspec.Struct = policy.megatron_cfg
        keys = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
        prefix = "policy.megatron_cfg."
    else:
        section, prefix = policy.dtensor_cfg, "policy.dtensor_cfg."
        keys = ["tensor_parallel_size", "context_parallel_size"]
    sizes = {key: getattr(section, key) for key in keys}
    return prefix + ", ".join(f"{key} ({size})" for key, size in sizes.items() if size > 1)


RULES: tuple[Rule, ...] = (trainers_make_whole_replicas,)
