"""Images of a data set: texts say them by markers, and the run's folder keeps their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import DataError
from tandem.config import Config
from tandem.samples.images.reading import ImageLimits, described
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import IMAGE_FIELDS, mark_images, marker

_PLACEHOLDER = "<image>"
"""Text in a question that says where an image stands, as many data sets have it; without, images stand in front."""


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


class ImageRows:
    """A reader of rows with images, for a vision model."""

    def __init__(self, config: Config) -> None:
        self._key = config.data.image_key
        self._limits = ImageLimits(max_pixels=config.data.max_image_pixels)
        self._found: dict[str, bytes | Path | StoredMedia] = {}
        """Images by digest: their bytes, or where these are."""

    def mark_image(self, row_name: str, image: object, folder: Path | None = None) -> str:
        """Return the marker of an image, given as bytes, path, data URI, or a mapping that has one of these.

        Relative paths begin at `folder`. Raise `DataError` that begins with `row_name`.
        """
        read = image.read() if isinstance(image, StoredMedia) else image
        marked_image, source = described(read, row_name, self._limits, folder)
        self._found.setdefault(marked_image.digest, image if isinstance(image, StoredMedia) else source)
        return marker(*marked_image)

    def row(self, row_name: str, row: Mapping[str, Any], text_key: str | None, folder: Path | None) -> dict[str, Any]:
        """Return a row whose field `text_key`, and whose conversations, have markers in the place of images.

        Conversations that begin alike, such as a better and a worse one, get the same markers.
        """
        for name, value in row.items():
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, StoredMedia) and first.kind != "image":
                raise DataError(f"{row_name} has {first.kind} in {name!r}, which is not built")
        plain = {name: self._parts(row_name, value, folder) for name, value in row.items()}
        for key in IMAGE_FIELDS if self._key is None else (self._key,):
            value = plain.pop(key, None)
            if value is None:
                continue
            images = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
            markers = [self.mark_image(row_name, image, folder) for image in images]
            if text_key is not None and isinstance(plain.get(text_key), str):
                plain[text_key] = _place_markers(row_name, plain[text_key], markers)
            elif user_messages := _find_user_messages(plain):
                text = user_messages[0]["content"]
                for message in user_messages:
                    if message["content"] == text:
                        message["content"] = _place_markers(row_name, text, markers)
            else:
                key = f"in {text_key!r} " if text_key is not None else ""
                raise DataError(f"{row_name} has images, and no text {key}(data.input_key) to show them with")
        return plain

    def _parts(self, row_name: str, value: Any, folder: Path | None) -> Any:
        """Return a field with its messages' contents as texts; another field as it is."""
        if not isinstance(value, list) or not all(isinstance(each, Mapping) and "content" in each for each in value):
            return value
        try:
            return mark_images(value, lambda image: self.mark_image(row_name, image, folder))
        except DataError as error:
            raise error if str(error).startswith(row_name) else DataError(f"{row_name}: {error}") from error

    def keep(self, folder: Path) -> None:
        """Move all images found so far to a run's folder. Raise `RunFolderError` if that fails."""
        images = ImageFolder(folder)
        for digest, source in self._found.items():
            images.put(digest, source.read() if isinstance(source, StoredMedia) else source)
        self._found.clear()  # or they would take memory as long as the run


def image_folder(config: Config) -> ImageFolder:
    """Return the images of a run; those of a replay are in the folder of the run whose samples it has."""
    run = config.logger.log_dir if config.replay is None else config.replay.run
    return ImageFolder(Path(run).absolute() / "images")


def _place_markers(row_name: str, text: str, markers: Sequence[str]) -> str:
    """Return a text with markers where it has ``<image>``, or in front of it."""
    num_places = text.count(_PLACEHOLDER)
    if not num_places:
        return "".join(markers) + text
    if num_places != len(markers):
        raise DataError(f"{row_name} has {len(markers)} images, and {_PLACEHOLDER} {num_places} times in its text")
    first, *parts = text.split(_PLACEHOLDER)
    return first + "".join(marker + after for marker, after in zip(markers, parts, strict=True))


def _find_user_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the first message of the user in each conversation of a row that has one."""
    user_messages: list[dict[str, Any]] = []
    for value in row.values():
        if isinstance(value, list) and all(isinstance(each, dict) and "content" in each for each in value):
            user_messages += [
                each for each in value if each.get("role") == "user" and isinstance(each["content"], str)
            ][:1]
    return user_messages
