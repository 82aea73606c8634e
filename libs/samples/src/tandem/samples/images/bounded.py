"""Values of images in memory by digest, up to a number of bytes; the ones longest unused go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

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
