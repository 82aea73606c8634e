"""The trainer's end of a store: it writes each version once, in the background.

    publish(version)  ── main thread ──▶ compare with the version before, chunk by chunk; keep the new bytes
                      ── a thread    ──▶ write parts, then the manifest, then the note of the newest; remove what is old

`publish` waits for no store: it takes about as long as reading the weights twice. If the version before is not written
by then, no engine waits for it any more (the coordinator offers a version when no engine reads the one before), and the
new one is written whole. A store that does not answer is asked again until it does.

An engine that cannot read a version, because an object was lost or torn, asks for it in the store, and gets it whole.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from tandem.refit.layout import DTYPES, Layout
from tandem.refit.program import ProcessVerification
from tandem.refit.store import manifest as format_
from tandem.refit.store.manifest import DamagedObject, StoredChunk, StoredPart, VersionManifest, VersionNote
from tandem.refit.store.objects import ObjectStore, StoreFailure
from tandem.refit.store.published import PublishedShare, publish_layout
from tandem.refit.transports import encoding
from tandem.refit.transports.copying import BoundCopier
from tandem.refit.transports.encoding import EncodingKind, MessageDifference
from tandem.refit.transports.memory import CopySide, NamedStorages

PART_BYTES = 16 << 20
"""Size at which a part is full."""
_NUM_WRITERS = 8
"""Parts that are written at once."""
_LARGEST_DIFFERENCE = 1.0
"""Share of changed elements above which a chunk is written whole: never, unless that is smaller."""
_ASKED_POLL_S = 1.0
_RETRY_S = (0.2, 5.0)
"""First and longest pause before a store that did not answer is asked again."""
_REPEAT_S, _LONGEST_REPEAT_S = 2.0, 60.0
"""First and longest time until a version is written again once more."""
_CLOSE_S = 10.0
"""Longest time for removing what this process has written, at its end."""


class StoreAccess(NamedTuple):
    """Access to a run's versions."""

    objects: ObjectStore
    key: bytes
    """Key of the signatures, which all processes of the run have."""
    run: str


class _Version(NamedTuple):
    """A version to write."""

    version: int
    changes: tuple[MessageDifference, ...]
    """By chunk. Those of whole chunks are the kept bytes, which the next version changes."""
    is_whole: bool
    since: float


class _Written(NamedTuple):
    """A version that is in the store."""

    version: int
    digest: str
    parts: frozenset[str]
    num_bytes: int
    is_whole: bool


class _Superseded(Exception):
    """A newer version is to be written, or none."""


