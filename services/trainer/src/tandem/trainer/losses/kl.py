"""Estimates of a KL divergence from sampled tokens.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

from typing import assert_never

import torch

from tandem.config.schema import LossFn
from tandem.config.schema.loss import KlType
from tandem.trainer.losses import finite_ratio


def kl_penalty(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, settings: LossFn) -> torch.Tensor:
    """Return the configured estimate at each token, within its clamps, for use in a reward."""
    log_ratio = _clamped(reference_logprobs - logprobs, settings.kl_input_clamp_value)
    return _clamped(_of_log_ratio(log_ratio, settings.reference_policy_kl_type), settings.kl_output_clamp_value)


def weighted_kl_penalty(
    logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    settings: LossFn,
) -> torch.Tensor:
    """Return the same for use in a loss: weighted by the token's probability over that in sampling, with gradient.

    Over tokens that a policy g sampled, the mean of (p / g) k1 or (p / g) k3 is KL(p || reference), and its gradient is
    that of the divergence. The gradient of k1 or k3 alone misses the part from the sampling distribution; for k1 its
    mean is zero (Tang and Munos 2025, arXiv:2506.09477). If the two policies count as one, `sampler_logprobs_BT` are
    those in training, without gradient, and all weights are 1. The output clamp applies to the product.
    """
    weights_BT = finite_ratio(logprobs_BT - sampler_logprobs_BT)
    log_ratios_BT = reference_logprobs_BT - logprobs_BT
    bounded_BT = _clamped(log_ratios_BT, settings.kl_input_clamp_value)
    # Past the bound, nothing pulls the policy back, and nothing pushes it away from where it samples.
    weights_BT = torch.where(bounded_BT == log_ratios_BT, weights_BT, weights_BT.detach())
    estimate_BT = weights_BT * _of_log_ratio(bounded_BT, settings.reference_policy_kl_type)
    return _clamped(estimate_BT, settings.kl_output_clamp_value)


def _of_log_ratio(log_ratio: torch.Tensor, kind: KlType) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled, from log r.

    With r = reference probability / policy probability (Schulman 2020, joschu.net/blog/kl-approx.html), ``k1`` is
    -log r (unbiased, high variance), ``k2`` is (log r)^2 / 2 (biased, low variance), ``k3`` is r - 1 - log r (unbiased,
    low variance, never negative).
    """
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.exp() - 1 - log_ratio
        case unknown:
            assert_never(unknown)


def _clamped(values: torch.Tensor, bound: float | None) -> torch.Tensor:
    return values if bound is None else values.clamp(-bound, bound)
