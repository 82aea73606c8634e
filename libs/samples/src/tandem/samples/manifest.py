"""Checkpoint manifests: digests of all files, so that damage is noticed and named.

A safetensors file has a digest of its header and of each tensor, any other file one of all its bytes. A writer takes
the digests of tensors in memory, before they are files. A reader first checks names, sizes, headers and small files
(`check_files`), which is nearly free. It checks the tensors (`check_tensors`) while it loads; several readers share
them, so that each byte is read once.

Torch is not imported here: the coordinator itself looks for a whole checkpoint.
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
"""Name of the manifest in a checkpoint's folder."""
FORMAT = 1
"""Format number, raised when the meaning of a manifest changes."""
DAMAGED = "is damaged"
"""Words after the path in an error about a damaged file, by which the coordinator recognises it."""
_PARTS = "manifest-*.json"
_SAFETENSORS = ".safetensors"
_LISTED = (_SAFETENSORS, ".json")
"""Suffixes of files that would be read even if no manifest lists them."""


class FileRecord(msgspec.Struct, frozen=True):
    """Contents of a file as written."""

    size: int
    digest: str
    """Digest of the header of a safetensors file, or of all bytes of any other."""
    tensors: dict[str, str] = {}
    """Digest of each tensor of a safetensors file."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint's ``manifest.json``."""

    format: int = FORMAT
    run_id: str
    step: int
    version: int
    """Version of the weights."""
    configuration: str
    """Hash of all that a resumed run may not change (`tandem.config.dump.fingerprint`)."""
    files: dict[str, FileRecord]
    """Files by path within the checkpoint's folder."""


class _Range(NamedTuple):
    """Position of a tensor in a file."""

    path: Path
    tensor: str
    digest: str
    start: int
    num_bytes: int


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of contiguous bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def describe(path: Path, tensors: Mapping[str, str] | None = None) -> FileRecord:
    """Return the record of a written file; for a safetensors file, the digests of its `tensors` are given.

    Raises `OSError`.
    """
    if tensors is None:
        content = path.read_bytes()
        return FileRecord(len(content), digest_of(content))
    return FileRecord(path.stat().st_size, digest_of(_header(path)), dict(tensors))


def write_part(folder: Path, writer: int, files: Mapping[str, FileRecord]) -> Path:
    """Write the records of one process's files, for `take_parts`; return the path, which is not synced yet."""
    path = folder / f"manifest-{writer:05d}.json"
    path.write_bytes(msgspec.json.encode(files))
    return path


def take_parts(folder: Path) -> dict[str, FileRecord]:
    """Collect the records of all processes' files, and delete the parts. Raises `OSError`."""
    records: dict[str, FileRecord] = {}
    for part in sorted(folder.glob(_PARTS)):
        records |= msgspec.json.decode(part.read_bytes(), type=dict[str, FileRecord])
        part.unlink()
    return records


def read(folder: Path) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint; None if it is from an earlier release without manifests.

    Raises `DamagedCheckpoint`.
    """
    path = folder / NAME
    try:
        checkpoint_manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedCheckpoint(f"{path} {DAMAGED}: {error}") from error
    if checkpoint_manifest.format != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {checkpoint_manifest.format}, this release reads {FORMAT}")
    return checkpoint_manifest


def of_model(folder: Path) -> tuple[Path, CheckpointManifest] | None:
    """Return the checkpoint that holds a model's folder, and the manifest of that folder alone; None without one.

    Raises `DamagedCheckpoint`.
    """
    actual = folder.resolve()
    checkpoint_manifest = read(actual.parent) if actual.name in MODELS else None
    return None if checkpoint_manifest is None else (actual.parent, only(checkpoint_manifest, actual.name))


def only(manifest: CheckpointManifest, subfolder: str) -> CheckpointManifest:
    """Return the manifest with only the files in a folder of the checkpoint."""
    files = {name: record for name, record in manifest.files.items() if name.startswith(f"{subfolder}/")}
    return msgspec.structs.replace(manifest, files=files)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Compare names, sizes, headers and small files with the manifest. Raises `DamagedCheckpoint`."""
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
            subject = "its header is" if path.suffix == _SAFETENSORS else "its bytes are"
            raise DamagedCheckpoint(f"{path} {DAMAGED}: {subject} not what was written")
    for parent in {(folder / name).parent for name in files} - {folder}:
        for path in sorted(parent.iterdir()):
            if path.suffix in _LISTED and str(path.relative_to(folder)) not in files:
                raise DamagedCheckpoint(f"{path.parent} {DAMAGED}: {path.name} is not a file of this checkpoint")


def check_tensors(
    folder: Path,
    files: Mapping[str, FileRecord],
    *,
    reader: int = 0,
    num_readers: int = 1,
) -> None:
    """Read the tensors of files that passed `check_files`, and compare them with the manifest.

    Args:
        folder: folder of the checkpoint.
        files: records by path within the folder.
        reader: index of this reader among those that share the tensors.
        num_readers: number of readers.

    Raises:
        DamagedCheckpoint: names the file and the tensor.
    """
    for path, group in _group_by_file(_share(list(_ranges(folder, files)), reader, num_readers)):
        try:
            # Map the file as safetensors does: no copies and few calls, so that this thread seldom competes with the
            # loading
            # one for the interpreter's lock.
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as content,
            ):
                for span in group:
                    if digest_of(content[span.start : span.start + span.num_bytes]) != span.digest:
                        raise DamagedCheckpoint(f"{path} {DAMAGED}: {span.tensor} is not what was written")
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} {DAMAGED}: it cannot be read: {error}") from error


def _header(path: Path) -> bytes:
    """Return the header of a safetensors file, with its length before it. Raises any error of reading a broken file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix)
        if length > path.stat().st_size:
            raise ValueError(f"its header would have {length} bytes")
        return prefix + file.read(length)


def _ranges(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[_Range]:
    """Yield the positions of all tensors, in file order."""
    for name, record in sorted(files.items()):
        if not record.tensors:
            continue
        header = _header(folder / name)
        entries = {tensor: entry for tensor, entry in json.loads(header[8:]).items() if tensor in record.tensors}
        for tensor, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            yield _Range(folder / name, tensor, record.tensors[tensor], len(header) + start, stop - start)


def _share(ranges: list[_Range], reader: int, num_readers: int) -> Iterator[_Range]:
    """Yield the tensors of one reader: those with their middle in its part of all bytes."""
    total, before = sum(span.num_bytes for span in ranges), 0
    for span in ranges:
        middle = before + span.num_bytes / 2
        if min(int(middle * num_readers / max(total, 1)), num_readers - 1) == reader:
            yield span
        before += span.num_bytes


def _group_by_file(ranges: Iterable[_Range]) -> Iterator[tuple[Path, list[_Range]]]:
    groups: dict[Path, list[_Range]] = {}
    for span in ranges:
        groups.setdefault(span.path, []).append(span)
    yield from groups.items()
