"""Tables of columns on the wire: raw little-endian bytes in the narrowest integer type."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints

_NARROW = tuple(np.dtype(kind).newbyteorder("<") for kind in ("i1", "i2", "i4", "i8"))
T = TypeVar("T")


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
