"""The components of rewards: each a column of a custom loss, or a reward of its own for GDPO."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RewardError, nearest
from tandem.common.messages import SampleScored
from tandem.config import Config
from tandem.coordinator.algorithms.rewards import component_names, component_rewards


def environment_columns(config: Config, samples: Sequence[SampleScored]) -> dict[str, NDArray[np.float32]]:
    """Return the columns of a custom loss that come from environments."""
    columns = {}
    for name in config.loss_fn.environment_columns:
        column = config.loss_fn.custom_columns[name.removesuffix("_S")]
        if not any(column.name in sample.components for sample in samples):
            names = component_names(samples)
            raise RewardError(
                f"loss_fn.columns.{column.name}: environment {_environments(config)} gave no such component, but "
                f"{', '.join(names) or 'none'}{nearest(column.name, names)}"
            )
        values = [sample.components.get(column.name, column.fill) for sample in samples]
        columns[name] = np.array(values, dtype=column.dtype)
    return columns


def gdpo_components(config: Config, samples: Sequence[SampleScored]) -> NDArray[np.float64]:
    """Return the components of the rewards, as many as GDPO and its weights need."""
    names, estimator = component_names(samples), config.rollout_section.group_estimator
    weights = None if estimator is None else estimator.reward_weights
    provided = f"environment {_environments(config)} gave {', '.join(names) or 'none'}"
    if len(names) < 2:
        raise RewardError(f"grpo.adv_estimator.name: gdpo needs rewards of at least two components, {provided}")
    if weights is not None and len(weights) != len(names):
        raise RewardError(f"grpo.adv_estimator.reward_weights: {len(weights)} weights, but {provided}")
    return component_rewards(samples, config.rollout_section, names)


def _environments(config: Config) -> str:
    return ", ".join(map(repr, config.environments))
