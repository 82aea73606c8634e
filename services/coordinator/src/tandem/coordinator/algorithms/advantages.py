"""Advantages: how much better a sample did than its group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EPSILON = 1e-6


def group_advantages(rewards_GN: NDArray[np.float64], *, leave_one_out: bool, normalize: bool) -> NDArray[np.float32]:
    """Return the advantage of each sample within its prompt group.

    With ``r_i`` the rewards of a group of ``N`` samples, ``A_i = r_i - b_i``, where the baseline ``b_i`` is the mean of
    the *other* rewards (`leave_one_out`; Kool et al. 2019, RLOO arXiv:2402.14740) or of all of them (GRPO
    arXiv:2402.03300, equation 3). `normalize` divides by the standard deviation (with ``N - 1``) of the same rewards
    that make the baseline, as NeMo-RL does; where these do not vary the advantage is left as it is.

    Args:
        rewards_GN: ``G`` groups of ``N`` samples.
        leave_one_out: whether a sample's own reward is left out of its baseline. Needs ``N >= 2``.
        normalize: whether to divide by the standard deviation.

    Returns:
        ``advantages_GN``.

    """
    num_samples = rewards_GN.shape[1]
    if leave_one_out:
        # others_GNM[g, i] holds the rewards of group g without sample i.
        others = np.array([[j for j in range(num_samples) if j != i] for i in range(num_samples)])
        baseline_from = rewards_GN[:, others]
    else:
        baseline_from = np.repeat(rewards_GN[:, None, :], num_samples, axis=1)
    advantages_GN: NDArray[np.float64] = rewards_GN - baseline_from.mean(axis=-1)
    if normalize and baseline_from.shape[-1] > 1:
        std_GN = baseline_from.std(axis=-1, ddof=1)
        varies = std_GN > 0
        advantages_GN[varies] /= std_GN[varies] + _EPSILON
    return advantages_GN.astype(np.float32)
