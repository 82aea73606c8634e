"""Rules for rollout routing replay: engines must record experts that trainers can use."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.models.model_sizes import expert_sizes, model_config
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config

KEY = "policy.router_replay.enabled"
ROUTERS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Architectures in Transformers, by ``model_type``, with routers that choose as `tandem.common.routers` expects."""
_MOST_BYTES = 2**28
"""Most bytes of recorded experts per sample: trainers accept no larger array."""


def routing_can_be_replayed(config: Config) -> None:
    """Check that the model has experts, that an engine generates, and that both sides know the model's routers."""
    policy = config.policy
    if not policy.router_replay.enabled:
        return
    if not config.declaration.rolls_out:
        raise InvalidValue(KEY, f"true, but no engine generates what {config.declaration.title} trains on")
    model = model_config(policy)
    if model is None:  # refused later, before the run starts
        return
    model_type = model.get("model_type")
    experts = expert_sizes(model)
    if experts is None:
        raise InvalidValue(KEY, f"true, but {model_type}, the model of policy.model_name, has no experts")
    backend = policy.generation.backend
    for setting, knows_all in (
        ("policy.dtensor_cfg", policy.megatron_cfg.enabled),
        (f"policy.generation.backend {backend}", backend != "transformers"),
    ):
        if not knows_all and model_type not in ROUTERS:
            raise InvalidValue(KEY, f"true, but {setting} supports {', '.join(ROUTERS)}, not {model_type}")
    longest = policy.max_total_sequence_length
    if longest * experts.num_bytes > _MOST_BYTES:
        raise InvalidValue(
            KEY,
            f"true, but a sample of policy.max_total_sequence_length ({longest}) tokens would have "
            f"{experts.num_bytes} bytes of experts a token, more than {_MOST_BYTES >> 20} MB in all",
        )


def megatron_can_be_given_experts(config: Config) -> None:
    """Check Megatron-Core's options: Sinkhorn assigns all tokens at once, and recomputed experts know no
    micro-batch."""
    megatron = config.policy.megatron_cfg
    if not (config.policy.router_replay.enabled and megatron.enabled):
        return
    if megatron.moe_router_load_balancing_type == "sinkhorn":
        raise InvalidValue(KEY, "true, but policy.megatron_cfg.moe_router_load_balancing_type is sinkhorn")
    if "moe" in (megatron.forwarded.get("recompute_modules") or ()) and megatron.pipeline_model_parallel_size > 1:
        raise InvalidValue(
            KEY,
            "true, but policy.megatron_cfg.recompute_modules has moe, and with pipeline_model_parallel_size above 1 "
            "it would be recomputed with the experts of another micro-batch: use recompute_granularity: full",
        )


RULES: tuple[Rule, ...] = (routing_can_be_replayed, megatron_can_be_given_experts)
