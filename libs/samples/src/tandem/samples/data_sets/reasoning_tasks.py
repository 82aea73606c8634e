"""Tasks of reasoning-gym with their parameters: they generate problems, and score answers.

The package imports all its tasks, and with them sympy and matplotlib: over a second in each process. So a task is
imported without the others where it has a file of its name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec

from tandem.common.errors import ConfigError, nearest

_PACKAGE = "reasoning_gym"
COMPOSITE = "composite"
"""The task that mixes others; its parameter is a list of these."""
LEVEL = "curriculum_level"
"""Field of a problem's metadata: its level, where that is not the one that the file names."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of a composite."""

    name: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    config: dict[str, Any] = {}
    level: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Level of the task's curriculum in reasoning-gym; `config` has the parameters that differ from it."""


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class CurriculumSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a composite whose levels follow accuracy, named as in reasoning-gym's own trainers."""

    last_k: Annotated[int, msgspec.Meta(ge=1)] = 10
    """Steps at a level, those with problems of the task, whose mean accuracy decides about the next level."""
    success_threshold: _Share = 0.7
    """Accuracy from which the level rises by one."""
    failure_threshold: _Share = 0.1
    """Accuracy up to which it falls by one."""
    max_level: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Level that no task exceeds; null means the highest of its curriculum."""


class _Mixture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a composite."""

    datasets: Annotated[list[_Part], msgspec.Meta(min_length=1)]
    curriculum: CurriculumSettings | None = None
    """How levels follow accuracy; without it they stay."""


