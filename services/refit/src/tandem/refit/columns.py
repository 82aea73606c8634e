"""Tables of integers as columns, for layouts and programs of millions of pieces.

A table is a frozen struct of numpy arrays with equal row counts. Suffixes name the axes as for tensors: ``shape_PD``
has a row for each piece and a column for each dimension. On the wire a column is its raw little-endian bytes in the
narrowest integer type that fits.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""A column, or several side by side."""


class ColumnTable(msgspec.Struct, frozen=True, eq=False):
    """A struct of columns, compared by value."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        fields = self.__struct_fields__
        return all(np.array_equal(getattr(self, field), getattr(other, field)) for field in fields)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))

    def rows(self, selection: Any) -> Self:
        """Return some rows: a slice, indices, or a mask."""
        return type(self)(*map(itemgetter(selection), msgspec.structs.astuple(self)))


def pad_dims(values_PD: Ints, num_dims: int, fill: int) -> Ints:
    """Return a column with its dimensions right-aligned in `num_dims`, with `fill` in front."""
    missing = num_dims - values_PD.shape[1]
    if not missing:
        return values_PD
    return np.concatenate([np.full((len(values_PD), missing), fill, np.int64), values_PD], axis=1)
