"""Checkpoints on disk: ``policy/`` in Hugging Face's format, ``optimizer/`` by torch.distributed.checkpoint.

Both are safetensors files and JSON: nothing in a checkpoint is ever unpickled. Each rank writes its part and syncs it.
If one fails, all raise, so that none waits for another; making the folder count as whole is the coordinator's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tandem.common.config import Config
from tandem.common.errors import CheckpointError
from tandem.common.tokenizer import load_tokenizer
from tandem.trainer import optimizer_files, policy_files

POLICY = "policy"
OPTIMIZER = "optimizer"
MAX_FILE_BYTES = 5 * 10**9
"""Of one file: what a rank writes is in its memory once more, a file at a time."""
_MESSAGE_BYTES = 512

Result = TypeVar("Result")


def step_of(folder: Path) -> int:
    """Return the training step after which a checkpoint ``step_<n>`` was written. Raises `CheckpointError`."""
    name = folder.resolve().name
    prefix, _, number = name.partition("_")
    if prefix != "step" or not number.isdecimal():
        raise CheckpointError(f"{folder} is no checkpoint of Tandem: its folder should be named step_<number>")
    return int(number)


def write_policy(
    folder: Path,
    model: Any,
    gathered: Iterable[Mapping[str, torch.Tensor]],
    config: Config,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Write weights, configuration and tokenizer to ``policy/`` and sync them; return the bytes this rank wrote.

    What is written has the names of Hugging Face's checkpoints. Raises `CheckpointError` on the rank that could not
    write, once all has been gathered.

    Args:
        folder: of the checkpoint.
        model: whose configuration is written; it need have no weights.
        gathered: whole tensors on the CPU, a batch at a time, which ranks other than 0 go through without a look: it
            may be collective. Rank 0 holds no more of them than a file's worth and a batch.
        config: of the run.
        max_file_bytes: of one file.
    """
    target = folder / POLICY
    writer = policy_files.Writer(target, model, max_file_bytes) if dist.get_rank() == 0 else None
    failure: CheckpointError | None = None
    for tensors in gathered:
        if writer is not None and failure is None:
            try:
                with as_checkpoint_error(f"cannot write {target}"):
                    writer.add(tensors)
            except CheckpointError as error:
                failure = error  # and gather on: the others wait for this rank
    if failure is not None:
        raise failure
    if writer is None:
        return 0
    with as_checkpoint_error(f"cannot write {target}"):
        writer.finish()
        load_tokenizer(config).save(target)
        num_bytes = sync(target.iterdir())
        sync_folder(target)
        sync_folder(folder)
        return num_bytes


def write_optimizer(folder: Path, tensors: Mapping[str, Any], *, max_file_bytes: int = MAX_FILE_BYTES) -> int:
    """Write this rank's share of the optimizer's tensors and sync it; return the bytes.

    `tensors` may be nested, and are the same on every rank but for what is sharded. Ranks do not wait for each other.
    Raises `CheckpointError`.
    """
    target = folder / OPTIMIZER
    with as_checkpoint_error(f"cannot write {target}"):
        num_bytes = sync(optimizer_files.write(target, tensors, dist.get_rank(), max_file_bytes))
        sync_folder(target)
        sync_folder(folder)
        return num_bytes


def read_optimizer(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Fill this rank's share of `tensors` in place from what any number of ranks wrote. Raises `CheckpointError`."""
    source = folder / OPTIMIZER
    with as_checkpoint_error(f"cannot read {source}"):
        optimizer_files.read(source, tensors)


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
def as_checkpoint_error(what: str) -> Iterator[None]:
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


def sync(paths: Iterable[Path]) -> int:
    """Have files on the disk; return their bytes."""
    num_bytes = 0
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            num_bytes += os.fstat(file.fileno()).st_size
    return num_bytes


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
