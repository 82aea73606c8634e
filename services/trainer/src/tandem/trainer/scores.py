"""Scores: the numbers that a model gives of each token.

Shapes: ``N`` tokens scored in the place of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenScores(NamedTuple):
    """A policy's scores of tokens: float32, one number for each."""

    logprobs: torch.Tensor
    """Log-probability of the token, with gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution that it was drawn from, with gradient if requested."""
    is_likeliest: torch.Tensor
    """One if no token had a larger logit, else zero."""


class MaskedScores(NamedTuple):
    """A policy's scores of tokens over their sampling masks, for a loss that holds it against a reference: float32."""

    logprobs: torch.Tensor
    """Log-probability of the token in its mask, with gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution that it was drawn from, without gradient."""
    is_likeliest: torch.Tensor
    """One if no token had a larger logit, else zero."""
    whole_logprobs: torch.Tensor
    """Log-probability of the token in the whole vocabulary, with gradient."""


class TokenValues(NamedTuple):
    """A value model's scores of tokens: float32, one number for each."""

    values: torch.Tensor
    """Expected rest of the response's return, before the token; with gradient."""


class StudentScores(NamedTuple):
    """A policy's scores of tokens, and of other tokens in their places; float32."""

    logprobs: torch.Tensor
    """Log-probability of the token, with gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution that it was drawn from, with gradient if requested."""
    is_likeliest: torch.Tensor
    """One if no token had a larger logit, else zero."""
    other_logprobs: torch.Tensor
    """Log-probabilities of the ``N`` other tokens at each position, with gradient."""


class TopTokens(NamedTuple):
    """The ``N`` likeliest tokens at each position, the likeliest first."""

    logits: torch.Tensor
    """float32, divided by the temperature."""
    token_ids: torch.Tensor
    """int32."""


class JudgedTokens(NamedTuple):
    """The same, with how far the model is to be trusted at each position."""

    logits: torch.Tensor
    """float32, divided by the temperature."""
    token_ids: torch.Tensor
    """int32."""
    confidence: torch.Tensor
    """float32, one number in a row of its own."""


Scores = TokenScores | MaskedScores | TokenValues | StudentScores | TopTokens | JudgedTokens
"""A model's scores of tokens, for a column of scores (`tandem.config.schema.columns.ColumnDeclaration.number`)."""
