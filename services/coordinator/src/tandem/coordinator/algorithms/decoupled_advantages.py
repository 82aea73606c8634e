"""Advantages of several rewards that are normalised apart, and clipped ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.common.numeric import differ
from tandem.config.schema import AdvEstimator
from tandem.coordinator.algorithms.advantages import valid_advantages


def decouple_advantages(
    rewards_GNC: NDArray[np.float64], settings: AdvEstimator, counts_GN: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Return the advantage of each sample by GDPO (Liu et al. 2026, arXiv:2601.05242, section 3).

    ``A = sum over c of w_c A_c``, where ``A_c`` is `group_advantages` of one component and ``w_c`` its weight. So a
    component with rewards close together counts as much as one with rewards far apart. Then ``A`` minus its mean over
    the whole batch is divided by its (unbiased) standard deviation, so that its size does not grow with ``C``. Samples
    that do not count in `counts_GN` (None: all do), or have none to be compared with, are left out of both, and have
    zero.

    Returns:
        ``advantages_GN``.

    """
    if counts_GN is None:
        counts_GN = np.ones(rewards_GNC.shape[:2], dtype=np.bool_)
    weights_C = settings.reward_weights or (1.0,) * rewards_GNC.shape[2]
    parts = [
        valid_advantages(
            rewards_GNC[:, :, component],
            counts_GN,
            leave_one_out=settings.use_leave_one_out_baseline,
            normalize=settings.normalize_rewards,
        ).astype(np.float64)
        for component in range(rewards_GNC.shape[2])
    ]
    combined_GN = sum((w * part for w, part in zip(weights_C, parts, strict=True)), np.zeros(rewards_GNC.shape[:2]))
    compared_GN = counts_GN & (counts_GN.sum(axis=1, keepdims=True) >= min(2, counts_GN.shape[1]))
    combined_X = combined_GN[compared_GN]
    if len(combined_X):
        combined_X = combined_X - combined_X.mean()
        size = sum(abs(w) * float(np.abs(part).max()) for w, part in zip(weights_C, parts, strict=True))
        has_spread = differ(combined_X, size=size)  # parts that cancel leave rounding
        combined_X = combined_X / combined_X.std(ddof=1) if has_spread else np.zeros_like(combined_X)
    advantages_GN = np.zeros(counts_GN.shape, dtype=np.float32)
    advantages_GN[compared_GN] = combined_X
    return advantages_GN


def clip(
    advantages_GN: NDArray[np.float32],
    counts_GN: NDArray[np.bool_],
    settings: AdvEstimator,
    bounds: tuple[float | None, float | None],
) -> NDArray[np.float32]:
    """Clip advantages to the configured bounds. Those of samples that do not count stay zero.

    Those of Reinforce++ are normalised, and then clipped, by the trainers, which have all tokens.
    """
    if settings.name == "reinforce_plus_plus":
        return advantages_GN
    return np.where(counts_GN, np.clip(advantages_GN, *bounds), advantages_GN)
