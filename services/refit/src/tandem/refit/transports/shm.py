"""Shared memory between processes of one host: the trainer shares its parameters, engines copy straight out of them.

The memory is an unlinked file that the trainer keeps open; engines open it as ``/proc/<pid>/fd/<fd>`` and map it for
reading only. It has no name anywhere, so it is gone with the last process that maps it, however that process ended:
there is nothing to clean up. What an engine has mapped stays readable when the trainer dies, with the bytes it had.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping

import torch

from tandem.common.errors import RefitError
from tandem.refit.layout import ITEM_SIZES, SharedMemory
from tandem.refit.program import Alias, Copy, Region, Source, TransferProgram


def share(tensor: torch.Tensor) -> SharedMemory:
    """Move a CPU tensor's storage into shared memory, in place, and return its address.

    Every tensor that views the storage goes on viewing it, so a model's parameters can be shared while it trains. The
    storage holds one file descriptor for as long as it lives. Sharing it again returns the same address. Offsets in a
    layout count from the start of the storage: the tensor's own first byte lies at ``storage_offset``.

    Raises:
        RefitError: the tensor is not on the CPU or has no bytes, or the machine has no more shared memory.

    """
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        raise RefitError(f"a storage of {storage.nbytes()} bytes on {storage.device} cannot be shared")
    try:
        # Torch unlinks the file as it creates it; its other strategy would give the memory a name that outlives us.
        fd, _size = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise RefitError(f"{storage.nbytes()} bytes cannot be shared: {error}") from error
    return SharedMemory(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)


def bind(program: TransferProgram, destinations: Mapping[str, torch.Tensor]) -> ShmProgram:
    """Open the program's sources and bind it to the engine's parameters.

    Args:
        program: made by `tandem.refit.planner.plan`.
        destinations: the engine's live parameters by storage name. Byte 0 of a storage is its parameter's first
            element. Those that are aliased are re-pointed at the trainer's memory here and now: each `run` of the
            trainer's optimizer shows through at once, and a write to them faults, because the memory is mapped for
            reading only.

    Raises:
        RefitError: a source cannot be opened because its process is gone or belongs to another user, or a destination
            is not what was planned for. No destination was touched.

    """
    opened = [_Opened(source, program.engine) for source in program.sources]
    pairs = [
        (_destination(program.engine, copy, destinations), opened[copy.source].view(copy.source_region, copy.shape))
        for copy in program.copies
    ]
    aliased = [
        (_parameter(program.engine, alias, alias.dtype, destinations), opened[alias.source].range(alias))
        for alias in program.aliases
    ]
    for parameter, range_ in aliased:
        if parameter.nbytes != range_.nbytes:
            raise RefitError(f"{program.engine} has a parameter of {parameter.nbytes} bytes for {range_.nbytes} bytes")
    for parameter, range_ in aliased:
        parameter.data = range_.as_strided(parameter.shape, parameter.stride())
    return ShmProgram(program, pairs)


class ShmProgram:
    """A program bound to memory on both sides; `run` looks nothing up."""

    def __init__(self, program: TransferProgram, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.num_copies = len(pairs)
        self.num_bytes = program.num_bytes
        self._destinations = [destination for destination, _ in pairs]
        self._sources = [source for _, source in pairs]

    @torch.no_grad()
    def run(self) -> int:
        """Copy everything once; return the bytes written.

        The trainer must not step meanwhile. The sources are mapped, so this does not notice that the trainer has died.
        """
        if self._destinations:
            torch._foreach_copy_(self._destinations, self._sources)
        return self.num_bytes

    def close(self) -> None:
        """Drop the views; a mapping goes with the last tensor that reads it, aliased parameters included."""
        self._destinations = []
        self._sources = []


class _Opened:
    """A source storage, mapped for reading."""

    def __init__(self, source: Source, engine: str) -> None:
        self._what = f"{source.storage!r} of {source.member}"
        self._engine = engine
        if not isinstance(source.address, SharedMemory):
            raise RefitError(f"{engine} cannot open {self._what}: it is private to that process")
        path = f"/proc/{source.address.pid}/fd/{source.address.fd}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(
                f"{engine} cannot open {self._what}: {_why(error, source.address)}; memory is shared by processes that "
                "run on one machine, in one container, as one user"
            ) from error
        try:
            status = os.fstat(fd)
            if status.st_ino != source.address.inode or status.st_size < source.num_bytes:
                raise RefitError(f"{engine} cannot open {self._what}: the memory it was planned for is gone")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults in the first refit
            self._map = mmap.mmap(fd, source.num_bytes, flags, mmap.PROT_READ)
        except OSError as error:
            raise RefitError(f"{engine} cannot map {self._what}: {error.strerror}") from error
        finally:
            os.close(fd)

    def view(self, region: Region, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the region as a tensor that reads the trainer's memory."""
        flat = self._elements(region.dtype, 0, len(self._map) // ITEM_SIZES[region.dtype])
        return _strided(flat, region, shape, f"{self._engine}: {self._what}")

    def range(self, alias: Alias) -> torch.Tensor:
        """Return all elements of an alias as one dimension."""
        return self._elements(alias.dtype, alias.offset, alias.num_bytes // ITEM_SIZES[alias.dtype])

    def _elements(self, dtype: str, offset: int, count: int) -> torch.Tensor:
        with warnings.catch_warnings():
            # The memory is mapped for reading only; nothing writes to it, and a write would fault.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=getattr(torch, dtype), offset=offset, count=count)


def _why(error: OSError, address: SharedMemory) -> str:
    if os.path.exists(f"/proc/{address.pid}"):
        return f"{error.strerror} (process {address.pid}, descriptor {address.fd})"
    return f"its process {address.pid} is gone"


def _parameter(engine: str, part: Copy | Alias, dtype: str, destinations: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameter that a copy or an alias is for, in the element type that was planned for."""
    parameter = destinations.get(part.destination)
    if parameter is None:
        raise RefitError(f"{engine} has no parameter {part.destination!r}, which the plan for {part.tensor} writes")
    if parameter.dtype != getattr(torch, dtype):
        raise RefitError(
            f"{engine} has {part.destination!r} as {parameter.dtype}, the plan for {part.tensor} as {dtype}"
        )
    return parameter


def _destination(engine: str, copy: Copy, destinations: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the destination of a copy as a view of the engine's parameter."""
    region = copy.destination_region
    parameter = _parameter(engine, copy, region.dtype, destinations).detach()
    flat = parameter.as_strided((parameter.numel(),), (1,))
    return _strided(flat, region, copy.shape, f"{engine}: {copy.destination!r}")


def _strided(flat: torch.Tensor, region: Region, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """Return a region of a storage that is given as one dimension. Raises `RefitError` if it does not lie inside."""
    item_size = flat.element_size()
    strides = [stride // item_size for stride in region.strides]
    last = region.offset // item_size + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if last >= flat.numel():
        raise RefitError(f"{what} has {flat.nbytes} bytes, the plan reaches byte {(last + 1) * item_size}")
    return flat.as_strided(shape, strides, flat.storage_offset() + region.offset // item_size)
