"""Rules of what is learned: advantages and losses."""

from __future__ import annotations

from tandem.common.config.checks.rule import Rule
from tandem.common.config.problem import Invalid
from tandem.common.config.schema import Config


def leaving_one_out_leaves_one(config: Config) -> None:
    """The leave-one-out baseline of a group of one is the mean of nothing."""
    grpo = config.grpo
    if config.algorithm == "grpo" and grpo.use_leave_one_out_baseline and grpo.num_generations_per_prompt < 2:
        raise Invalid(
            "grpo.num_generations_per_prompt",
            "1, but grpo.use_leave_one_out_baseline needs at least 2 samples of each prompt",
        )


def samples_differ(config: Config) -> None:
    """GRPO compares the samples of a group, so they must be drawn, not taken greedily."""
    if config.algorithm == "grpo" and config.policy.generation.temperature == 0:
        raise Invalid("policy.generation.temperature", "0 draws the same sample every time, and GRPO learns from none")


RULES: tuple[Rule, ...] = (
    leaving_one_out_leaves_one,
    samples_differ,
)
