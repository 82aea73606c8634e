"""Rules for rewards and advantages, in algorithms that roll out."""

from __future__ import annotations

from tandem.config.problem import InvalidValue, Rule, shown
from tandem.config.schema import Config
from tandem.config.schema.grpo import PENALTIES
from tandem.config.shapes import ELSEWHERE


def check_leaving_one_out_leaves_one(config: Config) -> None:
    """Check that groups have at least two samples for the leave-one-out baseline."""
    estimator = config.grpo.adv_estimator
    leaves_out = estimator.name not in ("reinforce_plus_plus", "opd") and estimator.use_leave_one_out_baseline
    if leaves_out and config.grpo.num_generations_per_prompt < 2:
        raise InvalidValue(
            "grpo.num_generations_per_prompt",
            "1, but grpo.use_leave_one_out_baseline needs at least 2 samples of each prompt",
        )


def check_divisor_is_one(config: Config) -> None:
    """Check that the two keys of the divisor of advantages agree, and that the estimator has such a divisor."""
    estimator = config.grpo.adv_estimator
    for key, section in (("grpo", config.grpo), ("grpo.adv_estimator", estimator)):
        scale = section.scale_rewards
        if scale is not None and section.normalize_rewards == (scale == "none"):
            needed = shown(not section.normalize_rewards)
            raise InvalidValue(
                f"{key}.normalize_rewards", f"{key}.scale_rewards {scale} needs {needed}, or no such key"
            )
    estimators = ("grpo",) if estimator.scale_rewards == "batch" else ("grpo", "gdpo")
    if estimator.scale_rewards is not None and estimator.name not in estimators:
        raise InvalidValue(
            "grpo.scale_rewards",
            f"{estimator.scale_rewards}, but grpo.adv_estimator.name {estimator.name} has a divisor of its own",
        )


def check_samples_differ(config: Config) -> None:
    """Check that samples are drawn at random, not greedily: GRPO compares the samples of a group."""
    if config.policy.generation.temperature == 0 and not config.evaluates:
        title = config.declaration.title
        raise InvalidValue(
            "policy.generation.temperature", f"0 draws the same sample every time, and {title} learns from none"
        )


def check_dynamic_sampling_can_tell_groups_apart(config: Config) -> None:
    """Check that groups have at least two samples for dynamic sampling: the rewards of one never differ."""
    section, name = config.rollout_section, config.algorithm
    if section.use_dynamic_sampling and section.num_generations_per_prompt < 2:
        raise InvalidValue(
            f"{name}.num_generations_per_prompt",
            f"1, but {name}.use_dynamic_sampling needs at least 2 samples of each prompt",
        )


def check_components_have_no_length(config: Config) -> None:
    """Check that GDPO runs without reward shaping, which changes only the sum of the components."""
    if config.grpo.adv_estimator.name == "gdpo" and config.grpo.reward_shaping.enabled:
        raise InvalidValue(
            "grpo.reward_shaping.enabled",
            "true, but grpo.adv_estimator.name gdpo takes the components of the reward, which are not shaped",
        )


def check_rewards_can_be_shaped(config: Config) -> None:
    """Check that reward shaping has the lengths that it needs."""
    shaping, key = config.rollout_section.reward_shaping, f"{config.algorithm}.reward_shaping"
    if not shaping.enabled or shaping.stop_properly_penalty_coef is not None:
        return
    for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
        if getattr(shaping, name) is None:
            raise InvalidValue(
                f"{key}.{name}",
                f"null, but {key}.enabled needs it, or stop_properly_penalty_coef in its place",
            )


def check_rewards_can_be_scaled(config: Config) -> None:
    """Check that the interval of reward scaling is not empty."""
    scaling, key = config.rollout_section.reward_scaling, f"{config.algorithm}.reward_scaling"
    if scaling.enabled and scaling.source_max <= scaling.source_min:
        raise InvalidValue(
            f"{key}.source_max",
            f"{scaling.source_max:g} is not more than {key}.source_min ({scaling.source_min:g})",
        )


def check_advantages_have_bounds(config: Config) -> None:
    """Check that the lower bound of advantages is below the upper one."""
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        raise InvalidValue("grpo.advantage_clip_high", f"{high:g} is not more than grpo.advantage_clip_low ({low:g})")


def check_turns_are_an_agents(config: Config) -> None:
    """Check that turns are penalised only where an agent plays; NeMo-RL penalises those of NeMo Gym alone."""
    environment = config.data.environment
    if not config.grpo.penalises_turns or config.agent is not None or environment in ELSEWHERE:
        return
    key = next(name for name in PENALTIES if getattr(config.grpo, name) is not None)
    text = f"{getattr(config.grpo, key):g}, but env.{environment} is no agent, whose turns alone are penalised"
    raise InvalidValue(f"grpo.{key}", text)


def check_roles_have_rewards(config: Config) -> None:
    """Check that nothing else divides, or shapes, the rewards of an agent's roles."""
    if config.agent is None or not config.agent.roles:
        return
    estimator = config.rollout_section.group_estimator
    if estimator is not None and estimator.name in ("gdpo", "opd"):
        key = f"{config.algorithm}.adv_estimator.name"
        raise InvalidValue(key, f"{estimator.name} takes no rewards by role, which env.{config.data.environment} has")
    if config.rollout_section.reward_shaping.enabled:
        key = f"{config.algorithm}.reward_shaping.enabled"
        raise InvalidValue(key, f"true, but env.{config.data.environment} has roles, whose lengths are no episode's")


ROLLOUT_RULES: tuple[Rule, ...] = (
    check_samples_differ,
    check_dynamic_sampling_can_tell_groups_apart,
    check_rewards_can_be_scaled,
    check_rewards_can_be_shaped,
    check_roles_have_rewards,
)

RULES: tuple[Rule, ...] = (
    check_leaving_one_out_leaves_one,
    check_divisor_is_one,
    check_components_have_no_length,
    check_advantages_have_bounds,
    check_turns_are_an_agents,
    *ROLLOUT_RULES,
)
