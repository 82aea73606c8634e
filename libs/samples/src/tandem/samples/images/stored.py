"""Images in the files of a data set, which `datasets` maps to memory: read one by one, when wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.common.errors import DataError


class StoredMedia:
    """An image, sound or video of a row, which stays in its file until it is read."""

    __slots__ = ("_column", "_item", "_row", "kind")

    def __init__(self, kind: str, column: Any, row: int, item: int | None = None) -> None:
        """Name a place in a column of a table: a row and, if it has lists, an item."""
        self.kind = kind
        """``image``, ``audio`` or ``video``."""
        self._column = column
        self._row = row
        self._item = item

    def __str__(self) -> str:
        """Say what it is, for what takes rows as texts."""
        return f"<{self.kind}>"

    def read(self) -> bytes | Path:
        """Return its encoded bytes, or the path of its file. Raises `DataError` if it has neither."""
        value = self._column[self._row].as_py()
        value = value if self._item is None else value[self._item]
        if value is None or (value.get("bytes") is None and not value.get("path")):
            raise DataError(f"{self.kind} {self._row} of the data set has neither bytes nor a path")
        return value["bytes"] if value.get("bytes") is not None else Path(value["path"])


def stored_columns(dataset: Any) -> dict[str, str]:
    """Return the columns of a dataset that hold images, sounds or videos, or lists of these, each with its kind."""
    import datasets

    kinds = {datasets.Image: "image", datasets.Audio: "audio", getattr(datasets, "Video", datasets.Image): "video"}
    features = {name: getattr(kind, "feature", kind) for name, kind in (dataset.features or {}).items()}
    return {name: kinds[type(kind)] for name, kind in features.items() if type(kind) in kinds}


def rows_of(dataset: Any, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset, those columns as `StoredMedia`."""
    if dataset._indices is not None:  # rows are then not where the table has them
        dataset = dataset.flatten_indices()
    column_of = {name: dataset.data.column(name) for name in columns}
    for index, row in enumerate(dataset.remove_columns(list(columns))):
        yield row | {name: _wrap_media(kind, column_of[name], index) for name, kind in columns.items()}


def _wrap_media(kind: str, column: Any, row: int) -> StoredMedia | list[StoredMedia | None] | None:
    from pyarrow import types

    value = column[row]
    if not value.is_valid:
        return None
    if types.is_struct(column.type):
        return StoredMedia(kind, column, row)
    items = value.values
    return [StoredMedia(kind, column, row, item) if items[item].is_valid else None for item in range(len(items))]
