"""Checkpoint manifests: what was written to each file, so that damage is noticed and named.

Of a safetensors file the header and each tensor have a digest, of any other file all its bytes. Whoever writes tensors
takes their digests in memory, before they are files. A reader looks at names, sizes, headers and small files first
(`check_files`), which costs next to nothing, and reads the tensors (`check_tensors`) beside whatever it loads: several
readers share them, so that each byte is looked at once.

No torch here: the coordinator looks for a checkpoint that is whole by itself.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from tandem.common.errors import DamagedCheckpoint
from tandem.config.schema.columns import MODELS

NAME = "manifest.json"
"""Of the file in a checkpoint's folder."""
FORMAT = 1
"""Counts up when the meaning of a manifest changes."""
DAMAGED = "is damaged"
"""What an error says of a file, after its path: the coordinator knows by it what to offer."""
_PARTS = "manifest-*.json"
_SAFETENSORS = ".safetensors"
_LISTED = (_SAFETENSORS, ".json")
"""A file of these kinds that no manifest lists would be read by somebody."""


class FileRecord(msgspec.Struct, frozen=True):
    """What was written to one file."""

    size: int
    digest: str
    """Of the header of a safetensors file, and of all bytes of any other."""
    tensors: dict[str, str] = {}
    """Digest of each tensor of a safetensors file."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``manifest.json`` says of a checkpoint."""

    format: int = FORMAT
    run_id: str
    step: int
    version: int
    """Of the weights."""
    configuration: str
    """Hash of all that a resumed run may not change (`tandem.config.dump.fingerprint`)."""
    files: dict[str, FileRecord]
    """By path within the checkpoint's folder."""


class _Range(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    tensor: str
    digest: str
    start: int
    num_bytes: int


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes that lie one after the other."""
    return xxhash.xxh3_64_hexdigest(data)


def describe(path: Path, tensors: Mapping[str, str] | None = None) -> FileRecord:
    """Return the record of a file that has been written; of a safetensors file, the digests of its `tensors` are known.

    Raises `OSError`.
    """
    if tensors is None:
        content = path.read_bytes()
        return FileRecord(len(content), digest_of(content))
    return FileRecord(path.stat().st_size, digest_of(_header(path)), dict(tensors))


def write_part(folder: Path, writer: int, files: Mapping[str, FileRecord]) -> Path:
    """Write what one process has written, for `take_parts`; return the file, which is not yet synced."""
    path = folder / f"manifest-{writer:05d}.json"
    path.write_bytes(msgspec.json.encode(files))
    return path


def take_parts(folder: Path) -> dict[str, FileRecord]:
    """Return what all processes have written, and delete their own accounts of it. Raises `OSError`."""
    found: dict[str, FileRecord] = {}
    for part in sorted(folder.glob(_PARTS)):
        found |= msgspec.json.decode(part.read_bytes(), type=dict[str, FileRecord])
        part.unlink()
    return found


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if an earlier release, which had none, wrote it.

    Raises `DamagedCheckpoint`.
    """
    path = folder / NAME
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedCheckpoint(f"{path} {DAMAGED}: {error}") from error
    if found.format != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {found.format}, this release reads {FORMAT}")
    return found


def of_model(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the checkpoint that a model's folder is in, and the manifest of that folder alone; None if it is in none.

    Raises `DamagedCheckpoint`.
    """
    actual = folder.resolve()
    found = read(actual.parent) if actual.name in MODELS else None
    return None if found is None else (actual.parent, only(found, actual.name))


def only(manifest: Manifest, subfolder: str) -> Manifest:
    """Return the manifest without the files outside of a folder of the checkpoint."""
    files = {name: record for name, record in manifest.files.items() if name.startswith(f"{subfolder}/")}
    return msgspec.structs.replace(manifest, files=files)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Compare names, sizes, headers and small files with what was written. Raises `DamagedCheckpoint`."""
    for name, record in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.size:
                raise DamagedCheckpoint(f"{path} {DAMAGED}: it has {size} bytes, {record.size} were written")
            content = _header(path) if path.suffix == _SAFETENSORS else path.read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} {DAMAGED}: it is missing") from None
        except (OSError, ValueError, struct.error) as error:
            raise DamagedCheckpoint(f"{path} {DAMAGED}: it cannot be read: {error}") from error
        if digest_of(content) != record.digest:
            what = "its header is" if path.suffix == _SAFETENSORS else "its bytes are"
            raise DamagedCheckpoint(f"{path} {DAMAGED}: {what} not what was written")
    for parent in {(folder / name).parent for name in files} - {folder}:
        for path in sorted(parent.iterdir()):
            if path.suffix in _LISTED and str(path.relative_to(folder)) not in files:
                raise DamagedCheckpoint(f"{path.parent} {DAMAGED}: {path.name} is no file of this checkpoint")


def check_tensors(
    folder: Path,
    files: Mapping[str, FileRecord],
    *,
    reader: int = 0,
    num_readers: int = 1,
) -> None:
    """Read the tensors of files that `check_files` found right, and compare them with what was written.

    Args:
        folder: of the checkpoint.
        files: by path within the folder.
        reader: number of this one among those that share the tensors.
        num_readers: how many they are.

    Raises:
        DamagedCheckpoint: names the file and the tensor.
    """
    for path, group in _by_file(_share(list(_ranges(folder, files)), reader, num_readers)):
        try:
            # Mapped, as safetensors reads it: without a copy, and with few calls, so that whoever loads meanwhile is
            # seldom asked for the interpreter's lock.
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as content,
            ):
                for each in group:
                    if digest_of(content[each.start : each.start + each.num_bytes]) != each.digest:
                        raise DamagedCheckpoint(f"{path} {DAMAGED}: {each.tensor} is not what was written")
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} {DAMAGED}: it cannot be read: {error}") from error


def _header(path: Path) -> bytes:
    """Return the header of a safetensors file with its length before it. Raises what reading a broken file raises."""
    with path.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix)
        if length > path.stat().st_size:
            raise ValueError(f"its header would have {length} bytes")
        return prefix + file.read(length)


def _ranges(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[_Range]:
    """Yield where all tensors are, in the order in which they lie."""
    for name, record in sorted(files.items()):
        if not record.tensors:
            continue
        header = _header(folder / name)
        entries = {tensor: entry for tensor, entry in json.loads(header[8:]).items() if tensor in record.tensors}
        for tensor, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            yield _Range(folder / name, tensor, record.tensors[tensor], len(header) + start, stop - start)


def _share(ranges: list[_Range], reader: int, num_readers: int) -> Iterator[_Range]:
    """Yield the tensors of one reader: those whose middle lies in its share of all bytes."""
    total, before = sum(each.num_bytes for each in ranges), 0
    for each in ranges:
        middle = before + each.num_bytes / 2
        if min(int(middle * num_readers / max(total, 1)), num_readers - 1) == reader:
            yield each
        before += each.num_bytes


def _by_file(ranges: Iterable[_Range]) -> Iterator[tuple[Path, list[_Range]]]:
    groups: dict[Path, list[_Range]] = {}
    for each in ranges:
        groups.setdefault(each.path, []).append(each)
    yield from groups.items()
