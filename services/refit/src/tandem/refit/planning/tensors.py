"""The tensors of a layout as columns, computed once for all ranks that share them."""

from __future__ import annotations

import threading

import msgspec
import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, Tensor

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class TensorTable(msgspec.Struct, frozen=True, eq=False):
    """Properties of tensors: T rows of D ≥ 1 dimensions, right-aligned, missing ones of size 1."""

    tensors: tuple[Tensor, ...]
    shape_TD: Ints
    num_dims_T: Ints
    dtype_T: Ints
    """Index into `DTYPES`, or -1 for an unknown type."""
    item_size_T: Ints
    """Bytes per element; 1 for an unknown type."""

    @property
    def num_dims(self) -> int:
        """Number of dimensions, D."""
        return int(self.shape_TD.shape[1])


_MOST_KEPT = 16
_tables: dict[int, TensorTable] = {}
_lock = threading.Lock()


def tensor_table(tensors: tuple[Tensor, ...]) -> TensorTable:
    """Return the tensors as columns; ranks that share one tuple share one table."""
    with _lock:
        table = _tables.get(id(tensors))  # the table holds the tuple, so its id is not reused
        if table is None or table.tensors is not tensors:
            while len(_tables) >= _MOST_KEPT:
                del _tables[next(iter(_tables))]
            table = _tables[id(tensors)] = make_table(tensors)
        return table


def make_table(tensors: tuple[Tensor, ...]) -> TensorTable:
    """Return the tensors as columns."""
    num_dims_T = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    num_dims = max(1, int(num_dims_T.max(initial=0)))
    shapes = [(1,) * (num_dims - len(tensor.shape)) + tensor.shape for tensor in tensors]
    dtype_T = np.array([_CODES.get(tensor.dtype, -1) for tensor in tensors], np.int64)
    item_size_T = np.where(dtype_T < 0, 1, ITEM_SIZE_OF_CODE[dtype_T])
    return TensorTable(
        tensors, np.array(shapes, np.int64).reshape(len(tensors), num_dims), num_dims_T, dtype_T, item_size_T
    )
