"""Images by digest: a folder of them, and copies in memory up to a number of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tandem.common.errors import DataError, RunFolderError
from tandem.common.files import irregular

_DIGEST = re.compile(r"[0-9a-f]{64}")
Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values up to a number of bytes. Threads may share it."""

    def __init__(self, size_of: Callable[[Value], int], max_bytes: int) -> None:
        """`size_of` returns the bytes of a value, always the same number."""
        self._size_of, self._max_bytes = size_of, max_bytes
        self._held: OrderedDict[str, Value] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of what is held, the one longest unused first."""
        with self._lock:
            return tuple(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def find(self, digest: str) -> Value | None:
        """Return a value; None if it is not held."""
        with self._lock:
            if digest not in self._held:
                return None
            self._held.move_to_end(digest)
            return self._held[digest]

    def put(self, digest: str, value: Value) -> None:
        """Hold a value, unless it is larger than all that may be held."""
        size = self._size_of(value)
        with self._lock:
            if digest in self._held or size > self._max_bytes:
                return
            self._held[digest] = value
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, gone = self._held.popitem(last=False)
                self._num_bytes -= self._size_of(gone)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._num_bytes = 0


class ReadThrough(BoundedCache[Value]):
    """Values up to a number of bytes, that are read where they are missing."""

    def __init__(self, read: Callable[[str], Value], size_of: Callable[[Value], int], max_bytes: int) -> None:
        """`read` returns the value of a digest."""
        super().__init__(size_of, max_bytes)
        self._read = read

    def get(self, digest: str) -> Value:
        """Return a value. Raises what reading it raises."""
        value = self.find(digest)
        if value is None:
            value = self._read(digest)
            self.put(digest, value)
        return value


class ImageFolder:
    """A folder of encoded images, each under its digest: ``ab/abcdef...``.

    Any number of processes may write to it: a file appears whole, and the same digest is the same bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Return where the image with a digest lies, or would lie."""
        assert _DIGEST.fullmatch(digest), digest
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Return whether there is an image with this digest."""
        return self.path(digest).is_file()

    def put(self, digest: str, image: bytes | Path) -> Path:
        """Keep an image, and return its path; a file on the same disk is linked, and takes no room.

        Raises `DataError` if a file has other bytes by now, and `RunFolderError` if the folder cannot be written.
        """
        path = self.path(digest)
        if path.is_file():
            return path
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write(partial, image)
                _check(partial.read_bytes(), digest, str(image) if isinstance(image, Path) else "an image")
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot keep an image in {str(self.folder)!r}: {error.strerror or error}") from error
        return path

    def get(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises `DataError` if it is missing, or is not what was written."""
        path = self.path(digest)
        try:
            if (kind := irregular(path)) is not None:
                raise DataError(f"image {digest[:12]}: {str(path)!r} is {kind}, not a file")
            data = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"image {digest[:12]} is not in {str(self.folder)!r}") from None
        except OSError as error:
            raise DataError(f"cannot read image {digest[:12]} in {str(self.folder)!r}: {error.strerror}") from error
        return _check(data, digest, str(path))


def _write(partial: Path, image: bytes | Path) -> None:
    if isinstance(image, Path):
        with contextlib.suppress(OSError):  # another disk, or a file that this user may not link
            os.link(image.resolve(), partial)
            return
        shutil.copyfile(image, partial)
        return
    with partial.open("wb") as file:
        file.write(image)
        file.flush()
        os.fsync(file.fileno())


def _check(data: bytes, digest: str, label: str) -> bytes:
    actual_digest = hashlib.sha256(data).hexdigest()
    if actual_digest != digest:
        raise DataError(
            f"{label} is not image {digest[:12]} but {actual_digest[:12]}: it was changed since it was first read"
        )
    return data


class BoundedImages(ReadThrough[bytes]):
    """Images in memory, up to a number of bytes."""

    def __init__(self, read: Callable[[str], bytes], max_bytes: int) -> None:
        """Take what is missing from `read`, such as `ImageFolder.get`, by digest."""
        super().__init__(read, len, max_bytes)
