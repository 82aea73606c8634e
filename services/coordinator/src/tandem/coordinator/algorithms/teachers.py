"""The teachers of a batch whose sequences have several: a column with the index of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.config.schema.columns import TEACHER
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import EncodedProblem


def add_teachers(config: Config, batch: SampleBatch, drawn: Mapping[int, EncodedProblem]) -> SampleBatch:
    """Return the batch with the teacher of each sequence; `drawn` are the problems by rollout group."""
    numbers = {group: teacher_of(config, each.environment, each.set_name) for group, each in drawn.items()}
    teacher_S = np.array([numbers[group] for group in batch.group_S.tolist()], dtype=np.int32)
    return batch.replace(**{f"{TEACHER}_S": teacher_S})


def teacher_of(config: Config, environment: str, set_name: str) -> int:
    """Return the index of the teacher for an environment and a data set. Raises `ConfigError` if there is none."""
    names = list(filter(None, (environment, set_name or config.data.dataset_name)))
    number = config.teacher_of(*names)
    if number is None:
        raise ConfigError(
            f"on_policy_distillation.teacher_model_by_agent_name: no teacher for {' or '.join(map(repr, names))}, "
            "and no default"
        )
    return number
