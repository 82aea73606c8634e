"""Copies within one GPU's address space in a few launches, by a Triton kernel and a table of tiles.

Memory of a peer GPU or of another process, opened through CUDA IPC, is in the same address space.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tandem.refit.columns import ColumnTable, Ints
from tandem.refit.transports.segments import CopyTiles, StridedCopies, tiles

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Types between which the kernel rounds like torch."""

_BLOCK = 1024


class CopyKernels:
    """Launches over tables on the GPU; it keeps the tensors, so that their addresses stay valid."""

    def __init__(self, launches: list[Callable[[], object]], tensors: list[torch.Tensor]) -> None:
        self._launches = launches
        self._tensors = tensors

    def launch(self) -> None:
        """Queue all copies on the current stream."""
        for launch in self._launches:
            launch()


def prepare(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> CopyKernels | None:
    """Return launches that copy each source to its destination; None without Triton.

    Torch copies pairs of types that the kernel does not convert.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    launches: list[Callable[[], object]] = []
    for (to, from_), rows in group_by_types(destinations, sources).items():
        tensor_pair = [destinations[row] for row in rows], [sources[row] for row in rows]
        if to == from_ or (to in _CONVERTED and from_ in _CONVERTED):
            for word, table in tiles(lay_out(*tensor_pair), to.itemsize, from_.itemsize, converts=to != from_).items():
                launches.append(_launch(table, word, to, from_, destinations[0].device))
        else:
            launches.append(functools.partial(torch._foreach_copy_, *tensor_pair))
    return CopyKernels(launches, [*destinations, *sources])


def group_by_types(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> dict[tuple[torch.dtype, torch.dtype], list[int]]:
    """Return the indices of non-empty pairs by their element types."""
    rows_by_types: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (to, from_) in enumerate(zip(destinations, sources, strict=True)):
        if to.numel():
            rows_by_types.setdefault((to.dtype, from_.dtype), []).append(index)
    return rows_by_types


def lay_out(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> StridedCopies:
    """Return pairs of tensors as addresses; all tensors of a side have one element type."""
    num_dims = max(tensor.dim() for tensor in destinations)
    shape_CD = _column(destinations, num_dims, lambda tensor: tensor.shape, 1)
    to_CD = _column(destinations, num_dims, lambda tensor: tensor.stride(), 0) * destinations[0].element_size()
    from_CD = _column(sources, num_dims, lambda tensor: tensor.stride(), 0) * sources[0].element_size()
    to_C, from_C = (np.array([t.data_ptr() for t in side], np.int64) for side in (destinations, sources))
    return StridedCopies(to_C, from_C, shape_CD, to_CD, from_CD)


def rows_of(table: ColumnTable) -> Ints:
    """Return a table with its columns side by side, as a kernel reads it."""
    return np.stack([getattr(table, field) for field in table.__struct_fields__], axis=1)


def _column(
    tensors: Sequence[torch.Tensor], num_dims: int, look: Callable[[torch.Tensor], Sequence[int]], fill: int
) -> Ints:
    rows = [(fill,) * (num_dims - tensor.dim()) + tuple(look(tensor)) for tensor in tensors]
    return np.array(rows, np.int64).reshape(len(rows), num_dims)


def _launch(
    table: CopyTiles, word: int, to: torch.dtype, from_: torch.dtype, device: torch.device
) -> Callable[[], object]:
    from tandem.refit.transports import gpu_kernel  # which imports Triton

    table_M8 = torch.from_numpy(rows_of(table)).to(device)
    types: tuple[Any, Any] = gpu_kernel.types(word, to, from_)

    def launch() -> None:
        with torch.cuda.device(device):
            gpu_kernel.copy_tiles[(len(table_M8),)](table_M8, *types, BLOCK=_BLOCK)

    return launch
