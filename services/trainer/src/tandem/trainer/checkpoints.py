"""Checkpoints on disk: ``policy/`` in Hugging Face's format, ``optimizer/`` by torch.distributed.checkpoint.

Each rank writes its part and syncs it. If one fails, all raise, so that none waits for another; making the folder count
as whole is the coordinator's business.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tandem.common.config import Config
from tandem.common.errors import CheckpointError
from tandem.common.tokenizer import load_tokenizer

POLICY = "policy"
OPTIMIZER = "optimizer"
_MESSAGE_BYTES = 512

Result = TypeVar("Result")


def step_of(folder: Path) -> int:
    """Return the training step after which a checkpoint ``step_<n>`` was written. Raises `CheckpointError`."""
    name = folder.resolve().name
    prefix, _, number = name.partition("_")
    if prefix != "step" or not number.isdecimal():
        raise CheckpointError(f"{folder} is no checkpoint of Tandem: its folder should be named step_<number>")
    return int(number)


def write_policy(folder: Path, model: Any, tensors: Mapping[str, torch.Tensor], config: Config) -> int:
    """Write weights, configuration and tokenizer to ``policy/`` and sync them; return the bytes.

    `tensors` are whole, by the model's parameter names; what is written has the names of Hugging Face's checkpoints.
    Raises `CheckpointError`.
    """
    target = folder / POLICY
    with _as_checkpoint_error(f"cannot write {target}"):
        target.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(target, state_dict=dict(tensors))
        load_tokenizer(config).save(target)
        num_bytes = _sync(target.iterdir())
        _sync_folder(target)
        _sync_folder(folder)
        return num_bytes


def write_optimizer(folder: Path, tensors: Mapping[str, Any]) -> int:
    """Write every rank's share of the optimizer's tensors; collective. Return the bytes this rank wrote."""
    target = folder / OPTIMIZER
    with _as_checkpoint_error(f"cannot write {target}"), _quiet():
        save_distributed(dict(tensors), storage_writer=FileSystemWriter(target, sync_files=True))
        mine = [*target.glob(f"__{dist.get_rank()}_*"), *(target.glob(".metadata") if dist.get_rank() == 0 else ())]
        _sync_folder(target)
        return sum(path.stat().st_size for path in mine)


def read_optimizer(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from what any number of ranks wrote; collective. Raises `CheckpointError`."""
    source = folder / OPTIMIZER
    with _as_checkpoint_error(f"cannot read {source}"), _quiet():
        load_distributed(tensors, storage_reader=FileSystemReader(source))


def agree(action: Callable[[], Result]) -> Result:
    """Run `action` here and on all ranks; raise `CheckpointError` on every rank if one of them raised."""
    try:
        result = action()
    except CheckpointError as error:
        _tell(str(error))
        raise
    for rank, error_there in enumerate(_tell("")):
        if error_there:
            raise CheckpointError(f"rank {rank} {error_there}")
    return result


def _tell(error: str) -> list[str]:
    """Exchange error messages, empty where there is none, and return those of all ranks."""
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    text = torch.frombuffer(bytearray(error.encode()[:_MESSAGE_BYTES] + b"\0"), dtype=torch.uint8)[:_MESSAGE_BYTES]
    mine[: len(text)] = text
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [bytes(message.numpy()).rstrip(b"\0").decode(errors="replace") for message in everyone]


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn what the libraries raise when a disk is full or a file is broken into `CheckpointError`."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what}: {_line(cause)}") from error
    except Exception as error:  # tokenizers raises bare `Exception` on a full disk, the others what they like
        raise CheckpointError(f"{what}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).split("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch.distributed.checkpoint about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sync(paths: Iterator[Path]) -> int:
    num_bytes = 0
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            num_bytes += os.fstat(file.fileno()).st_size
    return num_bytes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
