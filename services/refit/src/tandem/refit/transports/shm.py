"""Shared memory between processes of one host: engines copy out of the trainer's parameters.

The memory is an unlinked file that the trainer keeps open. Engines open it as ``/proc/<pid>/fd/<fd>`` and map it
read-only. It has no name, so it disappears with the last process that maps it, however that ended, and needs no
cleanup. Memory mapped by an engine stays readable, with its contents, when the trainer dies.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tandem.common.errors import RefitError
from tandem.refit.layout import Address, SharedMemory, Storage
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire

if TYPE_CHECKING:  # the planner runs in processes without torch
    import torch

Taken = TypeVar("Taken")

_DESCRIPTORS_S = 15.0
"""How long to wait for a free descriptor: connections that prove nothing are cut off after five seconds."""


class ShmTransport(Transport):
    """The receiver copies out of the source's shared memory."""

    name = "shm"
    is_sent = False

    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return whether the memory is shared, and on the destination's host."""
        return memory is SharedMemory and route.same_host

    def wire(self, route: Route) -> Wire | None:
        """Return memory."""
        return "memory"

    def explain(self, route: Route) -> str:
        """Return the reason as a phrase."""
        return "same host, and the source is in shared memory"

    def preference(self, route: Route) -> int:
        """Return more than for streams."""
        return 1

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Map the sources' memory."""
        from tandem.refit.transports.copying import PulledTransfers

        return PulledTransfers(transfers, end, self.open)

    def open(self, storage: Storage, source: str, end: TransferEnd) -> torch.Tensor:
        """Return the bytes of a storage of the process `source`. Raises `RefitError`."""
        return end.open_once(source, storage, lambda: open_storage(storage, source, end.member))


def share(tensor: torch.Tensor) -> SharedMemory:
    """Move a CPU tensor's storage into shared memory, in place, and return its address.

    All tensors that view the storage keep viewing it, so a model's parameters can be shared while it trains. The
    storage holds one file descriptor as long as it lives. Sharing it again returns the same address. Offsets in a
    layout count from the start of the storage: the tensor's first byte is at ``storage_offset``.

    Raises:
        RefitError: the tensor is not on the CPU or has no bytes, or the machine has no shared memory left.

    """
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        raise RefitError(f"a storage of {storage.nbytes()} bytes on {storage.device} cannot be shared")
    try:
        # Torch unlinks the file as it creates it; its other strategy would leave a name that outlives the process.
        fd, _size = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise RefitError(f"{storage.nbytes()} bytes cannot be shared: {error}") from error
    return SharedMemory(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)


def open_storage(storage: Storage, source: str, member: str) -> torch.Tensor:
    """Map a storage of another process, `source`, read-only; return its bytes as uint8.

    The mapping ends with the last tensor that views it. Raises `RefitError`, which names `member`, if the storage
    cannot be opened because its process is gone or belongs to another user.
    """
    label = f"{storage.name!r} of {source}"
    if not isinstance(storage.address, SharedMemory):
        raise RefitError(f"{member} cannot open {label}: it is private to that process")
    path = f"/proc/{storage.address.pid}/fd/{storage.address.fd}"
    try:
        fd = _await_descriptor(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise RefitError(
            f"{member} cannot open {label}: {_explain_error(error, storage.address)}; "
            "memory is shared by processes that run on one machine, in one container, as one user"
        ) from error
    try:
        status = os.fstat(fd)
        if status.st_ino != storage.address.inode or status.st_size < storage.num_bytes:
            raise RefitError(f"{member} cannot open {label}: the memory it was planned for is gone")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults in the first refit
        mapped = _await_descriptor(lambda: mmap.mmap(fd, storage.num_bytes, flags, mmap.PROT_READ))  # a copy of `fd`
    except OSError as error:
        raise RefitError(f"{member} cannot map {label}: {error.strerror}") from error
    finally:
        os.close(fd)
    import torch

    with warnings.catch_warnings():
        # The memory is mapped read-only on purpose: nothing writes to it, and a write would fault.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _await_descriptor(take: Callable[[], Taken]) -> Taken:
    """Return what takes a descriptor. Without a free one, wait: those that strangers hold are soon free again."""
    until = time.monotonic() + _DESCRIPTORS_S
    while True:
        try:
            return take()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _explain_error(error: OSError, address: SharedMemory) -> str:
    if os.path.exists(f"/proc/{address.pid}"):
        return f"{error.strerror} (process {address.pid}, descriptor {address.fd})"
    return f"its process {address.pid} is gone"
