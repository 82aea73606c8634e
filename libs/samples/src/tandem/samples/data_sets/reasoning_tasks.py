"""Tasks of reasoning-gym with their parameters: they generate problems, and score answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from tandem.common.errors import ConfigError, nearest

_COMPOSITE = "composite"
"""The task that mixes others; its parameter is a list of these."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of a composite."""

    name: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    config: dict[str, Any] = {}


class _Mixture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a composite."""

    datasets: Annotated[list[_Part], msgspec.Meta(min_length=1)]


def task_dataset(task: str, parameters: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Return a task as reasoning-gym's dataset: `size` problems of a seed, and their scorer.

    Raise `ConfigError` for an unknown task or parameter, naming the valid ones.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"data.task: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
    converted = _mixture(parameters) if task == _COMPOSITE else parameters
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **converted)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(_refusal(task, parameters, DATASETS[task][1], error)) from error


def _mixture(parameters: Mapping[str, Any]) -> dict[str, Any]:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    try:
        mixture = msgspec.convert(dict(parameters), _Mixture)
    except msgspec.ValidationError as error:
        example = "datasets: [{name: chain_sum, weight: 1, config: {max_terms: 4}}, ...]"
        raise ConfigError(f"data.task_params: {error} (the task composite has {example})") from error
    for part in mixture.datasets:
        if part.name not in DATASETS or part.name == _COMPOSITE:
            raise ConfigError(f"data.task_params: composite has no task {part.name!r}{nearest(part.name, DATASETS)}")
    return {"datasets": [DatasetSpec(part.name, part.weight, part.config) for part in mixture.datasets]}


def _refusal(task: str, parameters: Mapping[str, Any], config_class: Any, error: Exception) -> str:
    """Describe the unknown parameter, or else the task's own error."""
    valid = sorted(set(config_class.__dataclass_fields__) - {"seed", "size"})
    unknown = next((name for name in parameters if name not in valid), None)
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    fault = (
        f"refuses {dict(parameters)}: {reason}"
        if unknown is None
        else f"has no parameter {unknown!r}{nearest(unknown, valid)}"
    )
    return f"data.task_params: {task} {fault} (parameters are {', '.join(valid)})"
