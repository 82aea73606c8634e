"""Tables of integers as columns, for layouts and programs of millions of pieces, and on the wire.

A table is a frozen struct of numpy arrays with equal row counts. Suffixes name the axes as for tensors: ``shape_PD``
has a row for each piece and a column for each dimension. On the wire a column is its raw little-endian bytes in the
narrowest integer type that fits.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError

Ints = NDArray[np.int64]
"""A column, or several side by side."""
_NARROW = tuple(np.dtype(kind).newbyteorder("<") for kind in ("i1", "i2", "i4", "i8"))
T = TypeVar("T")


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


def encode(value: object) -> bytes:
    """Return a struct, with any tables in it, as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_column)


def decode(encoded: bytes, kind: type[T], description: str) -> T:
    """Decode the output of `encode`. Raises `RefitError` for anything else, with the message "not `description`"."""
    try:
        return msgspec.msgpack.decode(encoded, type=kind, dec_hook=_decode_column)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, SyntaxError) as error:
        raise RefitError(f"not {description}: {error}") from error


def _encode_column(column: object) -> Any:
    if not isinstance(column, np.ndarray):
        raise NotImplementedError(type(column))
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    narrow = next(kind for kind in _NARROW if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return narrow.itemsize, column.shape, np.ascontiguousarray(column, narrow).data


def _decode_column(_kind: type, encoded: Any) -> Ints:
    item_size, shape, data = encoded
    flat = np.frombuffer(data, np.dtype(f"<i{item_size}"))
    return flat.astype(np.int64).reshape(shape)
