"""Advantages: how much better a sample did than its group.

Shapes: ``G`` groups of ``N`` samples, ``C`` components of a reward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import LARGEST
from tandem.common.numeric import differ
from tandem.config.schema import AdvEstimator

_EPSILON = 1e-6
"""NeMo-RL's constant in the divisor. `tandem.common.numeric` says what is no spread."""


def within(values: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the rewards, or advantages, that a run can compute with; NaN and infinities are not among them.

    `tandem.common.numeric` says why there are others.
    """
    return np.asarray(np.abs(values) <= LARGEST)


def advantages(
    rewards_GN: NDArray[np.float64], settings: AdvEstimator, counts_GN: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the advantage of each sample by the configured estimator; zero for samples that do not count.

    For Reinforce++ (Hu et al. 2025, arXiv:2501.03262), this is the reward minus its baseline: the mean of its group, or
    zero. The rest needs tokens, and is in `tandem.trainer.advantages`.
    """
    if settings.name == "reinforce_plus_plus":
        if not settings.minus_baseline:
            return np.where(counts_GN, rewards_GN, 0.0).astype(np.float32)
        return valid_advantages(rewards_GN, counts_GN, leave_one_out=False, normalize=False)
    if settings.scale_rewards == "batch":
        return batch_advantages(rewards_GN, counts_GN, leave_one_out=settings.use_leave_one_out_baseline)
    return valid_advantages(
        rewards_GN,
        counts_GN,
        leave_one_out=settings.use_leave_one_out_baseline,
        normalize=settings.normalize_rewards,
    )


def valid_advantages(
    rewards_GN: NDArray[np.float64], counts_GN: NDArray[np.bool_], *, leave_one_out: bool, normalize: bool
) -> NDArray[np.float32]:
    """Return `group_advantages` of the samples that count, as if each group had only these; zero for the others.

    An incomplete group with fewer than two samples left has zero, too.
    """
    advantages_GN = np.zeros(rewards_GN.shape, dtype=np.float32)
    whole_G = counts_GN.all(axis=1)
    advantages_GN[whole_G] = group_advantages(rewards_GN[whole_G], leave_one_out=leave_one_out, normalize=normalize)
    for group in np.flatnonzero(~whole_G):
        left_N = counts_GN[group]
        if left_N.sum() >= 2:
            group_rewards = rewards_GN[group : group + 1, left_N]
            advantages_GN[group, left_N] = group_advantages(
                group_rewards, leave_one_out=leave_one_out, normalize=normalize
            )[0]
    return advantages_GN


def batch_advantages(
    rewards_GN: NDArray[np.float64], counts_GN: NDArray[np.bool_], *, leave_one_out: bool
) -> NDArray[np.float32]:
    """Return the rewards minus the baselines of their groups, divided by the spread of the whole batch.

    That is ``s + 1e-6`` with ``s`` the unbiased standard deviation of all rewards that count (Liu et al. 2025,
    arXiv:2508.08221; TRL's ``scale_rewards: batch``), so that a group of nearly equal rewards is not blown up.
    """
    advantages_GN = valid_advantages(rewards_GN, counts_GN, leave_one_out=leave_one_out, normalize=False)
    rewards_X = rewards_GN[counts_GN]
    if len(rewards_X) < 2 or not differ(rewards_X):
        return advantages_GN
    divided_GN: NDArray[np.float32] = (advantages_GN / (rewards_X.std(ddof=1) + _EPSILON)).astype(np.float32)
    return divided_GN


def group_advantages(rewards_GN: NDArray[np.float64], *, leave_one_out: bool, normalize: bool) -> NDArray[np.float32]:
    """Return the advantage of each sample within its prompt group.

    With ``r_i`` the rewards of a group of ``N`` samples, ``A_i = r_i - b_i``. The baseline ``b_i`` is the mean of the
    *other* ``N - 1`` rewards (`leave_one_out`: the RLOO baseline, Ahmadian et al. 2024, arXiv:2402.14740, section 2.2)
    or of all ``N`` (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2). `normalize` divides by ``s_i + 1e-6``,
    where ``s_i`` is the population standard deviation of the rewards that make the baseline, as NeMo-RL v0.3 does. If
    these are equal but for rounding, as the others of a lone success are, the advantage stays as it is. A group without
    spread has advantages of zero.

    Args:
        rewards_GN: finite rewards of ``G`` groups of ``N`` samples.
        leave_one_out: whether a sample's own reward is left out of its baseline. Needs ``N >= 2``.
        normalize: whether to divide by the standard deviation.

    Returns:
        ``advantages_GN``.

    """
    num_samples = rewards_GN.shape[1]
    assert num_samples >= 1 + leave_one_out, "the configuration is checked before anything starts"
    if leave_one_out:
        peer_NM = np.nonzero(~np.eye(num_samples, dtype=np.bool_))[1].reshape(num_samples, -1)
        compared_GNM = rewards_GN[:, peer_NM]
    else:
        compared_GNM = np.repeat(rewards_GN[:, None, :], num_samples, axis=1)
    advantages_GN: NDArray[np.float64] = rewards_GN - compared_GNM.mean(axis=-1)
    if normalize:
        differ_GN = differ(compared_GNM)
        std_GN = compared_GNM.std(axis=-1)
        advantages_GN[differ_GN] /= std_GN[differ_GN] + _EPSILON
    advantages_GN[~differ(rewards_GN)] = 0.0  # rounding, which a later normalisation would blow up
    return advantages_GN.astype(np.float32)
