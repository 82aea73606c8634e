"""Copies between many tensors of this process at once: looked up once, run at every refit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.refit.transports import gpu_copy


class BoundCopier:
    """Copier of each source to its destination, with conversion of element types."""

    def __init__(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Take views of equal shapes, pair by pair; no two destinations may share memory."""
        self._destinations = list(destinations)
        self._sources = list(sources)
        tensors = (*self._destinations, *self._sources)
        on_one_gpu = bool(tensors) and all(tensor.is_cuda and tensor.device == tensors[0].device for tensor in tensors)
        # One kernel launch per slice would leave a GPU idle most of the time.
        self._kernels = gpu_copy.prepare(self._destinations, self._sources) if on_one_gpu else None

    def backwards(self) -> BoundCopier:
        """Return the copier of each destination to its source."""
        return BoundCopier(self._sources, self._destinations)

    def places(self) -> tuple[object, ...]:
        """Return where the sources lie and how they are arranged; equal for copiers that read the same."""
        return tuple(
            (source.device, source.data_ptr(), source.dtype, source.shape, source.stride(), destination.dtype)
            for destination, source in zip(self._destinations, self._sources, strict=True)
        )

    @torch.no_grad()
    def run(self) -> None:
        """Copy all pairs; on a GPU, only queue the copies on the current stream."""
        if self._kernels is not None:
            self._kernels.launch()
        elif self._destinations:
            torch._foreach_copy_(self._destinations, self._sources)
