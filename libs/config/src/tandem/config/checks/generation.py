"""Rules for generation engines, and for the replay of the experts that they choose."""

from __future__ import annotations

from tandem.config.models.model_sizes import read_expert_sizes, read_model_config
from tandem.config.problem import InvalidValue, Rule, restrict_to_rollouts
from tandem.config.schema import Config

_ROUTER_REPLAY = "policy.router_replay.enabled"
ROUTERS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Architectures in Transformers, by ``model_type``, with routers that choose as `tandem.common.routers` expects."""
_MOST_BYTES = 2**28
"""Most bytes of recorded experts per sample: trainers accept no larger array."""


def check_routing_can_be_replayed(config: Config) -> None:
    """Check that the model has experts, that an engine generates, and that both sides know the model's routers."""
    policy = config.policy
    if not policy.router_replay.enabled:
        return
    if not config.declaration.rolls_out:
        raise InvalidValue(_ROUTER_REPLAY, f"true, but no engine generates what {config.declaration.title} trains on")
    model = read_model_config(policy)
    if model is None:  # refused later, before the run starts
        return
    model_type = model.get("model_type")
    experts = read_expert_sizes(model)
    if experts is None:
        raise InvalidValue(_ROUTER_REPLAY, f"true, but {model_type}, the model of policy.model_name, has no experts")
    kind = policy.generation.kind
    for setting, knows_all in (
        ("policy.dtensor_cfg", policy.megatron_cfg.enabled),
        (f"policy.generation.backend {kind.name}", kind.knows_every_router),
    ):
        if not knows_all and model_type not in ROUTERS:
            raise InvalidValue(_ROUTER_REPLAY, f"true, but {setting} supports {', '.join(ROUTERS)}, not {model_type}")
    longest = policy.max_total_sequence_length
    if longest * experts.num_bytes > _MOST_BYTES:
        raise InvalidValue(
            _ROUTER_REPLAY,
            f"true, but a sample of policy.max_total_sequence_length ({longest}) tokens would have "
            f"{experts.num_bytes} bytes of experts a token, more than {_MOST_BYTES >> 20} MB in all",
        )


def check_megatron_can_be_given_experts(config: Config) -> None:
    """Check Megatron-Core's options: Sinkhorn assigns all tokens at once, and recomputed experts know no
    micro-batch."""
    megatron = config.policy.megatron_cfg
    if not (config.policy.router_replay.enabled and megatron.enabled):
        return
    if megatron.moe_router_load_balancing_type == "sinkhorn":
        raise InvalidValue(_ROUTER_REPLAY, "true, but policy.megatron_cfg.moe_router_load_balancing_type is sinkhorn")
    if "moe" in (megatron.forwarded.get("recompute_modules") or ()) and megatron.pipeline_model_parallel_size > 1:
        raise InvalidValue(
            _ROUTER_REPLAY,
            "true, but policy.megatron_cfg.recompute_modules has moe, and with pipeline_model_parallel_size above 1 "
            "it would be recomputed with the experts of another micro-batch: use recompute_granularity: full",
        )


def check_prompts_move_where_engines_are_async(config: Config) -> None:
    """Check that prompts move between engines only if these are asynchronous: moves change the last bits of a run."""
    generation = config.policy.generation
    if generation.generation_timeout is not None and not generation.is_async:
        raise InvalidValue("policy.generation.generation_timeout", "needs policy.generation.async_engine")


def check_prompt_group_fits_its_engine(config: Config) -> None:
    """Check that an engine can store all samples of a group, which it keeps until they are trained on."""
    max_tokens, num_samples = (
        config.policy.generation.max_stored_tokens,
        config.rollout_section.num_generations_per_prompt,
    )
    longest = config.policy.max_total_sequence_length
    if max_tokens < num_samples * longest:
        raise InvalidValue(
            "policy.generation.max_stored_tokens",
            f"{max_tokens} is less than {config.algorithm}.num_generations_per_prompt * "
            f"policy.max_total_sequence_length = {num_samples} * {longest} = {num_samples * longest}, "
            "which the samples of one prompt may have",
        )


def check_engines_have_devices(config: Config) -> None:
    """Check that asynchronous training has engines on devices of their own: colocated engines cannot run beside it."""
    if config.max_trajectory_age_steps and config.is_colocated:
        raise InvalidValue(
            f"{config.asynchronous_key}.enabled",
            "true needs policy.generation.colocated.enabled: false: engines generate while trainers train",
        )


RULES: tuple[Rule, ...] = (
    *restrict_to_rollouts(
        check_prompts_move_where_engines_are_async,
        check_prompt_group_fits_its_engine,
        check_engines_have_devices,
    ),
    check_routing_can_be_replayed,
    check_megatron_can_be_given_experts,
)
