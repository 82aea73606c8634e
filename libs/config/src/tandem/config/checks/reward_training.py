"""Rules for training a reward model."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config


def check_gives_scores(config: Config) -> None:
    """Check that a reward model gives one score per response, by which pairs are compared."""
    kind = config.policy.reward_model_cfg.reward_model_type
    if kind != "bradley_terry":
        raise InvalidValue(
            "policy.reward_model_cfg.reward_model_type",
            f"{kind}, but training on pairs needs bradley_terry",
        )


RULES: tuple[Rule, ...] = (check_gives_scores,)
