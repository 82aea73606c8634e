"""The storages of one process as tensors, from which copies read and to which they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, ITEM_SIZES
from tandem.refit.transfer import CopyColumns


class CopySide(NamedTuple):
    """One end of C copies; strides and offsets in bytes."""

    storages: Sequence[str]
    storage_C: Ints
    offset_C: Ints
    shape_CD: Ints
    strides_CD: Ints
    dtype_C: Ints


def source_side(copies: CopyColumns, storages: Sequence[str]) -> CopySide:
    """Return the side that the copies read."""
    at = copies
    return CopySide(storages, at.source_C, at.source_offset_C, at.shape_CD, at.source_strides_CD, at.source_dtype_C)


def destination_side(copies: CopyColumns, storages: Sequence[str]) -> CopySide:
    """Return the side that the copies write."""
    at = copies
    strides_CD, dtype_C = at.destination_strides_CD, at.destination_dtype_C
    return CopySide(storages, at.destination_C, at.destination_offset_C, at.shape_CD, strides_CD, dtype_C)


def item_sizes(dtype_C: Ints) -> Ints:
    """Return bytes per element for codes of element types."""
    sizes_C: Ints = ITEM_SIZE_OF_CODE[dtype_C]
    return sizes_C


def wire_bytes(copies: CopyColumns) -> Ints:
    """Return the bytes of each copy on a link: its elements in the smaller of its two types."""
    sizes_C = np.minimum(item_sizes(copies.source_dtype_C), item_sizes(copies.destination_dtype_C))
    moved_C: Ints = copies.shape_CD.prod(axis=1, dtype=np.int64) * sizes_C
    return moved_C


def torch_dtype(code: int) -> torch.dtype:
    """Return torch's type for a code."""
    dtype: torch.dtype = getattr(torch, DTYPES[code])
    return dtype


class NamedStorages:
    """Storages by name. Views are checked before they are made, and errors name their tensor."""

    def __init__(self, who: str, storages: Mapping[str, torch.Tensor]) -> None:
        """Take the storages; errors begin with the name of this process. A uint8 tensor can be viewed as any type."""
        self._who = who
        self._storages = storages
        self._flats: dict[tuple[str, int], torch.Tensor] = {}

    def views(self, side: CopySide, names: Sequence[str], tensor_C: Ints) -> list[torch.Tensor]:
        """Return a tensor per copy that shares the memory. Raises `RefitError`."""
        if not len(side.storage_C):
            return []
        size_C = item_sizes(side.dtype_C)
        ends_C = side.offset_C + ((side.shape_CD - 1) * side.strides_CD).sum(axis=1) + size_C
        keys, which_C = np.unique(np.stack([side.storage_C, side.dtype_C]), axis=1, return_inverse=True)
        which_C = which_C.reshape(-1)
        flats = []
        for number, (storage, dtype) in enumerate(keys.T.tolist()):
            rows = np.flatnonzero(which_C == number)
            name = side.storages[storage]
            flats.append(self._flat(name, dtype, names[tensor_C[rows[0]]]))
            furthest = rows[ends_C[rows].argmax()]
            if ends_C[furthest] > flats[-1].nbytes:
                raise RefitError(
                    f"{self._who}: {name!r} has {flats[-1].nbytes} bytes, the plan for {names[tensor_C[furthest]]} "
                    f"reaches byte {ends_C[furthest]}"
                )
        first_C = side.offset_C // size_C + np.array([flat.storage_offset() for flat in flats])[which_C]
        strides_CD = side.strides_CD // size_C[:, None]
        columns = (which_C.tolist(), side.shape_CD.tolist(), strides_CD.tolist(), first_C.tolist())
        return [flats[which].as_strided(*geometry) for which, *geometry in zip(*columns, strict=True)]

    def tensor(self, name: str, dtype: str, wanted_for: str) -> torch.Tensor:
        """Return a whole storage as given. Raises `RefitError` if it is missing or has another type."""
        storage = self._storages.get(name)
        if storage is None:
            raise RefitError(f"{self._who} has no parameter {name!r}, which the plan for {wanted_for} needs")
        if storage.dtype not in (getattr(torch, dtype), torch.uint8):
            raise RefitError(f"{self._who} has {name!r} as {storage.dtype}, the plan for {wanted_for} as {dtype}")
        return storage

    def flat(self, name: str, dtype: str, wanted_for: str) -> torch.Tensor:
        """Return a whole storage as a vector of elements."""
        return self._flat(name, DTYPES.index(dtype), wanted_for)

    def _flat(self, name: str, code: int, wanted_for: str) -> torch.Tensor:
        if (name, code) not in self._flats:
            storage = self.tensor(name, DTYPES[code], wanted_for).detach()
            flat = storage.as_strided((storage.numel(),), (1,))
            if storage.dtype != torch_dtype(code):
                num_elements = flat.numel() // ITEM_SIZES[DTYPES[code]] * ITEM_SIZES[DTYPES[code]]
                flat = flat[:num_elements].view(torch_dtype(code))
            self._flats[name, code] = flat
        return self._flats[name, code]
