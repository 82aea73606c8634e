"""Raw text to learn from, without turns: rows of files or of the Hub, joined to longer texts."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.common.errors import DataError
from tandem.common.files import irregular
from tandem.common.kept_inputs import path_of
from tandem.config.named import HUB_FILES, TEXT_FILES
from tandem.config.schema import DataConfig
from tandem.samples.data_sets import sources

Text = tuple[str, str]
"""A text, after the place of its first row, for errors."""

_LOADERS = {".arrow": "arrow", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
"""Loaders of `datasets` by ending; any other is JSON."""


def raw_texts(data: DataConfig) -> list[Text]:
    """Read the texts of a data set. Raise `DataError` if that fails, or if there is no text in it."""
    key, place = data.text_key or "text", str(data.train_data_path)
    rows = _rows(data, place)
    texts = [(row_place, text) for row_place, row in rows if (text := sources.field(row_place, row, "text_key", key))]
    for row_place, text in texts:
        if not isinstance(text, str):
            raise DataError(f"{row_place}: {key!r} is not text (data.text_key)")
    if not texts:
        raise DataError(f"data: {place!r} holds no text in the field {key!r} (data.text_key)")
    return texts if data.characters_per_sample is None else list(join_to_length(texts, data.characters_per_sample))


def join_to_length(texts: Iterable[Text], num_characters: int) -> Iterator[Text]:
    """Join consecutive texts, each on lines of its own, until they have so many characters, as NeMo-RL does.

    Line breaks between texts do not count. The last one may be shorter.
    """
    begin, parts, length = "", list[str](), 0
    for row_place, text in texts:
        begin = begin if parts else row_place
        parts.append(text)
        length += len(text)
        if length >= num_characters:
            yield begin, "\n".join(parts)
            parts, length = [], 0
    if parts:
        yield begin, "\n".join(parts)


def local_files(place: str) -> list[str] | None:
    """Return the local files of a path, which may have wildcards; None if it names data on the Hub.

    A path without a match is returned as it is.
    """
    if place.startswith(HUB_FILES) or not place.endswith(TEXT_FILES):
        return None
    return sorted(glob.glob(place, recursive=True)) or [place]


def _rows(data: DataConfig, place: str) -> sources.Rows:
    files = local_files(place)
    if files is not None:
        return [row for file in files for row in _file_rows(file)]
    if place.startswith(HUB_FILES):
        return _fetch_rows(place)
    return sources.hub(place, data.split, data.subset, data.commit)


def _file_rows(path: str) -> sources.Rows:
    """Read the rows of a local file; a line of a text file is one. Raise `DataError`."""
    if not path.endswith((".arrow", ".txt")):
        return sources.file_rows(path)
    local_path = path_of(path)
    kind = irregular(local_path)
    if kind is not None:
        raise DataError(f"data: cannot read {path!r}: it is {kind}, not a file of text")
    try:
        if path.endswith(".txt"):
            with open(local_path, encoding="utf-8-sig") as file:
                return [(f"{path}:{number}", {"text": line.rstrip("\r\n")}) for number, line in enumerate(file, 1)]
        import datasets

        rows = datasets.Dataset.from_file(str(local_path))
        return [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]
    except Exception as error:  # Arrow's and the library's kinds, and those of a file that is not UTF-8
        raise DataError(f"data: cannot read {path!r}: {str(error).partition(chr(10))[0]}") from error


def _fetch_rows(place: str) -> sources.Rows:
    """Read the rows of files on the Hub. Raise `DataError`."""
    import datasets

    loader = next((name for suffix, name in _LOADERS.items() if place.endswith(suffix)), "json")
    try:
        rows: Any = datasets.load_dataset(loader, data_files=place, split="train")
        return [(f"{place}:{index}", row) for index, row in enumerate(rows)]
    except Exception as error:  # the library raises dozens of kinds, its own and the network's
        raise DataError(f"data: cannot read {place!r}: {str(error).partition(chr(10))[0]}") from error
