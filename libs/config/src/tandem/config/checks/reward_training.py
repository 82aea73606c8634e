"""Rules of the training of a reward model."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.problem import Invalid
from tandem.config.schema import Config


def it_gives_scores(config: Config) -> None:
    """Pairs are compared by a number of each response; a value of each token is another thing."""
    kind = config.policy.reward_model_cfg.reward_model_type
    if kind != "bradley_terry":
        raise Invalid(
            "policy.reward_model_cfg.reward_model_type",
            f"{kind}, but what is learned from pairs is bradley_terry",
        )


def megatron_knows_the_end(config: Config) -> None:
    """Its schedules are stretched over the run, whose length is not known where epochs alone end it."""
    scheduler = config.policy.megatron_cfg.scheduler
    if not config.policy.megatron_cfg.enabled or config.algorithm_section.max_num_steps >= 0:
        return
    changes = scheduler.lr_decay_style != "constant" and scheduler.lr_decay_iters is None
    if changes or scheduler.weight_decay_incr_style != "constant":
        raise Invalid(
            f"{config.algorithm}.max_num_steps",
            "-1, but policy.megatron_cfg.scheduler goes by the number of steps: give it, or lr_decay_iters, and a "
            "constant weight_decay_incr_style",
        )


RULES: tuple[Rule, ...] = (it_gives_scores, megatron_knows_the_end)
