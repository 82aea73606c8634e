"""Advantages by role, where the policy plays several in an agent's episode (``env.NAME.roles``).

A role's reward is compared with the same role's in the other episodes of its group, those in which it made a response.
Whatever the roles win from one another, each learns from its own.

Shapes: ``S`` samples, ``R`` roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import SampleScored
from tandem.config.schema import RolloutsConfig
from tandem.coordinator.algorithms.advantages import advantages
from tandem.coordinator.algorithms.decoupled_advantages import clip
from tandem.coordinator.algorithms.rewards import scale
from tandem.samples.batch import SampleBatch


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