class StorePublisher:
    """Writes one trainer's share of each version."""

    def __init__(self, access: StoreAccess, whole_every: int, say: Callable[[str], None]) -> None:
        """Write nothing yet. At most `whole_every` versions follow each other before one is whole."""
        self._access = access
        self._whole_every = whole_every
        self._say = say
        self._share: PublishedShare | None = None
        self._kept: list[torch.Tensor] = []
        """Bytes of each chunk in the newest version."""
        self._packers: list[tuple[BoundCopier, torch.Tensor]] = []
        """For each chunk, its packer, and the memory that it packs into."""
        self._is_known = False
        """Whether `_kept` is the version before."""
        self._changing = threading.Condition()
        self._pending: _Version | None = None
        self._is_writing = False
        self._written: list[_Written] = []
        """Versions that are in the store, and what of them may still be read: the newest is the last."""
        self._parts: set[str] = set()
        """Digests of the parts that are in the store."""
        self._repeated = -1, 0, 0.0
        """Version that was last written again, how often, and when it may be once more."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def bind(
        self,
        member: str,
        trainer_layout: Layout,
        storages: Mapping[str, torch.Tensor],
        verification: ProcessVerification,
    ) -> None:
        """Publish these weights from now on. The next version is whole. Raises `RefitError`."""
        share = publish_layout(member, trainer_layout, verification)
        if self._share is not None:
            self._stop_writing()
        self._share, self._is_known = share, False
        self._kept = [torch.zeros(chunk.num_bytes, dtype=torch.uint8) for chunk in share.chunks]
        self._packers = _bind_chunks(member, share, trainer_layout, storages)
        self._thread = threading.Thread(target=self._work, name="store publisher", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Take a version from the weights, which must not change meanwhile, and have it written."""
        assert self._share is not None, "it is bound first"
        since = time.monotonic()
        with self._changing:
            is_chained = self._is_known and self._pending is None and self._may_go_on()
            self._is_known = False  # if what follows fails
            changes = [
                self._take(old_bytes, *packer, chunk.item_size, is_whole=not is_chained)
                for old_bytes, packer, chunk in zip(self._kept, self._packers, self._share.chunks, strict=True)
            ]
            self._is_known = True
            is_whole = all(change.kind is EncodingKind.WHOLE for change in changes)
            self._pending = _Version(version, tuple(changes), is_whole, since)
            self._changing.notify_all()

    def is_idle(self) -> bool:
        """Return whether everything is written, and what no version needs is removed."""
        with self._changing:
            return self._pending is None and not self._is_writing

    def close(self) -> None:
        """Stop, and remove what this process has written, as far as the store answers."""
        self._stop_writing()
        if self._share is not None:
            removing = threading.Thread(target=self._remove_everything, daemon=True)
            removing.start()
            removing.join(_CLOSE_S)

    def _take(
        self, old_bytes: torch.Tensor, copier: BoundCopier, packed: torch.Tensor, item_size: int, *, is_whole: bool
    ) -> MessageDifference:
        """Make `old_bytes` the new bytes of a chunk; return the change."""
        packed.zero_()  # between slices
        copier.run()
        old, new = (bytes_.view(encoding.INTEGERS[item_size]) for bytes_ in (old_bytes, packed))
        if is_whole:
            return encoding.wrap(old.copy_(new))
        return encoding.advance(old, new, _LARGEST_DIFFERENCE)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Write versions as they come, and again where an engine asks."""
        pause_s = _RETRY_S[0]
        self._forget_predecessors()
        while True:
            with self._changing:
                self._is_writing = False
                if self._pending is None and not self._is_closed:
                    self._changing.wait(_ASKED_POLL_S)
                pending = self._pending
                self._is_writing = pending is not None
                if self._is_closed:
                    return
            try:
                if pending is None:
                    self._heed_asked()
                    continue
                self._write(pending)
                pause_s = _RETRY_S[0]
            except _Superseded:
                continue
            except Exception as error:  # a store's client has many of its own, and the next try may succeed
                self._say(f"refit.store: {type(error).__name__}: {error}; tried again in {pause_s:g} s")
                with self._changing:
                    self._changing.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])

    def _write(self, pending: _Version) -> None:
        """Write a version, and note it. Raises `StoreFailure` or `_Superseded`."""
        objects, writer = self._access.objects, self._writer
        chunks, parts, num_written = self._write_parts(pending)
        parent = None if pending.is_whole else self._written[-1]
        assert self._share is not None, "it is bound first"
        manifest = VersionManifest(
            run=self._access.run,
            writer=writer,
            version=pending.version,
            parent="" if parent is None else parent.digest,
            parent_version=0 if parent is None else parent.version,
            storages=tuple(storage.num_bytes for storage in self._share.layout.storages),
            chunks=chunks,
            parts=parts,
            num_written=num_written,
            seconds=time.monotonic() - pending.since,
        )
        name = self._name(format_.VERSIONS, str(pending.version))
        sealed, digest = format_.seal(self._access.key, name, manifest)
        objects.write(name, sealed)
        note = self._name(format_.NEWEST)
        objects.write(note, format_.seal(self._access.key, note, VersionNote(version=pending.version))[0])
        digests = frozenset(part.digest for part in parts)
        with self._changing:
            self._written = [each for each in self._written if each.version != pending.version]
            self._written.append(_Written(pending.version, digest, digests, manifest.num_bytes, pending.is_whole))
            if self._pending is pending:
                self._pending = None
            outdated = self._outdated()
        objects.remove(self._name(format_.ASKED))
        self._remove(outdated)
        kind = "whole" if pending.is_whole else "as differences"
        self._say(f"refit.store: version {pending.version} {kind}, {num_written} bytes in {manifest.seconds:.3f} s")

    def _write_parts(self, pending: _Version) -> tuple[tuple[StoredChunk, ...], tuple[StoredPart, ...], int]:
        """Write the parts of a version that are not there yet; return chunks, parts, and how many bytes that took."""
        assert self._share is not None, "it is bound first"
        groups = _group([change.bytes_.numel() for change in pending.changes])
        with ThreadPoolExecutor(min(_NUM_WRITERS, max(len(groups), 1)), "store writer") as pool:
            writing = [pool.submit(self._write_part, pending, group) for group in groups]
            try:
                results = [each.result() for each in writing]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        parts = tuple(part for part, _ in results)
        place_of: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(groups):
            offset = 0
            for chunk in group:
                place_of[chunk] = number, offset
                offset += pending.changes[chunk].bytes_.numel()
        chunks = tuple(
            StoredChunk(
                storage=place.storage,
                begin=place.begin,
                num_bytes=place.num_bytes,
                item_size=place.item_size,
                kind=int(change.kind),
                num_changed=change.num_changed,
                num_gaps=change.num_gaps,
                part=place_of.get(index, (0, 0))[0],
                offset=place_of.get(index, (0, 0))[1],
            )
            for index, (place, change) in enumerate(zip(self._share.chunks, pending.changes, strict=True))
        )
        return chunks, parts, sum(part.num_bytes for part, is_new in results if is_new)

    def _write_part(self, pending: _Version, group: Sequence[int]) -> tuple[StoredPart, bool]:
        """Write the bytes of some chunks, unless they are there; return the part, and whether it is new."""
        with self._changing:  # `publish` changes whole chunks
            if self._pending is not pending or self._is_closed:
                raise _Superseded
            contents = b"".join(pending.changes[chunk].bytes_.numpy().tobytes() for chunk in group)
        part = StoredPart(format_.digest_of(contents), len(contents))
        if part.digest in self._parts:
            return part, False
        self._access.objects.write(self._name(format_.PARTS, part.digest), contents)
        self._parts.add(part.digest)
        return part, True

    def _heed_asked(self) -> None:
        """Write the newest version again, whole, if an engine asks for it. Raises `StoreFailure`."""
        name = self._name(format_.ASKED)
        try:
            sealed = self._access.objects.read(name, format_.MOST_NOTE_BYTES)
            request, _ = format_.unseal(self._access.key, name, sealed, VersionNote)
        except (StoreFailure, DamagedObject):
            return
        with self._changing:
            is_there = bool(self._written) and self._written[-1].version == request.version
            if self._pending is not None or not self._is_known or not is_there:
                return
            now = time.monotonic()
            if request.version != self._repeated[0]:
                self._repeated = request.version, 0, now
            _, times, since = self._repeated
            if now < since:
                return  # what does not help is not done again and again
            self._repeated = request.version, times + 1, now + min(_REPEAT_S * 2**times, _LONGEST_REPEAT_S)
            self._say(f"refit.store: version {request.version} could not be read by an engine: it is written again")
            self._parts.clear()  # whatever was lost, all of it is written anew
            changes = tuple(encoding.wrap(old_bytes) for old_bytes in self._kept)
            self._pending = _Version(request.version, changes, True, time.monotonic())

    def _may_go_on(self) -> bool:
        """Return whether one more version may build on the newest: the chain is short, and cheaper to read than two."""
        *differences, whole_version = self._chain()
        num_bytes = sum(each.num_bytes for each in differences)
        return len(differences) + 1 < self._whole_every and num_bytes < whole_version.num_bytes

    def _chain(self) -> list[_Written]:
        """Return the newest version, and those that it builds on."""
        chain: list[_Written] = []
        for written in reversed(self._written):
            chain.append(written)
            if written.is_whole:
                break
        return chain

    def _outdated(self) -> list[str]:
        """Forget the versions that no engine reads any more; return the names of their objects.

        Those are all but the newest, the one before it, and what they build on.
        """
        last_but_one = max(len(self._written) - 2, 0)
        first = max((index for index, each in enumerate(self._written[: last_but_one + 1]) if each.is_whole), default=0)
        old, self._written = self._written[:first], self._written[first:]
        needed = frozenset[str]().union(*(each.parts for each in self._written))
        parts = frozenset[str]().union(*(each.parts for each in old)) - needed
        self._parts -= parts
        return [
            *(self._name(format_.VERSIONS, str(each.version)) for each in old),
            *(self._name(format_.PARTS, digest) for digest in sorted(parts)),
        ]

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._access.objects.remove(name)
            except StoreFailure as error:
                self._say(f"refit.store: {error}; it stays there until this process ends")

    def _forget_predecessors(self) -> None:
        """Remove what earlier processes of this trainer have left in the run's folder."""
        member = self._writer.rpartition("-")[0]
        try:
            for name in self._access.objects.list_folders(self._access.run):
                if name.rpartition("-")[0] == member and name != self._writer:
                    self._access.objects.remove_folder(f"{self._access.run}/{name}")
        except StoreFailure as error:
            self._say(f"refit.store: {error}; earlier versions of {member} stay there")

    def _remove_everything(self) -> None:
        names = [self._name(format_.NEWEST), self._name(format_.ASKED)]
        names += [self._name(format_.VERSIONS, str(each.version)) for each in self._written]
        names += [self._name(format_.PARTS, digest) for digest in self._parts]
        for name in names:
            with contextlib.suppress(StoreFailure):
                self._access.objects.remove(name)
        try:  # and what the store lists: objects of which it is not known whether they were written
            self._access.objects.remove_folder(f"{self._access.run}/{self._writer}")
        except StoreFailure as error:
            self._say(f"refit.store: {error}")

    def _stop_writing(self) -> None:
        with self._changing:
            self._is_closed = True
            self._changing.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self._thread, self._pending, self._is_closed = None, None, False
        self._written, self._parts = [], set()

    @property
    def _writer(self) -> str:
        assert self._share is not None, "it is bound first"
        return self._share.writer

    def _name(self, *words: str) -> str:
        return "/".join((self._access.run, self._writer, *words))


