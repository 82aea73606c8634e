"""Columns of 16 and 32 bits: a number is the shortest decimal that is stored as it.

Read as Python's float of 64 bits, 0.1 of a 32-bit column would be 0.10000000149011612, which no right answer equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow

Restore = Callable[[Any], Any]


def restore_decimals(rows: Iterable[Mapping[str, Any]], schema: pyarrow.Schema) -> Iterable[Mapping[str, Any]]:
    """Return rows of an Arrow table with the decimals of their short floats, within lists and structs too."""
    restores = {field.name: restore for field in schema if (restore := _find_restore(field.type)) is not None}
    if not restores:
        return rows
    return [{name: restores[name](value) if name in restores else value for name, value in row.items()} for row in rows]


def _find_restore(arrow_type: pyarrow.DataType) -> Restore | None:
    """Return what restores values of a type; None where it has no short float."""
    import pyarrow

    if pyarrow.types.is_float16(arrow_type) or pyarrow.types.is_float32(arrow_type):
        number = np.float16 if pyarrow.types.is_float16(arrow_type) else np.float32
        return lambda value: None if value is None else float(str(number(value)))
    if isinstance(arrow_type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        restore_item = _find_restore(arrow_type.value_type)
        return None if restore_item is None else lambda items: _restore_list(items, restore_item)
    if isinstance(arrow_type, pyarrow.StructType):
        fields = {field.name: restore for field in arrow_type if (restore := _find_restore(field.type)) is not None}
        return (lambda struct: _restore_struct(struct, fields)) if fields else None
    return None


def _restore_list(items: Any, restore: Restore) -> Any:
    return None if items is None else [restore(item) for item in items]


def _restore_struct(struct: Any, restores: Mapping[str, Restore]) -> Any:
    if struct is None:
        return None
    return {name: restores[name](value) if name in restores else value for name, value in struct.items()}
