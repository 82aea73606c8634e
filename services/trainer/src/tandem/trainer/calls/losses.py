"""The losses of single calls: sums over tokens, of log-probabilities and the numbers beside them.

A token has the probability ``p`` under the policy, ``q`` under the one that sampled it, and the advantage ``A``.

* cross_entropy: ``-weight * log p``
* importance_sampling: ``-(p / q) * A``
* ppo: ``-min(r * A, clip(r) * A)`` with ``r = p / q``, clipped to ``clip_low_threshold .. clip_high_threshold``
* cispo: ``-clip(r) * log p * A``, without a gradient through the clipped ratio
* dro: ``-(log p * A - beta / 2 * (log p - log q)^2)``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Inputs = Mapping[str, torch.Tensor]
"""``weights``, ``advantages`` and ``logprobs`` of the tokens."""
Settings = Mapping[str, float]
LossOfTokens = Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
"""From the log-probabilities of tokens, their inputs and the loss's arguments to a loss for each."""


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -inputs["weights"] * logprobs


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -_clipped(_ratio(logprobs, inputs), settings).detach() * logprobs * inputs["advantages"]


def _dro(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance)


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, settings: Settings) -> torch.Tensor:
    return torch.clamp(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


LOSSES: Mapping[str, LossOfTokens] = {
    each.__name__.removeprefix("_"): each for each in (_cross_entropy, _importance_sampling, _ppo, _cispo, _dro)
}
"""Losses by their names in `LossOfCall`."""

OF_RATIOS = frozenset({"importance_sampling", "ppo", "cispo"})
"""Losses with ratios of probabilities, which grow exponentially with differences of log-probabilities."""