def _bind_chunks(
    member: str, share: PublishedShare, trainer_layout: Layout, storages: Mapping[str, torch.Tensor]
) -> list[tuple[BoundCopier, torch.Tensor]]:
    """Return, for each chunk, what packs it out of the trainer's storages, and the memory for that."""
    rows, shape_KD, row_K = trainer_layout.pieces.rows(share.row_K), share.layout.pieces.shape_PD, share.row_K
    own_code_K, code_K = (
        np.array([DTYPES.index(tensor.dtype) for tensor in each.tensors], np.int64)[rows.tensor_P]
        for each in (trainer_layout, share.layout)
    )
    offset_K = rows.offset_P + (share.start_KD * rows.strides_PD).sum(axis=1)
    names = [storage.name for storage in trainer_layout.storages]
    side = CopySide(names, rows.storage_P, offset_K, shape_KD, rows.strides_PD, own_code_K)
    tensor_names = [tensor.name for tensor in trainer_layout.tensors]
    sources = NamedStorages(member, storages).views(side, tensor_names, rows.tensor_P)
    packed = torch.zeros(max((chunk.num_bytes for chunk in share.chunks), default=0), dtype=torch.uint8)
    packers = []
    for chunk, first, last in zip(share.chunks, share.first_C, share.first_C[1:], strict=False):
        places = []
        for row in range(first, last):
            dtype: torch.dtype = getattr(torch, DTYPES[code_K[row]])
            shape = torch.Size(shape_KD[row].tolist())
            offset = int(share.layout.pieces.offset_P[row]) - chunk.begin
            places.append(packed[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape))
        packers.append((BoundCopier(places, sources[first:last]), packed[: chunk.num_bytes]))
    assert len(row_K) == share.first_C[-1], "every slice is in a chunk"
    return packers


def _group(num_bytes: Sequence[int]) -> list[list[int]]:
    """Return the chunks of each part: in order, until it is full; those without bytes are in none."""
    groups: list[list[int]] = []
    filled = PART_BYTES
    for chunk, num in enumerate(num_bytes):
        if not num:
            continue
        if filled + num > PART_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += num
    return groups
