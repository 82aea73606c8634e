"""Headers of safetensors files, read without the weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from tandem.common.errors import ModelError

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Longest header in bytes; the format's own limit."""

FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element, for the element types of weights."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class TensorPlace(NamedTuple):
    """Location, shape and element type of a tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """Element type as safetensors spells it, such as ``BF16``."""
    start: int
    num_bytes: int


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those in its index, else all in the folder. Raises `ModelError`."""
    index = folder / _INDEX
    if index.is_file():
        try:
            files = sorted({folder / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files: {error}") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors files")
    return files


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of every tensor in a checkpoint, in the order of its files.

    Raises `ModelError`.
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files_of(folder):
        tensors |= _read_header(file)
    return tensors


def read_places(folder: Path) -> dict[str, TensorPlace]:
    """Return the location of every tensor in a checkpoint, in the order of its files. Raises `ModelError`."""
    places: dict[str, TensorPlace] = {}
    for path in files_of(folder):
        first, header = _read_json(path)
        try:
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                places[name] = TensorPlace(
                    path, tuple(entry["shape"]), str(entry["dtype"]), first + start, stop - start
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} has no readable safetensors header: {error}") from error
    return places


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    _, header = _read_json(path)
    try:
        return {name: (tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()}
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path} has no readable safetensors header: {error}") from error


def _read_json(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the first byte after the header, and the header's entries. Raises `ModelError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return 8 + length, header
    except (OSError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} has no readable safetensors header: {error}") from error