def task_dataset(task: str, parameters: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Return a task as reasoning-gym's dataset: `size` problems of a seed, and their scorer.

    Raise `ConfigError` for an unknown task or parameter, naming the valid ones.
    """
    dataset_class, config_class = _import_task(task)
    converted = _mixture(parameters) if task == COMPOSITE else parameters
    try:
        settings = config_class(size=size, seed=seed, **converted)
        if hasattr(settings, "validate"):  # not all have it
            settings.validate()
        return dataset_class(config=settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(_refusal(task, parameters, config_class, error)) from error


@functools.cache
def _import_task(task: str) -> tuple[Any, Any]:
    """Return the classes of a task and of its parameters. Raise `ConfigError` for an unknown task."""
    classes = import_task_alone(task) if _PACKAGE not in sys.modules else None
    if classes is not None:
        return classes
    import reasoning_gym  # noqa: F401  # it registers all tasks
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"data.task: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
    classes = DATASETS[task]
    return classes[0], classes[1]


def import_task_alone(task: str) -> tuple[Any, Any] | None:
    """Return the classes of a task and of its parameters, importing no other task; None if that is impossible.

    The modules are forgotten again, so that a later import of the package brings all of it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    if folder is None or not task.isidentifier() or task == COMPOSITE:
        return None
    file = next(iter(sorted(folder.glob(f"*/{task}.py"))), None)
    if file is None:
        return None
    group = f"{_PACKAGE}.{file.parent.name}"
    modules = _forget_package()
    try:
        for name, path in ((_PACKAGE, folder), (group, file.parent)):
            package = ModuleType(name)
            package.__path__ = [str(path)]
            sys.modules[name] = package
        importlib.import_module(f"{group}.{task}")
        classes = importlib.import_module(f"{_PACKAGE}.factory").DATASETS.get(task)
    except Exception:  # whatever it needs of the others: they are all imported then
        return None
    finally:
        _forget_package()
        sys.modules.update(modules)
    return None if classes is None else (classes[0], classes[1])


def _forget_package() -> dict[str, ModuleType]:
    """Take the package's modules from those that are imported, and return them."""
    names = [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


def _mixture(parameters: Mapping[str, Any]) -> dict[str, Any]:
    from reasoning_gym.composite import DatasetSpec

    mixture = _read_mixture(parameters)
    if mixture.curriculum is not None:
        _check_curriculum(mixture, mixture.curriculum)
    return {"datasets": [DatasetSpec(part.name, part.weight, _configure(part)) for part in mixture.datasets]}


def _read_mixture(parameters: Mapping[str, Any]) -> _Mixture:
    """Return the parameters of a composite. Raise `ConfigError` for unknown ones, and for unknown tasks."""
    from reasoning_gym.factory import DATASETS

    try:
        mixture = msgspec.convert(dict(parameters), _Mixture)
    except msgspec.ValidationError as error:
        example = "datasets: [{name: chain_sum, weight: 1, config: {max_terms: 4}}, ...]"
        raise ConfigError(f"data.task_params: {error} (the task composite has {example})") from error
    for part in mixture.datasets:
        if part.name not in DATASETS or part.name == COMPOSITE:
            raise ConfigError(f"data.task_params: composite has no task {part.name!r}{nearest(part.name, DATASETS)}")
    return mixture


def _check_curriculum(mixture: _Mixture, settings: CurriculumSettings) -> None:
    """Raise `ConfigError` if levels could not move, or would move both ways at once."""
    if settings.failure_threshold >= settings.success_threshold:
        raise ConfigError(
            f"data.task_params: curriculum.failure_threshold, {settings.failure_threshold:g}, is not below "
            f"success_threshold, {settings.success_threshold:g}"
        )
    if all(part.level is None for part in mixture.datasets):
        raise ConfigError("data.task_params: curriculum moves the tasks with a `level`, and none of `datasets` has one")
    for part in mixture.datasets:
        if part.level is not None and part.level > find_highest_level(part.name, settings):
            raise ConfigError(
                f"data.task_params: {part.name} begins at level {part.level}, above the highest, "
                f"{find_highest_level(part.name, settings)}"
            )


def read_curriculum(parameters: Mapping[str, Any]) -> tuple[CurriculumSettings, dict[str, int]] | None:
    """Return the curriculum of a composite and the first level of each task that it moves; None if it has none.

    Raise `ConfigError` as `task_dataset` does.
    """
    mixture = _read_mixture(parameters) if parameters.get("curriculum") is not None else None
    if mixture is None or mixture.curriculum is None:
        return None
    _check_curriculum(mixture, mixture.curriculum)
    return mixture.curriculum, {part.name: part.level for part in mixture.datasets if part.level is not None}


def task_at_level(parameters: Mapping[str, Any], task: str, level: int) -> dict[str, Any]:
    """Return the parameters of a composite of this task alone, at another level."""
    (part,) = (part for part in _read_mixture(parameters).datasets if part.name == task)
    return {"datasets": [msgspec.to_builtins(msgspec.structs.replace(part, level=level))]}


@functools.cache
def _count_levels(task: str) -> int:
    """Return the number of levels of a task's curriculum. Raise `ConfigError` if it has none."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(task):
        raise ConfigError(f"data.task_params: {task} has no curriculum in reasoning-gym, so it takes no level")
    return max(len(attribute.levels) for attribute in create_curriculum(task).attributes.values())


def find_highest_level(task: str, settings: CurriculumSettings) -> int:
    """Return the highest level of a task. Raise `ConfigError` if it has no curriculum."""
    highest = _count_levels(task) - 1
    return highest if settings.max_level is None else min(highest, settings.max_level)


def _configure(part: _Part) -> dict[str, Any]:
    """Return the parameters of one task. Raises `ConfigError` if its curriculum has no such level."""
    if part.level is None:
        return part.config
    from reasoning_gym.factory import create_curriculum

    highest = _count_levels(part.name) - 1
    if part.level > highest:
        raise ConfigError(f"data.task_params: {part.name} has the levels 0 to {highest}, not {part.level}")
    curriculum = create_curriculum(part.name)
    curriculum.set_global_level(part.level)
    parameters = vars(curriculum.generate_configuration())
    return {name: value for name, value in parameters.items() if name not in ("seed", "size")} | part.config


def name_task(task: str | None, metadata: Mapping[str, Any]) -> str:
    """Return the task within a composite that a problem is of, for metrics; empty if there is one task."""
    return str(metadata.get("source_dataset", "")) if task == COMPOSITE else ""


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
