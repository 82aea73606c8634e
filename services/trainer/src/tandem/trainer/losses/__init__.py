"""The losses, one module for each family, and what they share: means over the batch, sums to report.

`make_loss` makes a run's configured loss.

Every mean is over the whole global batch: its divisor is counted before the batch is split over ranks and
micro-batches. So the loss is the sum of the micro-batches' losses, however the batch was split, and the same holds for
the gradient.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, assert_never

import msgspec
import torch

from tandem.common.user_code import named
from tandem.config import Config
from tandem.config.schema import LossFn
from tandem.config.schema.columns import Model
from tandem.config.schema.loss import KlType
from tandem.trainer.micro_batches import MicroBatch


class Counts(msgspec.Struct, frozen=True):
    """The divisors of means over a global batch."""

    tokens: int
    """Valid tokens: those that count in the loss."""
    sequences: int
    """Sequences with at least one valid token."""
    positive_tokens: int = 0
    """Valid tokens of sequences with a reward above zero."""


def aggregate(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, *, token_level: bool) -> torch.Tensor:
    """Return this micro-batch's part of the mean over the global batch.

    Token level: the mean over all valid tokens (DAPO, arXiv:2503.14476, equation 8). Sequence level: the mean over
    sequences of the mean over each sequence's tokens (GRPO, Shao et al. 2024, arXiv:2402.03300, equation 3).
    """
    masked_BT = torch.where(mask_BT, values_BT, 0.0)
    if token_level:
        return masked_BT.sum() / max(1, counts.tokens)
    return (masked_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / max(1, counts.sequences)


def finite_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the ratio, or zero without gradient where the ratio is not finite.

    That happens where the engine gave a token no probability. Such a token teaches nothing.
    """
    is_finite = log_ratio.detach().exp().isfinite()
    return torch.where(is_finite, log_ratio, -math.inf).exp()


class Report:
    """Sums over this rank's tokens, from which the step makes means over the global batch."""

    def __init__(self, names: tuple[str, ...], count: int, device: torch.device) -> None:
        self.names = names
        self.count = count
        """The divisor of the means: the tokens, or pairs, of the global batch."""
        self.sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        """The sums, in the order of `names`."""

    def add(self, mask: torch.Tensor, *values: torch.Tensor) -> None:
        """Add the valid values of one micro-batch by `mask`: one tensor for each name, of the mask's shape."""
        counted = [value.detach()[mask].sum(dtype=torch.float64) for value in values]
        assert len(counted) == len(self.names), "one tensor for each name"
        self.sums += torch.stack(counted)


class Loss(Protocol):
    """The function that a backend minimises, with one object for each optimizer step.

    Its class is called with the arguments of `LossClass`. The algorithm's declaration or ``loss_fn.class`` names it.
    """

    report: Report
    """Means to report beside the loss. A custom loss may have none."""

    def __call__(self, batch: MicroBatch, scores_BT: Any, /) -> torch.Tensor:
        """Return the micro-batch's part of the loss, a scalar.

        `scores_BT` are the trained model's scores of the tokens, which are not read where `MicroBatch.loss_mask_BT` is
        False. They are `TokenScores` of the policy or `TokenValues` of a value model (`tandem.trainer.scores`).
        """
        ...


class LossClass(Protocol):
    """A factory of losses."""

    def __call__(self, settings: Any, counts: Counts, device: torch.device, **kwargs: Any) -> Loss:
        """Return the loss of one optimizer step.

        Args:
            settings: section of the configuration that the algorithm's declaration names.
            counts: divisors of the means over the step's global batch.
            device: device of the report's sums.
            kwargs: ``loss_fn.kwargs``. The built-in losses take none.

        """
        ...


_loss_class: Callable[[str], LossClass] = functools.cache(named)
"""Finds every loss by its path, so that a run imports only its own."""


def make_loss(config: Config, counts: Counts, device: torch.device, model: Model = "policy") -> Loss:
    """Return the configured loss of a model, for one optimizer step on a global batch with these counts."""
    if model == "policy" and config.loss_maker is not None:
        return _loss_class(config.loss_maker)(config, counts, device)
    training = config.declaration.training_of[model]
    return _loss_class(training.loss)(getattr(config, training.loss_section), counts, device)


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
