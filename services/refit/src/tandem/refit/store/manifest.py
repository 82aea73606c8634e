"""The manifests of a store: what a version consists of, signed, and checked where it is read.

Each trainer has a folder in the run's, and no other process writes to that. In it are::

    RUN/WRITER/parts/SHA256         bytes of some chunks, whole or as differences, by the digest of the bytes
    RUN/WRITER/versions/N           the manifest of version N: chunks, their parts, and the manifest it builds on
    RUN/WRITER/newest               which manifest is the newest
    RUN/WRITER/asked                an engine's request to write the newest version again, whole

The last three are signed with a key that only the run's processes have; a part is as its manifest says, or it is not
used. Nothing depends on a listing, on the order in which objects appear, or on an old one being gone: a manifest names
the digest of the one it builds on.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.common.errors import RefitError
from tandem.common.messages import Count, Sha256
from tandem.refit.transports import encoding
from tandem.refit.transports.encoding import EncodingKind

PARTS, VERSIONS, NEWEST, ASKED = "parts", "versions", "newest", "asked"
MOST_MANIFEST_BYTES = 64 << 20
MOST_NOTE_BYTES = 4096
_MAGIC = b"tandem-store 1 "
_SIGNATURE_BYTES = 64
_MOST_PART_BYTES = 1 << 32
_MOST_CHUNK_BYTES = 1 << 40
Sealed = TypeVar("Sealed")


class DamagedObject(RefitError):
    """An object that differs from what was written: torn, of another writer, or contradictory."""


class StoredPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An object with the bytes of some chunks."""

    digest: Sha256
    num_bytes: Annotated[int, Meta(ge=1, le=_MOST_PART_BYTES)]


class StoredChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk of a version: its place in the published storages, and where its bytes are."""

    storage: Annotated[int, Meta(ge=0, le=1)]
    begin: Annotated[int, Meta(ge=0, le=_MOST_CHUNK_BYTES)]
    num_bytes: Annotated[int, Meta(ge=1, le=_MOST_CHUNK_BYTES)]
    item_size: Annotated[int, Meta(ge=1, le=2)]
    kind: Annotated[int, Meta(ge=0, le=EncodingKind.WHOLE.value)]
    """An `EncodingKind`: how the bytes say what has changed."""
    num_changed: Count
    num_gaps: Count
    part: Count
    """Index into `VersionManifest.parts`."""
    offset: Count
    """First of its bytes in the part."""

    @property
    def num_encoded(self) -> int:
        """Number of its bytes in the part."""
        length = self.num_bytes // self.item_size
        return encoding.num_bytes(EncodingKind(self.kind), self.num_changed, self.num_gaps, self.item_size, length)


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of one trainer's share."""

    run: str
    writer: str
    version: Count
    parent: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    """Digest of the manifest that its differences start from; empty if the version is whole."""
    parent_version: Count = 0
    storages: tuple[Count, ...]
    """Bytes of each published storage."""
    chunks: tuple[StoredChunk, ...]
    """All chunks, in order."""
    parts: tuple[StoredPart, ...]
    num_written: Count
    """Bytes that were written for this version: those of parts that were not there already."""
    seconds: float
    """From the moment at which the trainer had the version until all parts were written."""

    @property
    def is_whole(self) -> bool:
        """Whether it builds on no other."""
        return not self.parent

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)


class VersionNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest version that is written, or the one that is asked for."""

    version: Count


def digest_of(payload: bytes) -> str:
    """Return the digest by which parts and parents are named."""
    return hashlib.sha256(payload).hexdigest()


def seal(key: bytes, name: str, value: object) -> tuple[bytes, str]:
    """Return a value as the contents of the object with this name, and the digest that `unseal` returns."""
    payload = msgspec.json.encode(value)
    return _MAGIC + _sign(key, name, payload) + b"\n" + payload, digest_of(payload)


def unseal(key: bytes, name: str, sealed: bytes, kind: type[Sealed]) -> tuple[Sealed, str]:
    """Return the value and the digest of what was sealed for an object of this name. Raises `DamagedObject`."""
    head = len(_MAGIC) + _SIGNATURE_BYTES
    signature, payload = sealed[len(_MAGIC) : head], sealed[head + 1 :]
    if not sealed.startswith(_MAGIC) or not hmac.compare_digest(signature, _sign(key, name, payload)):
        raise DamagedObject(f"{name} is torn, or was not written by a process of this run")
    try:
        return msgspec.json.decode(payload, type=kind), digest_of(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedObject(f"{name}: {error}") from error


def _sign(key: bytes, name: str, payload: bytes) -> bytes:
    return hmac.new(key, name.encode() + b"\0" + payload, hashlib.sha256).hexdigest().encode()


def check_manifest(manifest: VersionManifest, run: str, writer: str, version: int, storages: Mapping[int, int]) -> None:
    """Raise `DamagedObject` unless it is a manifest of this version, and its numbers agree.

    `storages` has the bytes of those published storages that the reader wants to read.
    """
    label = f"the manifest of version {version} of {writer}"
    if (manifest.run, manifest.writer, manifest.version) != (run, writer, version):
        raise DamagedObject(f"{label} is that of version {manifest.version} of {manifest.writer} in {manifest.run}")
    if manifest.parent and manifest.parent_version >= version:
        raise DamagedObject(f"{label} builds on version {manifest.parent_version}")
    if not math.isfinite(manifest.seconds) or manifest.seconds < 0:
        raise DamagedObject(f"{label} took {manifest.seconds} s")
    if any(number >= len(manifest.storages) or manifest.storages[number] != n for number, n in storages.items()):
        raise DamagedObject(f"{label} has storages of {manifest.storages} bytes, not those that were planned")
    at = 0, 0
    for chunk in manifest.chunks:
        while at[0] < len(manifest.storages) and at[1] == manifest.storages[at[0]]:
            at = at[0] + 1, 0
        if at != (chunk.storage, chunk.begin) or chunk.num_bytes % chunk.item_size:
            raise DamagedObject(f"{label} has a chunk of storage {chunk.storage} at {chunk.begin}, not {at}")
        at = chunk.storage, chunk.begin + chunk.num_bytes
        _check_chunk(chunk, manifest, label)
    while at[0] < len(manifest.storages) and at[1] == manifest.storages[at[0]]:
        at = at[0] + 1, 0
    if at != (len(manifest.storages), 0):
        raise DamagedObject(f"{label} has no chunk of storage {at[0]} at {at[1]}")


def _check_chunk(chunk: StoredChunk, manifest: VersionManifest, label: str) -> None:
    """Raise `DamagedObject` unless the chunk's bytes are in a part, and as many as it says."""
    length = chunk.num_bytes // chunk.item_size
    if manifest.is_whole and chunk.kind != EncodingKind.WHOLE:
        raise DamagedObject(f"{label} is whole and has a difference in it")
    if chunk.num_changed > length or chunk.num_gaps > 2 * length:
        raise DamagedObject(f"{label} has {chunk.num_changed} changes in a chunk of {length}")
    if chunk.kind == EncodingKind.NOTHING:
        return
    if chunk.part >= len(manifest.parts) or chunk.offset + chunk.num_encoded > manifest.parts[chunk.part].num_bytes:
        raise DamagedObject(f"{label} has a chunk outside of its parts")
