"""Offloading of tensors: their bytes wait in host memory, and the tensors stay, empty."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tandem.trainer import exposed_weights

_SMALLEST_PART = 1 << 20
"""Bytes of pinned memory below which nothing is divided, as copies cost more than rounding wastes."""


def state_of(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """Return this rank's tensors of an optimizer's state on a kind of device."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = [exposed_weights.local_of(value) for value in values if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == device.type]


class OffloadedStorages:
    """Storages of tensors without their memory. Nothing may read or write the tensors until `reload`.

    An owner of the tensors, such as an optimizer, notices nothing: they are the same objects afterwards.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy every storage to host memory, pinned if it lies on a GPU, and give its own memory back to the device."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._held = [(storage, _copies_on_host(storage)) for storage in storages.values() if storage.nbytes()]
        _wait(self._devices())
        for storage, _ in self._held:
            storage.resize_(0)
        if any(device.type == "cuda" for device in self._devices()):
            torch.cuda.empty_cache()  # otherwise it stays with this process

    def reload(self) -> None:
        """Take the memory again, and copy the bytes back."""
        for storage, parts in self._held:
            sizes = [host.nbytes for host in parts]
            storage.resize_(sum(sizes))
            for part, host in zip(torch.split(_bytes_of(storage), sizes), parts, strict=True):
                part.copy_(host, non_blocking=True)
        _wait(self._devices())
        self._held = []

    def _devices(self) -> set[torch.device]:
        return {storage.device for storage, _ in self._held}


def _copies_on_host(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """Begin to copy the bytes of a storage to host memory, and return where they will be, end to end."""
    if storage.device.type != "cuda":
        return [_bytes_of(storage).clone()]
    return [
        torch.empty(len(part), dtype=torch.uint8, pin_memory=True).copy_(part, non_blocking=True)
        for part in torch.split(_bytes_of(storage), _pinned_sizes(storage.nbytes()))
    ]


def _pinned_sizes(num_bytes: int) -> list[int]:
    """Divide a size into powers of two and a rest, because torch rounds each block of pinned memory up to one."""
    sizes = []
    while num_bytes > _SMALLEST_PART:
        sizes.append(1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(devices: Iterable[torch.device]) -> None:
    """Wait for copies that were begun on GPUs."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
