"""NeMo-RL 0.8's reward penalties, which are only for NeMo Gym's rollouts."""

from __future__ import annotations

from tandem.config.schema.base import ConfigSection


class PenaltyTokenIds(ConfigSection, frozen=True, kw_only=True):
    """Tokens that reward penalties look for."""

    unwanted: tuple[int, ...] | None = None
    """Accepted: tokens that a response should not have."""
    think_open: int | None = None
    """Accepted: token that begins thinking."""
    think_close: int | None = None
    """Accepted: token that ends thinking."""


class RewardPenalties(ConfigSection, frozen=True, kw_only=True):
    """Responses of NeMo Gym's agents whose reward becomes zero. NeMo-RL applies them to no other environment."""

    penalize_duplicated_reasoning: bool = False
    """Accepted: responses that repeat their reasoning."""
    penalize_empty_final_answer: bool = False
    """Accepted: responses without a final answer."""
    penalize_unwanted_tokens: bool = False
    """Accepted: responses with tokens of `token_ids.unwanted`."""
    penalize_malformed_think_tag: bool = False
    """Accepted: responses whose tags of thinking are malformed."""
    token_ids: PenaltyTokenIds | None = None
    """Accepted: tokens that the penalties look for."""
