"""Importance weights: the correction for samples that the engine drew and the trainer trains on.

Even with the same weights the two give a token slightly different probabilities, and with older weights very different
ones. Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

import torch

from tandem.config.schema import LossFn
from tandem.trainer.losses.kl import finite_ratio


def sequence_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean over the counted tokens of each row, ``[B, 1]``; zero where none counts."""
    masked_BT = torch.where(mask_BT, values_BT, 0.0)
    return masked_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def importance_weights(
    previous_logprobs_BT: torch.Tensor,
    generation_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    settings: LossFn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight w of each token, and where it was out of bounds.

    w is its probability in training over its probability in generation; with `sequence_level_importance_ratios` the
    product of those of its sequence. A weight that is no finite number becomes zero. Out of the bounds ``[low, high]``
    of `truncated_importance_sampling_ratio_min` and `truncated_importance_sampling_ratio`

    * ``tis`` makes it the bound: min(w, high) (Yao et al. 2025, fengyao.notion.site/off-policy-rl);
    * ``icepop`` makes it zero (Ling team 2025, arXiv:2510.18855);
    * ``seq-mask-tis`` makes all weights of a sequence zero if their geometric mean is out of bounds, and leaves others
      as they are (Liu et al. 2025, yingru.notion.site).
    """
    log_weights_BT = previous_logprobs_BT - generation_logprobs_BT
    if settings.sequence_level_importance_ratios:
        sums_B1 = torch.where(mask_BT, log_weights_BT, 0.0).sum(dim=1, keepdim=True)
        weights_BT = finite_ratio(sums_B1).expand_as(log_weights_BT)
    else:
        weights_BT = finite_ratio(log_weights_BT)
    high, low = settings.truncated_importance_sampling_ratio, settings.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return weights_BT, torch.zeros_like(mask_BT)
    measured_BT = weights_BT
    if settings.truncated_importance_sampling_type == "seq-mask-tis":
        finite_BT = torch.nan_to_num(log_weights_BT, nan=0.0, posinf=0.0, neginf=0.0)
        measured_BT = sequence_means(finite_BT, mask_BT).exp().expand_as(log_weights_BT)
    is_outside_BT = (measured_BT < low) | (measured_BT > high)
    if settings.truncated_importance_sampling_type == "tis":
        return weights_BT.clamp(low, high), is_outside_BT
    return torch.where(is_outside_BT, 0.0, weights_BT), is_outside_BT
