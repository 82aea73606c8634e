"""Shared memory between processes of one host: the trainer shares its parameters, engines copy straight out of them.

The memory is an unlinked file that the trainer keeps open; engines open it as ``/proc/<pid>/fd/<fd>``. It has no name
anywhere, so it is gone with the last process that maps it, however that process ended: there is nothing to clean up.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping

import torch

from tandem.common.errors import RefitError
from tandem.refit.layout import ITEM_SIZES, PrivateMemory, SharedMemory
from tandem.refit.program import Copy, Region, Source, TransferProgram


def share(tensor: torch.Tensor) -> SharedMemory:
    """Move a CPU tensor's storage into shared memory, in place, and return its address.

    Every tensor that views the storage goes on viewing it, so a model's parameters can be shared while it trains.
    """
    # The other strategy gives the memory a name in /dev/shm, which would outlive a process that is killed.
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    fd, _size = storage._share_fd_cpu_()
    return SharedMemory(pid=os.getpid(), fd=fd)


def bind(program: TransferProgram, destinations: Mapping[str, torch.Tensor]) -> ShmProgram:
    """Open the program's sources and bind it to the engine's parameters, by storage name.

    Aliased parameters are re-pointed at the trainer's memory here and now. Raises `RefitError` if a source cannot be
    opened: its process is gone, or belongs to another user.
    """
    opened = [_Opened(source, program.engine) for source in program.sources]
    for alias in program.aliases:
        view = opened[alias.source].view(alias.region, alias.shape)
        destinations[alias.destination].data = view
    pairs = [
        (_region(destinations[copy.destination], copy), opened[copy.source].view(copy.source_region, copy.shape))
        for copy in program.copies
    ]
    return ShmProgram(program, opened, pairs)


class ShmProgram:
    """A program bound to memory on both sides."""

    def __init__(
        self, program: TransferProgram, opened: list[_Opened], pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self.num_copies = len(pairs)
        self.num_bytes = program.num_bytes
        self._program = program
        self._opened = opened
        self._pairs = pairs

    @torch.no_grad()
    def run(self) -> int:
        """Copy everything once; return the bytes written."""
        for destination, source in self._pairs:
            destination.copy_(source)
        return self.num_bytes

    def close(self) -> None:
        """Drop the views; the mappings go with the last view of them, aliased parameters included."""
        self._pairs = []
        self._opened = []


class _Opened:
    """A source storage, mapped for reading."""

    def __init__(self, source: Source, engine: str) -> None:
        if isinstance(source.address, PrivateMemory):
            raise RefitError(
                f"{engine} cannot open {source.storage!r} of {source.member}: it is private to that process"
            )
        path = f"/proc/{source.address.pid}/fd/{source.address.fd}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RefitError(
                f"{engine} cannot open {source.storage!r} of {source.member} (pid {source.address.pid}): {error.strerror}"
            ) from error
        try:
            size = os.fstat(fd).st_size
            if size < source.num_bytes:
                raise RefitError(
                    f"{engine}: {source.storage!r} of {source.member} has {size} bytes, the plan says {source.num_bytes}"
                )
            self._map = mmap.mmap(fd, source.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    def view(self, region: Region, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the region as a tensor that reads the trainer's memory."""
        dtype = getattr(torch, region.dtype)
        item_size = ITEM_SIZES[region.dtype]
        with warnings.catch_warnings():
            # The memory is mapped for reading only; nothing writes to it, and a write would fault.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=dtype, offset=region.offset % item_size)
        return flat.as_strided(shape, _in_elements(region, item_size), region.offset // item_size)


def _region(storage: torch.Tensor, copy: Copy) -> torch.Tensor:
    """Return the destination of a copy as a view of the engine's storage."""
    region = copy.destination_region
    item_size = ITEM_SIZES[region.dtype]
    if getattr(torch, region.dtype) != storage.dtype:
        raise RefitError(f"{copy.destination} is {storage.dtype}, the plan for {copy.tensor} says {region.dtype}")
    offset = storage.storage_offset() + region.offset // item_size
    return storage.detach().as_strided(copy.shape, _in_elements(region, item_size), offset)


def _in_elements(region: Region, item_size: int) -> tuple[int, ...]:
    return tuple(stride // item_size for stride in region.strides)
