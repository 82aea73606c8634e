"""Rules for the DTensor backend: models divide evenly over tensor-parallel ranks, experts over theirs."""

from __future__ import annotations

import math

from tandem.config.checks.rule import Rule
from tandem.config.installed.model_fields import is_cut_like_llama
from tandem.config.models.families import FUSED_HEADS, TENSOR_PLANS
from tandem.config.models.model_sizes import read_model_config, read_model_sizes
from tandem.config.models.vision_families import VISION
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config, ModelConfig

_SECTION = "policy.dtensor_cfg"
_EXPERTS = f"{_SECTION}.expert_parallel_size"
_SIZE = "policy.dtensor_cfg.tensor_parallel_size"
_PLAN = "policy.dtensor_cfg.custom_parallel_plan"


def check_ranks_share_heads(config: Config) -> None:
    """Check that the architecture has a plan, and that each rank gets the same number of whole heads."""
    settings = config.policy.dtensor_cfg
    ranks = settings.tensor_parallel_size
    if config.policy.megatron_cfg.enabled or ranks == 1 or settings.custom_parallel_plan is not None:
        return
    model_type = (read_model_config(config.policy) or {}).get("model_type")
    is_planned = model_type in (None, *TENSOR_PLANS, *VISION)
    if not is_planned and settings.sequence_parallel and is_cut_like_llama(model_type):
        text = f"true, but the norms of {model_type} are not known to be those of {', '.join(TENSOR_PLANS)}"
        raise InvalidValue(f"{_SECTION}.sequence_parallel", text)
    if not is_planned and not is_cut_like_llama(model_type):
        supported = ", ".join(TENSOR_PLANS)
        raise InvalidValue(
            _SIZE,
            f"{ranks}, but there is no plan for {model_type}, only for {supported}, and those that Transformers "
            f"cuts like Llama; {_PLAN} may name one",
        )
    if model_type in FUSED_HEADS:
        return
    sizes = read_model_sizes(config.policy)
    for heads, kind in ((sizes.num_heads, "attention heads"), (sizes.num_key_value_heads, "key-value heads")):
        if heads is not None and heads % ranks:
            raise InvalidValue(_SIZE, f"{ranks} does not divide {heads} {kind}")


def check_plan_has_ranks(config: Config) -> None:
    """Check that a tensor-parallel plan has more than one rank to follow it."""
    settings = config.policy.dtensor_cfg
    plan = settings.custom_parallel_plan
    if config.policy.megatron_cfg.enabled or plan is None:
        return
    if "." not in plan.strip("."):
        raise InvalidValue(_PLAN, f"{shown(plan)} is not a dotted path, such as package.plan")
    if settings.tensor_parallel_size == 1:
        raise InvalidValue(_PLAN, f"there is a plan, but {_SIZE} is 1")


def check_ranks_share_experts(config: Config) -> None:
    """Check that the model has experts, and that ranks which share them get equally many."""
    ranks, experts = config.policy.dtensor_cfg.expert_parallel_size, read_model_sizes(config.policy).num_experts
    if config.policy.megatron_cfg.enabled or ranks == 1:
        return
    if experts is None and read_model_config(config.policy) is not None:
        raise InvalidValue(_EXPERTS, f"{ranks}, but the model has no experts")
    if experts is not None and experts % ranks:
        raise InvalidValue(_EXPERTS, f"{ranks} does not divide {experts} experts")


def check_groups_are_whole(config: Config) -> None:
    """Check that the trainers form whole groups of ranks that share experts, in whole replicas."""
    check_groups(config.policy, config.cluster.trainers, _SECTION)


def check_groups(model: ModelConfig, num_ranks: int, section: str) -> None:
    """Raise `InvalidValue` if these ranks cannot hold a model's replicas and share its experts.

    `section` is the path of its ``dtensor_cfg``. The ranks form whole model replicas of tensor and context parallelism.
    """
    sizes = {key: getattr(model.dtensor_cfg, key) for key in ("expert_parallel_size", "dp_replicate_size")}
    active_sizes = {key: size for key, size in sizes.items() if size > 1}
    shards = num_ranks // model.dtensor_cfg.tensor_parallel_size
    if model.megatron_cfg.enabled or shards % math.prod(sizes.values()) == 0:
        return
    (key, size), *more_factors = active_sizes.items()
    times = "".join(f" * {factor_key} ({value})" for factor_key, value in more_factors)
    raise InvalidValue(
        f"{section}.{key}", f"{size}{times} does not divide {shards}, the data-parallel and context ranks"
    )


def check_compiled_layers_are_whole(config: Config) -> None:
    """Check that layers to be compiled are not cut over tensor-parallel ranks."""
    if config.policy.megatron_cfg.enabled or not config.policy.compile:
        return
    ranks = config.policy.dtensor_cfg.tensor_parallel_size
    if ranks > 1:
        raise InvalidValue("policy.compile", f"true, but {_SIZE} is {ranks}: layers that ranks share are not compiled")


RULES: tuple[Rule, ...] = (
    check_ranks_share_heads,
    check_plan_has_ranks,
    check_ranks_share_experts,
    check_groups_are_whole,
    check_compiled_layers_are_whole,
)
