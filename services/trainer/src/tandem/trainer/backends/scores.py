"""The function that scores tokens for both backends."""

from __future__ import annotations

from collections.abc import Callable

from tandem.config.schema import ModelConfig
from tandem.trainer import scoring
from tandem.trainer.scores import StudentScores, TokenScores


def function_of_scores(settings: ModelConfig) -> Callable[..., TokenScores | StudentScores]:
    """Return `tandem.trainer.scoring.score_tokens`, or what does the same by fused kernels."""
    if not settings.compile:
        return scoring.score_tokens
    from tandem.trainer.backends import fused_scores  # it imports torch's compiler

    return fused_scores.score_tokens
