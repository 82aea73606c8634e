"""The optimizer state of sharded parameters, as boxes of tensors.

Each tensor has its parameter's name between ``state`` and a key: ``state.model.norm.weight.exp_avg``. A rank's part
depends only on the sharding, so ranks need not agree on anything, and any other sharding can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tandem.common.errors import CheckpointError
from tandem.trainer import exposed_weights
from tandem.trainer.files.box_files import BoxFiles, BoxPart


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
