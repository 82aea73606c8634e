"""CUDA IPC between processes of one host: engines copy out of the trainer's GPU memory.

The CUDA driver is called directly. Torch's own sharing keeps a reference count in shared memory for each sent tensor,
and frees nothing until the receiver has released it. Parameters live as long as their process, so handle and offset are
enough.

An allocation is opened once for all storages in it. The caller ensures that the trainer's kernels that write parameters
are done (``torch.cuda.synchronize``) before an engine runs, and that the trainer does not step meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tandem.common.errors import RefitError
from tandem.refit.layout import Address, CudaMemory, Storage, UnpeeredCudaMemory
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire

if TYPE_CHECKING:  # the planner runs in processes without torch
    import torch

_LAZY_PEER_ACCESS = 1


class CudaIpc(Transport):
    """The receiver copies out of the GPU memory of a process on its host."""

    name = "cuda_ipc"
    is_sent = False

    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return whether both are on GPUs of one host, and the destination's can access the source's memory."""
        return route.to_gpu and (
            (memory is CudaMemory and route.same_host) or (memory is UnpeeredCudaMemory and route.same_device)
        )

    def wire(self, route: Route) -> Wire | None:
        """Return the GPU's own memory, or the link between two GPUs."""
        return "same_gpu" if route.same_device else "peer_gpu"

    def explain(self, route: Route) -> str:
        """Return the reason as a phrase."""
        return "same host, and both are in GPU memory"

    def preference(self, route: Route) -> int:
        """Return more than for streams, and most for memory on the destination's own GPU."""
        return 2 if route.same_device else 1

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Open the sources' memory."""
        from tandem.refit.transports.copying import PulledTransfers

        return PulledTransfers(transfers, end, self.open)

    def open(self, storage: Storage, source: str, end: TransferEnd) -> torch.Tensor:
        """Return the bytes of a storage of the process `source`. Raises `RefitError`."""
        return end.open_once(source, storage, lambda: open_storage(storage, source, end.member, end.device))


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Bytes:
    """Memory that torch can use as a tensor without a copy, held open as long as it is used."""

    def __init__(self, address: int, num_bytes: int, allocation: ForeignAllocation) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }
        self._allocation = allocation


class ForeignAllocation:
    """An allocation of another process, open until it is garbage-collected."""

    def __init__(self, handle: bytes, device: torch.device, failure: str) -> None:
        """Open it. Raises `RefitError` with a message that begins with `failure`."""
        self._device = device
        self._activated = functools.partial(_activated, device)
        address = ctypes.c_uint64()
        with self._activated():
            raw = _Handle.from_buffer_copy(handle)
            _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), raw, _LAZY_PEER_ACCESS), failure)
        self.address = address.value

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return part of its bytes as a uint8 tensor, which keeps it open."""
        import torch

        return torch.as_tensor(_Bytes(self.address + offset, num_bytes, self), device=self._device)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            with self._activated():
                _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self.address))


_open_allocations: weakref.WeakValueDictionary[tuple[int, bytes], ForeignAllocation] = weakref.WeakValueDictionary()


def open_storage(storage: Storage, source: str, member: str, device: torch.device) -> torch.Tensor:
    """Return the bytes of a storage of another process, `source`, as a uint8 tensor on `device`.

    The allocation is closed with the last tensor that views it. Raises `RefitError`, which names `member`.
    """
    address = storage.address
    failure = f"{member} cannot open {storage.name!r} of {source}"
    if not isinstance(address, CudaMemory):
        raise RefitError(f"{failure}: it is private to that process")
    if not is_alive(address.pid):
        raise RefitError(f"{failure}: its process {address.pid} is gone")
    key = address.pid, address.handle
    allocation = _open_allocations.get(key)
    if allocation is None:
        allocation = _open_allocations[key] = ForeignAllocation(address.handle, device, failure)
    return allocation.view(address.offset, storage.num_bytes)


def share(tensor: torch.Tensor) -> CudaMemory:
    """Return the address of a CUDA tensor's storage, for other processes of this host. The tensor is not moved.

    Raises:
        RefitError: it is not on a GPU, has no bytes, or was not allocated by ``cudaMalloc``.

    """
    storage = tensor.untyped_storage()
    if storage.device.type != "cuda" or storage.nbytes() == 0:
        raise RefitError(f"a storage of {storage.nbytes()} bytes on {storage.device} cannot be shared through CUDA IPC")
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    failure = f"{storage.nbytes()} bytes on {storage.device} cannot be shared through CUDA IPC"
    with _activated(storage.device):
        pointer = ctypes.c_uint64(storage.data_ptr())
        _check(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer), failure)
        # Memory from the allocator's expandable segments has no IPC handle.
        hint = f"{failure}; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True rules it out"
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base), hint)
    offset = storage.data_ptr() - base.value
    kind = CudaMemory if has_peers(storage.device) else UnpeeredCudaMemory
    return kind(pid=os.getpid(), device=device_uuid(storage.device), handle=bytes(handle), offset=offset)


def has_peers(device: torch.device) -> bool:
    """Return whether all other visible GPUs can access the memory of one; trainers see all GPUs of their host."""
    import torch

    own_index = torch.cuda.current_device() if device.index is None else device.index
    peers = (peer for peer in range(torch.cuda.device_count()) if peer != own_index)
    return all(torch.cuda.can_device_access_peer(peer, own_index) for peer in peers)


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process, whichever devices it sees."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def is_alive(pid: int) -> bool:
    """Return whether a process of this host exists and has not exited."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def _activated(device: torch.device) -> Iterator[None]:
    """Make a device current in the calling thread, as the driver requires."""
    import torch

    with torch.cuda.device(device):
        # The context manager does nothing if the device is already the thread's default, and a thread that has not used
        # it yet would have no context. A call into the runtime makes it current.
        torch.cuda.mem_get_info(device)
        yield


@functools.cache
def _driver() -> Any:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
    driver.cuMemGetAddressRange_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    )
    return driver


def _check(status: int, failure: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RefitError(f"{failure}: {(name.value or b'CUDA error').decode()} ({status})")
