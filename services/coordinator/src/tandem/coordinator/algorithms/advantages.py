"""Advantages: how much better a sample did than its group; of several rewards apart, or by role.

A role's reward is compared with the same role's in the other episodes of its group, those in which it made a response.
Whatever the roles win from one another, each learns from its own.

Shapes: ``G`` groups of ``N`` samples, ``C`` components of a reward; ``S`` samples, ``R`` roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import LARGEST, SampleScored
from tandem.common.numeric import differ
from tandem.config.schema import AdvEstimator, RolloutsConfig
from tandem.coordinator.algorithms.rewards import scale
from tandem.samples.batch import SampleBatch

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


class RoleAdvantages(NamedTuple):
    """The rewards of each role of each sample, and its advantages over its group."""

    rewards_SR: NDArray[np.float64]
    advantages_SR: NDArray[np.float32]

    @property
    def largest_S(self) -> NDArray[np.float32]:
        """The advantage of each sample that is furthest from zero, of all its roles."""
        place_S1 = np.abs(self.advantages_SR).argmax(axis=1)[:, None]
        return np.take_along_axis(self.advantages_SR, place_S1, axis=1)[:, 0]

    def put_into(self, batch: SampleBatch, samples: Sequence[SampleScored]) -> SampleBatch:
        """Return the batch of these samples in which each sequence has its own role's reward and advantage.

        What the batch has set to zero stays zero.
        """
        places = {(sample.group, sample.sample): place for place, sample in enumerate(samples)}
        keys = zip(batch.group_S.tolist(), batch.sample_S.tolist(), batch.branch_S.tolist(), strict=True)
        rows = [(places[group, sample], branch) for group, sample, branch in keys]
        roles = [samples[place].roles[branch] if samples[place].roles else 0 for place, branch in rows]
        index = np.array([place for place, _ in rows]), np.array(roles)
        counts_S = batch.num_valid_S > 0
        return batch.replace(
            advantages_S=np.where(counts_S, self.advantages_SR[index], 0).astype(np.float32),
            rewards_S=np.where(counts_S, self.rewards_SR[index], 0).astype(np.float32),
        )


def compare_roles(section: RolloutsConfig, samples: Sequence[SampleScored]) -> RoleAdvantages | None:
    """Return the advantages of samples, ordered by group, by role; None where the policy plays one.

    Where trainers make the advantages themselves (PPO), they are the rewards.
    """
    num_roles = max((len(sample.role_rewards) for sample in samples), default=0)
    if not num_roles:
        return None
    rewards_SR = scale(np.array([sample.role_rewards for sample in samples], dtype=np.float64), section.reward_scaling)
    counts_SR = np.zeros(rewards_SR.shape, dtype=np.bool_)
    for place, sample in enumerate(samples):
        counts_SR[place, [*sample.roles]] = not sample.dropped
    parts, size = [], section.num_generations_per_prompt
    for role in range(num_roles):
        advantages_GN = _compare(section, rewards_SR[:, role].reshape(-1, size), counts_SR[:, role].reshape(-1, size))
        parts.append(advantages_GN.reshape(-1))
    return RoleAdvantages(np.where(counts_SR, rewards_SR, 0.0), np.stack(parts, axis=1))


def _compare(
    section: RolloutsConfig, rewards_GN: NDArray[np.float64], counts_GN: NDArray[np.bool_]
) -> NDArray[np.float32]:
    estimator = section.group_estimator
    if estimator is None:
        return np.where(counts_GN, rewards_GN, 0.0).astype(np.float32)
    advantages_GN = advantages(rewards_GN, estimator, counts_GN)
    if section.advantage_bounds is not None:
        advantages_GN = clip(advantages_GN, counts_GN, estimator, section.advantage_bounds)
    return advantages_GN
