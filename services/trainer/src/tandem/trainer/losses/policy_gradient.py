"""The policy-gradient losses of GRPO.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

from typing import Literal

import torch

from tandem.common.config.schema import LossFn
from tandem.trainer.losses.aggregate import Counts, Report, aggregate
from tandem.trainer.packing import MicroBatch

KlType = Literal["k1", "k2", "k3"]


def kl_divergence(logprobs_BT: torch.Tensor, reference_logprobs_BT: torch.Tensor, kind: KlType) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token (Schulman 2020, joschu.net/blog/kl-approx.html).

    With r = reference probability / policy probability, ``k1`` is -log r (unbiased, high variance), ``k2`` is
    (log r)^2 / 2 (biased, low variance), ``k3`` is r - 1 - log r (unbiased, low variance, never negative).
    """
    log_ratio_BT = reference_logprobs_BT - logprobs_BT
    match kind:
        case "k1":
            return -log_ratio_BT
        case "k2":
            return log_ratio_BT.square() / 2
        case "k3":
            return log_ratio_BT.exp() - 1 - log_ratio_BT


def clipped_policy_loss(
    ratio_BT: torch.Tensor, advantages_B: torch.Tensor, settings: LossFn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate loss of each token, and where the clip decided it.

    PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) with separate lower and upper bounds (DAPO, Yu et al.
    2025, arXiv:2503.14476, equation 10): max(-A r, -A clip(r, 1 - low, 1 + high)). Where the advantage is negative the
    loss is unbounded in r; the dual clip (Ye et al. 2020, arXiv:1912.09729, equation 5) bounds it by -A c.
    """
    advantages_B1 = advantages_B[:, None]
    unclipped_BT = -advantages_B1 * ratio_BT
    clipped_BT = -advantages_B1 * ratio_BT.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    if settings.ratio_clip_c is not None:
        bound_B1 = -advantages_B1 * settings.ratio_clip_c
        loss_BT = torch.where(advantages_B1 < 0, torch.minimum(loss_BT, bound_B1), loss_BT)
    return loss_BT, clipped_BT > unclipped_BT


def importance_weights(previous_logprobs_BT: torch.Tensor, generation_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Return each token's probability in training over its probability in generation.

    A weight that is no finite number, as where the engine gave a token no probability, becomes zero: such a token
    teaches nothing.
    """
    weights_BT = (previous_logprobs_BT - generation_logprobs_BT).exp()
    return torch.nan_to_num(weights_BT, nan=0.0, posinf=0.0, neginf=0.0)


class PolicyGradientLoss:
    """GRPO's loss (arXiv:2402.03300, equation 3) as NeMo-RL computes it: clipped surrogate plus KL to a reference.

    An object serves one optimizer step. Called with a micro-batch, the log-probabilities of its tokens under the policy
    in training (with gradient) and the policy's entropy at each position, it returns a scalar.
    """

    NAMES = (
        "kl",
        "approx_kl",
        "entropy",
        "clip_fraction",
        "probs_ratio",
        "probs_ratio_clamped",
        "token_mult_prob_error",
        "sampling_importance_ratio",
    )

    def __init__(self, settings: LossFn, counts: Counts, device: torch.device) -> None:
        self._settings = settings
        self._counts = counts
        self.report = Report(self.NAMES, device)

    def __call__(self, batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
        """Return the micro-batch's share of the loss."""
        settings = self._settings
        current_BT = logprobs_BT.detach()
        # Before the first optimizer step on a rollout batch the previous policy is the current one, to the bit.
        previous_BT = current_BT if batch.previous_logprobs_BT is None else batch.previous_logprobs_BT
        log_ratio_BT = logprobs_BT - previous_BT
        ratio_BT = log_ratio_BT.exp()
        loss_BT, is_clipped_BT = clipped_policy_loss(ratio_BT, batch.advantages_B, settings)
        weights_BT = importance_weights(previous_BT, batch.generation_logprobs_BT)
        if settings.use_importance_sampling_correction:
            loss_BT = weights_BT * loss_BT
        kl_BT = torch.zeros_like(current_BT)
        if settings.reference_policy_kl_penalty > 0:
            assert batch.reference_logprobs_BT is not None, "a KL penalty needs the reference's log-probabilities"
            kl_BT = kl_divergence(logprobs_BT, batch.reference_logprobs_BT, settings.kl_type)
            loss_BT = loss_BT + settings.reference_policy_kl_penalty * kl_BT
        self.report.add(
            batch.loss_mask_BT,
            kl_BT,
            kl_divergence(previous_BT, current_BT, "k3"),
            entropy_BT,
            is_clipped_BT,
            ratio_BT,
            ratio_BT.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max),
            (batch.generation_logprobs_BT - previous_BT).abs().exp(),
            weights_BT,
        )
        return aggregate(loss_BT, batch.loss_mask_BT, self._counts, token_level=settings.token_level_loss)
