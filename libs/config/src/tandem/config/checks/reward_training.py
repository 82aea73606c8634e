"""Rules for training a reward model."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.problem import Invalid
from tandem.config.schema import Config


def it_gives_scores(config: Config) -> None:
    """Check that a reward model gives one score per response, by which pairs are compared."""
    kind = config.policy.reward_model_cfg.reward_model_type
    if kind != "bradley_terry":
        raise Invalid(
            "policy.reward_model_cfg.reward_model_type",
            f"{kind}, but training on pairs needs bradley_terry",
        )


def megatron_knows_the_end(config: Config) -> None:
    """Check that the number of steps is known if Megatron-Core's schedules are stretched over the run."""
    scheduler = config.policy.megatron_cfg.scheduler
    if not config.policy.megatron_cfg.enabled or config.algorithm_section.max_num_steps >= 0:
        return
    changes = scheduler.lr_decay_style != "constant" and scheduler.lr_decay_iters is None
    if changes or scheduler.weight_decay_incr_style != "constant":
        raise Invalid(
            f"{config.algorithm}.max_num_steps",
            "-1, but policy.megatron_cfg.scheduler depends on the number of steps: set it, or set lr_decay_iters and a "
            "constant weight_decay_incr_style",
        )


RULES: tuple[Rule, ...] = (it_gives_scores, megatron_knows_the_end)
