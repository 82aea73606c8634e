"""Damaging files as disks, and people, do."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgspec

from tandem.samples import manifest


def first_tensor(path: Path, part: str = "") -> tuple[str, int, int]:
    """Return name, first byte and end of the first tensor of a safetensors file with this in its name."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        start, stop = entry.get("data_offsets", (0, 0))
        if part in name and stop - start:
            return name, 8 + length + start, 8 + length + stop
    raise AssertionError(f"{path} has no tensor of {part}")


def digests_in(path: Path) -> dict[str, str]:
    """Return the digests of all tensors of a safetensors file as they are."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    places = {name: [8 + length + offset for offset in entry["data_offsets"]] for name, entry in header.items()}
    return {name: manifest.digest_of(content[start:stop]) for name, (start, stop) in places.items()}


def flip_bit(path: Path, at: int, bit: int = 3) -> None:
    """Flip one bit of a byte."""
    with path.open("rb+") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flip_in_tensor(path: Path, part: str = "") -> str:
    """Flip one bit in the middle of a tensor; return its name."""
    name, start, stop = first_tensor(path, part)
    flip_bit(path, (start + stop) // 2)
    return name


def zero_page(path: Path, part: str = "") -> str:
    """Overwrite with zeros, up to a page, the beginning of a tensor; return its name."""
    name, start, stop = first_tensor(path, part)
    with path.open("rb+") as file:
        file.seek(start)
        file.write(bytes(min(4096, stop - start)))
    return name


def forge(folder: Path) -> None:
    """Have the manifest say that what lies in a checkpoint's ``policy/`` now is what was written."""
    found = manifest.read(folder)
    assert found is not None
    files = dict(found.files)
    for name in [name for name in files if name.startswith("policy/")]:
        path = folder / name
        files[name] = manifest.describe(path, digests_in(path) if path.suffix == ".safetensors" else None)
    (folder / manifest.NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(found, files=files)))


def replace(folder: Path, by: Path) -> None:
    """Put a copy of another folder in the place of one."""
    shutil.rmtree(folder)
    shutil.copytree(by, folder, symlinks=True)
