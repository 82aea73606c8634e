"""Optimizers and schedules by the path of their class, and optimizer state as boxes of tensors.

Each tensor of the state has its parameter's name between ``state`` and a key: ``state.model.norm.weight.exp_avg``. A
rank's part depends only on the sharding, so ranks need not agree on anything, and any other sharding can read it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tandem.common.errors import CheckpointError, ConfigError, nearest
from tandem.config.schema import OptimizerConfig, SchedulerEntry
from tandem.trainer import exposed_weights
from tandem.trainer.files.box_files import BoxFiles, BoxPart

Built = TypeVar("Built")


def make_optimizer(
    settings: OptimizerConfig, parameters: Sequence[Iterable[torch.nn.Parameter]], section: str = "policy"
) -> torch.optim.Optimizer:
    """Build the ``optimizer`` of a model's section over lists of `parameters`, each a group of its own.

    If the configuration sets neither ``fused`` nor ``foreach``, and the class has a fused implementation, that is used.
    Raises `ConfigError`.
    """
    optimizer_class = _class_of(settings.name, torch.optim.Optimizer, f"{section}.optimizer.name")
    kwargs = dict(settings.kwargs)
    if "fused" in _parameters_of(optimizer_class) and not {"fused", "foreach"} & kwargs.keys():
        kwargs["fused"] = True
    return _call(
        optimizer_class, [{"params": list(group)} for group in parameters], kwargs, f"{section}.optimizer.kwargs"
    )


def make_scheduler(
    entries: Sequence[SchedulerEntry], optimizer: torch.optim.Optimizer, section: str = "policy"
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the ``scheduler`` of a model's section.

    No schedule keeps the learning rate, one is used as it is, several follow each other. Raises `ConfigError`.
    """
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []
    milestones: list[int] = []
    for index, entry in enumerate(entries):
        if entry.milestones is not None:
            milestones = list(entry.milestones)
            continue
        key = f"{section}.scheduler[{index}]"
        scheduler_class = _class_of(entry.name or "", torch.optim.lr_scheduler.LRScheduler, f"{key}.name")
        schedulers.append(_call(scheduler_class, optimizer, dict(entry.kwargs), f"{key}.kwargs"))
    if not schedulers:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if len(schedulers) == 1:
        return schedulers[0]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones)


def _class_of(path: str, base: type[Built], key: str) -> type[Built]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key}: there is no module {module_name!r} to take {path!r} from") from error
    candidate = getattr(module, name, None)
    if not (inspect.isclass(candidate) and issubclass(candidate, base)):
        valid = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base]
        raise ConfigError(f"{key}: {path!r} is no {base.__name__} class{nearest(name, valid)}")
    return candidate


def _parameters_of(built_class: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(built_class).parameters


def _call(built_class: type[Built], first: object, kwargs: Mapping[str, Any], key: str) -> Built:
    accepted = _parameters_of(built_class)
    for name in kwargs:
        if name not in accepted:
            raise ConfigError(f"{key}: {built_class.__name__} takes no {name!r}{nearest(name, accepted)}")
    try:
        return built_class(first, **kwargs)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {built_class.__name__} refuses {dict(kwargs)}: {error}") from error


def parts_of(tensors: Mapping[str, Any]) -> Iterator[BoxPart]:
    """Yield this rank's part of nested tensors. A part that several ranks hold is written by one.

    Raises `CheckpointError` for other values.
    """
    for name, tensor in _flat(tensors).items():
        if _is_written_here(tensor):
            yield BoxPart(name, tuple(tensor.shape), exposed_weights.box_of(tensor), exposed_weights.local_of(tensor))


@torch.no_grad()
def read(tensors: Mapping[str, Any], files: BoxFiles) -> None:
    """Fill this rank's part of nested tensors, in place. Raises `CheckpointError`."""
    for name, tensor in _flat(tensors).items():
        files.read(name, tuple(tensor.shape), exposed_weights.box_of(tensor), exposed_weights.local_of(tensor))


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return nested tensors by dotted names. Raises `CheckpointError` for any other value."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            flat[name] = value
        else:
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} in {name}; only tensors can be saved: choose another "
                "policy.optimizer"
            )
    return flat


def _is_written_here(tensor: torch.Tensor) -> bool:
    """Tell whether this rank writes its part. A part that several ranks hold is written by the first."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    position = tensor.device_mesh.get_coordinate()
    if position is None or not tensor.to_local().numel():
        return False
    return all(
        place == 0 for place, placement in zip(position, tensor.placements, strict=True) if placement.is_replicate()
    )
