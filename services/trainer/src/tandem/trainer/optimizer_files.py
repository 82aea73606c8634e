"""The optimizer's tensors as safetensors files, through torch.distributed.checkpoint, which reshards them on reading.

Its own format keeps a pickle of what is where, and its collectives pickle too. Here each rank plans by itself: what it
writes follows from the sharding, and what it reads from the headers of the files, which say which part of which tensor
each holds.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from tandem.common.errors import CheckpointError

_FILES = "shard-*.safetensors"
_OLD_FORMAT = ".metadata"


def write(folder: Path, tensors: Mapping[str, Any], rank: int, max_file_bytes: int) -> list[Path]:
    """Write this rank's share of `tensors`, a nested mapping, to `folder`; return its files, not yet synced.

    A file holds about `max_file_bytes`, or one tensor if that is larger. Raises `CheckpointError` for what is no
    tensor, and whatever the file system raises.
    """
    flat = _flat(tensors)
    mine = {name: tensor for name, tensor in flat.items() if _is_written_by(tensor, rank)}
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"shard-{rank + 1:05d}-"
    if mine:
        writer = _Writer(folder, rank, _file_numbers(mine, max_file_bytes))
        with _quiet():
            save(mine, storage_writer=writer, planner=_Planner(flatten_state_dict=False), no_dist=True)
    return sorted(folder.glob(f"{prefix}*"))


def read(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Fill this rank's share of `tensors`, a nested mapping, in place from `folder`.

    Raises `CheckpointError` for files that are missing, and whatever the libraries raise for files that are broken.
    """
    reader = _Reader(folder)
    wanted = _flat(tensors)
    _require_whole(reader.metadata.state_dict_metadata, wanted)
    with _quiet():
        load(wanted, storage_reader=reader, no_dist=True)


class _Planner(DefaultSavePlanner):
    """Plans for one rank alone: that the parts of all ranks cover each tensor is checked on reading."""

    def create_local_plan(self) -> SavePlan:
        self.plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


class _Writer(HuggingFaceStorageWriter):
    """Names files by rank, since each rank plans as if it were alone."""

    def __init__(self, folder: Path, rank: int, file_numbers: dict[str, int]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=file_numbers, save_distributed=True)
        self._shard = rank + 1

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data={**plan.storage_data, "shard_index": self._shard})
            for plan in super().prepare_global_plan(plans)
        ]


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all files once, when it is made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        if not any(folder.glob(_FILES)) and (folder / _OLD_FORMAT).exists():
            raise CheckpointError("it was written by an earlier version of Tandem, in a format that is no longer read")
        self.metadata: Metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


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


def _is_written_by(tensor: torch.Tensor, rank: int) -> bool:
    """Whether `rank` writes its part: of parts that several ranks hold, the first of them writes one."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    position = tensor.device_mesh.get_coordinate()
    if position is None or not tensor.to_local().numel():
        return False
    return all(place == 0 for place, how in zip(position, tensor.placements, strict=True) if how.is_replicate())


def _file_numbers(mine: Mapping[str, torch.Tensor], max_file_bytes: int) -> dict[str, int]:
    """Deal tensors out to files, which are numbered from 1, in order."""
    numbers: dict[str, int] = {}
    number, room = 1, max_file_bytes
    for name, tensor in mine.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.nbytes > room and room < max_file_bytes:
            number, room = number + 1, max_file_bytes
        numbers[name] = number
        room -= local.nbytes
    return numbers


def _require_whole(described: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` unless the parts of each tensor, which never overlap, add up to the whole of it."""
    for name, tensor in wanted.items():
        if name not in described:
            raise CheckpointError(f"{name} is in none of its files: one is missing, or another optimizer wrote them")
        found = described[name]
        assert isinstance(found, TensorStorageMetadata)
        num_present = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        if num_present < tensor.numel():
            raise CheckpointError(f"a file is missing: {num_present} of {tensor.numel()} elements of {name} are there")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch.distributed.checkpoint about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
