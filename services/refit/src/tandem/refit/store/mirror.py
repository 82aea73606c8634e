"""An engine's end of a store: a mirror in shared memory, which follows in the background.

    a thread     ──▶ look for the newest version, or the one that is wanted; read what differs from what is held; check
                     it; bring the mirror to it
    the engine   ──▶ `want` a version; once `is_held`, copy out of the mirror between two tokens

The mirror takes as much memory as the published storages, of which only the chunks with something of this engine are
ever touched. A version that cannot be read leaves the engine's own weights as they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints
from tandem.refit.layout import StoreMemory
from tandem.refit.program import TransferProgram
from tandem.refit.store import manifest as format_
from tandem.refit.store.manifest import DamagedObject, StoredChunk, StoredPart, VersionManifest, VersionNote
from tandem.refit.store.objects import ObjectMissing, StoreFailure
from tandem.refit.store.published import ALIGNMENT, number_of
from tandem.refit.store.publisher import StoreAccess
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports import encoding, shm
from tandem.refit.transports.encoding import EncodingKind, MessageDifference
from tandem.refit.transports.memory import item_sizes
from tandem.refit.transports.store import StoreTransport

_NUM_READERS = 8
_POLL_S = 1.0
"""Time between two looks for a newer version while none is wanted."""
_WANTED_POLL_S = (0.02, 1.0)
"""First and longest pause before a wanted version is looked for again."""
_ASK_AFTER_S = 3.0
"""Time after which a wanted version that cannot be read is asked for."""
_MOST_LINKS = 10_000
"""Most differences in a row."""


class SourceMirror:
    """The mirror of one writer."""

    def __init__(self, writer: str) -> None:
        """Mirror nothing yet."""
        self.writer = writer
        self.names: list[str] = []
        """Published storages that are needed."""
        self.memory: dict[int, torch.Tensor] = {}
        """Bytes by number of the storage."""
        self.needed: dict[int, list[tuple[int, int]]] = {}
        """Ranges of bytes of each that are needed, disjoint and in order."""
        self.version: int | None = None
        """Version that all needed chunks have; None while they are of different ones."""
        self.digest = ""
        """Digest of its manifest."""
        self.fetched: dict[str, torch.Tensor] = {}
        """Parts of differences that are here, by digest, until all are."""
        self.applied: tuple[str, set[int]] = "", set()
        """Digest of the manifest of a whole version, and which of its parts are in the mirror, until all are."""

    def needs(self, chunk: StoredChunk) -> bool:
        """Return whether anything of a chunk is needed."""
        end = chunk.begin + chunk.num_bytes
        return any(low < end and high > chunk.begin for low, high in self.needed.get(chunk.storage, ()))


class StoreMirror:
    """The mirror of all writers that an engine takes weights from."""

    def __init__(self, access: StoreAccess, engine: str, wake: Callable[[], None], say: Callable[[str], None]) -> None:
        """Read nothing yet. `wake` is called, in a thread, when a wanted version is held."""
        self._access = access
        self._engine = engine
        self._wake = wake
        self._say = say
        self.lock = threading.Lock()
        """Held while the mirror changes, and while it is read."""
        self._sources: dict[str, SourceMirror] = {}
        self._wanted: int | None = None
        self._noticed = threading.Condition()
        self._is_closed = False
        self._wanted_at = 0.0
        self._asked_at = 0.0
        self._last_report = -1, ""
        """Version that was last asked for, and why."""
        self.trouble = "it has not been read yet"
        """The last reason why a version could not be read."""
        self.num_read = 0
        """Bytes of parts that were read."""
        self._thread: threading.Thread | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the installed programs read anything from the store."""
        return bool(self._sources)

    def redirect(self, programs: Sequence[TransferProgram]) -> list[TransferProgram]:
        """Return programs that copy out of the mirror by `shm` what they would read from the store; begin to follow.

        Raises `RefitError` if shared memory has no room.
        """
        self.close()
        self._sources, self._is_closed, self._wanted = {}, False, None
        redirected = [
            msgspec.structs.replace(program, receives=tuple(map(self._redirect, program.receives)))
            for program in programs
        ]
        if self._sources:
            self._check_room()
            self._thread = threading.Thread(target=self._follow, name="store mirror", daemon=True)
            self._thread.start()
        return redirected

    def want(self, version: int) -> None:
        """Bring the mirror to this version as soon as the store has it."""
        with self._noticed:
            self._wanted = version
            self._wanted_at = time.monotonic()
            self._noticed.notify_all()

    def is_held(self, version: int) -> bool:
        """Return whether the mirror has a version."""
        return all(source.version == version for source in self._sources.values())

    def settle(self) -> None:
        """Want no certain version any more."""
        with self._noticed:
            self._wanted = None

    def close(self) -> None:
        """Stop following. The memory stays until no process maps it."""
        with self._noticed:
            self._is_closed = True
            self._noticed.notify_all()
        if self._thread is not None:
            self._thread.join(30.0)
            self._thread = None

    def _redirect(self, transfer: LinkTransfer) -> LinkTransfer:
        if transfer.transport != StoreTransport.name:
            return transfer
        storages = []
        for index, storage in enumerate(transfer.source_storages):
            assert isinstance(storage.address, StoreMemory), "the plan reads nothing else from a store"
            source = self._sources.setdefault(storage.address.writer, SourceMirror(storage.address.writer))
            if storage.name not in source.names:
                source.names.append(storage.name)
                source.memory[number_of(storage.name)] = _allocate(storage.num_bytes)
            number = number_of(storage.name)
            source.needed[number] = _join([*source.needed.get(number, ()), *_ranges(transfer, index)])
            storages.append(msgspec.structs.replace(storage, address=shm.share(source.memory[number])))
        return msgspec.structs.replace(transfer, transport=shm.ShmTransport.name, source_storages=tuple(storages))

    def _check_room(self) -> None:
        needed = sum(
            high - low for source in self._sources.values() for ranges in source.needed.values() for low, high in ranges
        )
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise RefitError(
                f"{self._engine}: the mirror of refit.store needs {needed / 2**20:.0f} MiB of /dev/shm, where "
                f"{free / 2**20:.0f} MiB are free"
            )

    # --- the thread --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause_s = _WANTED_POLL_S[0]
        with ThreadPoolExecutor(_NUM_READERS, "store reader") as pool:
            while True:
                with self._noticed:
                    if self._is_closed:
                        return
                    target = self._wanted
                try:
                    is_there = self._bring_all(target, pool)
                    trouble = ""
                except Exception as error:  # whatever it is, the next try may succeed
                    is_there = False
                    trouble = str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"
                self.trouble = trouble or self.trouble
                if target is not None and is_there:
                    self._wake()
                    pause_s = _WANTED_POLL_S[0]
                elif target is not None:
                    self._ask_if_stuck(target)
                with self._noticed:
                    if self._wanted == target and not self._is_closed:
                        is_waiting = target is not None and not is_there
                        self._noticed.wait(pause_s if is_waiting else _POLL_S)
                pause_s = min(2 * pause_s, _WANTED_POLL_S[1]) if target is not None and not is_there else pause_s

    def _bring_all(self, target: int | None, pool: ThreadPoolExecutor) -> bool:
        """Bring every source to the wanted version, or to its newest; return whether all have it."""
        for source in self._sources.values():
            version = self._newest(source) if target is None else target
            if version is not None and source.version != version:
                self._bring(source, version, pool)
        return target is not None and self.is_held(target)

    def _newest(self, source: SourceMirror) -> int | None:
        """Return the newest version of a writer, None if there is none yet. Raises `StoreFailure`."""
        name = self._name(source, format_.NEWEST)
        try:
            sealed = self._access.objects.read(name, format_.MOST_NOTE_BYTES)
        except ObjectMissing:
            return None
        return format_.unseal(self._access.key, name, sealed, VersionNote)[0].version

    def _bring(self, source: SourceMirror, version: int, pool: ThreadPoolExecutor) -> None:
        """Bring the mirror of a writer to a version. Raises `StoreFailure` or `DamagedObject`."""
        chain = [self._manifest(source, version)]
        while not chain[0][0].is_whole and (source.version is None or chain[0][0].parent != source.digest):
            first = chain[0][0]
            parent = self._manifest(source, first.parent_version)
            if parent[1] != first.parent:
                raise DamagedObject(f"version {first.parent_version} of {source.writer} is not what the next builds on")
            chain.insert(0, parent)
            if len(chain) > _MOST_LINKS:
                raise DamagedObject(f"version {version} of {source.writer} builds on too many others")
        for manifest, digest in chain:
            self._apply(source, manifest, digest, pool)

    def _manifest(self, source: SourceMirror, version: int) -> tuple[VersionManifest, str]:
        name = self._name(source, format_.VERSIONS, str(version))
        sealed = self._access.objects.read(name, format_.MOST_MANIFEST_BYTES)
        manifest, digest = format_.unseal(self._access.key, name, sealed, VersionManifest)
        sizes = {number: memory.numel() for number, memory in source.memory.items()}
        format_.check_manifest(manifest, self._access.run, source.writer, version, sizes)
        return manifest, digest

    def _apply(self, source: SourceMirror, manifest: VersionManifest, digest: str, pool: ThreadPoolExecutor) -> None:
        """Bring the mirror from the version before to this one. Raises `StoreFailure` or `DamagedObject`."""
        by_part: dict[int, list[StoredChunk]] = {}
        for chunk in manifest.chunks:
            if chunk.kind != EncodingKind.NOTHING and source.needs(chunk):
                by_part.setdefault(chunk.part, []).append(chunk)
        if manifest.is_whole:
            self._apply_whole(source, manifest, digest, by_part, pool)
        else:
            self._apply_differences(source, manifest, by_part, pool)
        with self.lock:
            source.version, source.digest = manifest.version, digest
        source.applied, source.fetched = ("", set()), {}

    def _apply_whole(
        self,
        source: SourceMirror,
        manifest: VersionManifest,
        digest: str,
        by_part: Mapping[int, Sequence[StoredChunk]],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Write parts into the mirror as they come; those that came in an earlier try are there."""
        if source.version is not None or source.applied[0] != digest:
            source.applied = digest, set()
        applied = source.applied[1]
        reading = {n: pool.submit(self._read_part, source, manifest.parts[n]) for n in by_part if n not in applied}
        failure: RefitError | None = None
        for number, future in reading.items():
            try:
                contents = future.result()
            except RefitError as error:
                failure = failure or error  # the others are of use for the next try
                continue
            self._apply_chunks(source, by_part[number], contents)
            applied.add(number)
        if failure is not None:
            raise failure

    def _apply_differences(
        self,
        source: SourceMirror,
        manifest: VersionManifest,
        by_part: Mapping[int, Sequence[StoredChunk]],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Change the mirror once all parts are here, so that it stays what it was if one is not to be had."""
        digests = {manifest.parts[number].digest: number for number in by_part}
        missing = [number for digest, number in digests.items() if digest not in source.fetched]
        failure: RefitError | None = None
        for number, future in [(n, pool.submit(self._read_part, source, manifest.parts[n])) for n in missing]:
            try:
                source.fetched[manifest.parts[number].digest] = future.result()
            except RefitError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        for number, chunks in by_part.items():
            self._apply_chunks(source, chunks, source.fetched[manifest.parts[number].digest])

    def _apply_chunks(self, source: SourceMirror, chunks: Sequence[StoredChunk], contents: torch.Tensor) -> None:
        with self.lock:
            source.version, source.digest = None, ""  # of no version, until all of it is there
            for chunk in chunks:
                _apply_chunk(chunk, contents, source.memory[chunk.storage])

    def _read_part(self, source: SourceMirror, part: StoredPart) -> torch.Tensor:
        """Return the bytes of a part. Raises `StoreFailure` or `DamagedObject`."""
        name = self._name(source, format_.PARTS, part.digest)
        contents = self._access.objects.read(name, part.num_bytes)
        if len(contents) != part.num_bytes or format_.digest_of(contents) != part.digest:
            raise DamagedObject(f"{name} has {len(contents)} bytes that are not its {part.num_bytes}")
        with self._noticed:
            self.num_read += len(contents)
        return torch.frombuffer(bytearray(contents), dtype=torch.uint8)

    def _ask_if_stuck(self, version: int) -> None:
        """Ask for a version that could not be read for some time; its writer has it still."""
        now = time.monotonic()
        if now - max(self._wanted_at, self._asked_at) < _ASK_AFTER_S:
            return
        self._asked_at = now
        if self._last_report != (version, self.trouble):
            self._last_report = version, self.trouble
            self._say(f"refit.store: version {version} is asked for: {self.trouble}")
        for source in self._sources.values():
            if source.version != version:
                name = self._name(source, format_.ASKED)
                with contextlib.suppress(StoreFailure):
                    note, _ = format_.seal(self._access.key, name, VersionNote(version=version))
                    self._access.objects.write(name, note)

    def _name(self, source: SourceMirror, *words: str) -> str:
        return "/".join((self._access.run, source.writer, *words))


def _apply_chunk(chunk: StoredChunk, part: torch.Tensor, memory: torch.Tensor) -> None:
    kind = EncodingKind(chunk.kind)
    written = part[chunk.offset : chunk.offset + chunk.num_encoded]
    if written.storage_offset() % ALIGNMENT:
        written = written.clone()
    target = memory[chunk.begin : chunk.begin + chunk.num_bytes].view(encoding.INTEGERS[chunk.item_size])
    encoding.apply(MessageDifference(kind, chunk.num_changed, chunk.num_gaps, written), target)


def _allocate(num_bytes: int) -> torch.Tensor:
    """Return shared memory, of which nothing is taken before it is written."""
    memory = torch.UntypedStorage._new_using_fd_cpu(num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(memory)


def _ranges(transfer: LinkTransfer, storage: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of a source storage that a transfer reads, from the first of each copy to its last."""
    at = transfer.copies.rows(np.flatnonzero(transfer.copies.source_C == storage))
    spans_C: Ints = ((at.shape_CD - 1) * at.source_strides_CD).sum(axis=1) + item_sizes(at.source_dtype_C)
    yield from zip(at.source_offset_C.tolist(), (at.source_offset_C + spans_C).tolist(), strict=True)


def _join(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint ranges in order that cover the same."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
