"""Advantages that need log-probabilities, or all tokens of a batch: Reinforce++.

The coordinator, which has every sample's reward but no model, sends each sample's reward minus its baseline. The rest
happens here, where the log-probabilities are: each rank does it for its own sequences, and three sums over the ranks
make the normalisation that of the whole rollout batch. So it takes no round trip between coordinator and trainers.

Shapes: ``T`` tokens of the rank's ragged share of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.batch import Float32s
from tandem.common.config.schema import LossFn
from tandem.trainer.losses.kl import kl_penalty

_MIN_VARIANCE = 1e-8
"""Keeps a spread that is nothing but rounding from being blown up."""

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def minus_kl(advantages_T: Float32s, previous_T: Float32s, reference_T: Float32s, settings: LossFn) -> Float32s:
    """Return A_t - beta KL_t, the divergence at each token estimated under the policy that is about to be trained.

    Reinforce++ (Hu et al. 2025, arXiv:2501.03262, section 3), with the penalty of each token on that token alone, as
    NeMo-RL has it; the paper adds those of the tokens after it. `settings` has beta, the estimator and its clamps.
    """
    kl = kl_penalty(torch.from_numpy(previous_T), torch.from_numpy(reference_T), settings).numpy()
    return np.asarray(advantages_T - np.float32(settings.reference_policy_kl_penalty) * kl, dtype=np.float32)


def whitened(advantages_T: Float32s, counted_T: NDArray[np.bool_], sum_over_ranks: SumOverRanks) -> Float32s:
    """Return (A_t - mean) / deviation, both over all counted tokens of the batch (arXiv:2501.03262, section 3).

    Args:
        advantages_T: of the tokens of this rank.
        counted_T: which of them count in the loss; over all ranks, every counted token of the batch is there once.
        sum_over_ranks: adds a float64 tensor over the ranks.
    """
    own = advantages_T[counted_T].astype(np.float64)
    count, total = sum_over_ranks(torch.tensor([len(own), own.sum()], dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = sum_over_ranks(torch.tensor([np.square(own - mean).sum()], dtype=torch.float64)).tolist()
    deviation = np.sqrt(max(squares / max(1.0, count), _MIN_VARIANCE))
    return np.asarray((advantages_T - mean) / deviation, dtype=np.float32)
