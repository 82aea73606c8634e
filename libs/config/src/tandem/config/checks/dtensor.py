"""Rules for the DTensor backend: a model must divide evenly over tensor-parallel ranks."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.models.families import FUSED_HEADS, TENSOR_PLANS
from tandem.config.models.model_sizes import model_config, model_sizes
from tandem.config.models.vision_families import VISION
from tandem.config.problem import Invalid, shown
from tandem.config.schema import Config

_SIZE = "policy.dtensor_cfg.tensor_parallel_size"
_PLAN = "policy.dtensor_cfg.custom_parallel_plan"


def ranks_share_heads(config: Config) -> None:
    """Check that the architecture has a plan, and that each rank gets the same number of whole heads."""
    settings = config.policy.dtensor_cfg
    ranks = settings.tensor_parallel_size
    if config.policy.megatron_cfg.enabled or ranks == 1 or settings.custom_parallel_plan is not None:
        return
    model_type = (model_config(config.policy) or {}).get("model_type")
    if model_type not in (None, *TENSOR_PLANS, *VISION):
        known = ", ".join(TENSOR_PLANS)
        raise Invalid(_SIZE, f"{ranks}, but there is no plan for {model_type}, only for {known}; {_PLAN} may name one")
    if model_type in FUSED_HEADS:
        return
    sizes = model_sizes(config.policy)
    for heads, what in ((sizes.num_heads, "attention heads"), (sizes.num_key_value_heads, "key-value heads")):
        if heads is not None and heads % ranks:
            raise Invalid(_SIZE, f"{ranks} does not divide {heads} {what}")


def a_plan_has_ranks(config: Config) -> None:
    """Check that a tensor-parallel plan has more than one rank to follow it."""
    settings = config.policy.dtensor_cfg
    plan = settings.custom_parallel_plan
    if config.policy.megatron_cfg.enabled or plan is None:
        return
    if "." not in plan.strip("."):
        raise Invalid(_PLAN, f"{shown(plan)} is not a dotted path, such as package.plan")
    if settings.tensor_parallel_size == 1:
        raise Invalid(_PLAN, f"there is a plan, but {_SIZE} is 1")


RULES: tuple[Rule, ...] = (ranks_share_heads, a_plan_has_ranks)
