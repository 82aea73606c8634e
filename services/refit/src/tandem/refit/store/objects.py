"""The objects of a store, through fsspec: a folder, or an object store such as S3.

Whatever goes wrong there is one of two errors: the object is not there, or the store did not answer. Credentials and
addresses come by each protocol's own means, such as ``AWS_PROFILE`` and ``AWS_ENDPOINT_URL``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec.asyn  # type: ignore[import-untyped]

from tandem.common.errors import ConfigError, RefitError

_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    # A listing may be old by then, and a store that is down must be noticed soon: what calls it tries again.
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 8, "retries": {"total_max_attempts": 1}},
    },
}
_CALL_S, _LEAST_BYTES_PER_S = 10.0, 1e6
"""Longest time for a call, without its bytes, and the slowest that these may be."""


class StoreFailure(RefitError):
    """The store did not do what it was asked for."""


class ObjectMissing(StoreFailure):
    """The store has no object of that name, or does not show it yet."""


class ObjectStore:
    """Objects by name below a URL. Used by many threads at once."""

    def __init__(self, url: str) -> None:
        """Prepare; nothing is asked of the store. Raises `ConfigError` if its client is not installed."""
        protocol = url.partition("://")[0]
        try:
            self._files, root = fsspec.core.url_to_fs(url, **_OPTIONS.get(protocol, {}), skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"refit.store {url}: {error}") from error
        if hasattr(self._files, "retries"):
            self._files.retries = 1  # of S3's client, which would go on for minutes before it says anything
        self._root = root.rstrip("/")
        self.url = url

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return an object, or its beginning if it is longer than it may be. Raises `StoreFailure`."""
        with _translated(name):
            contents: bytes = self._call(
                "cat_file", self._path(name), num_bytes=most_bytes, start=0, end=most_bytes + 1
            )
            return contents

    def write(self, name: str, contents: bytes) -> None:
        """Write an object, in place of one that is there. Raises `StoreFailure`."""
        with _translated(name):
            self._call("pipe_file", self._path(name), contents, num_bytes=len(contents))

    def remove(self, name: str) -> None:
        """Remove an object, if it is there. Raises `StoreFailure`."""
        with _translated(name), contextlib.suppress(FileNotFoundError):
            self._call("rm_file", self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove all objects below a name that the store lists. Raises `StoreFailure`."""
        with _translated(name), contextlib.suppress(FileNotFoundError):
            self._call("rm", self._path(name), recursive=True)

    def list_folders(self, name: str) -> list[str]:
        """Return the names directly below a name, as far as the store shows them. Raises `StoreFailure`."""
        try:
            with _translated(name):
                paths = self._call("ls", self._path(name), detail=False)
                return [path.rstrip("/").rpartition("/")[2] for path in paths]
        except ObjectMissing:
            return []

    def _call(self, method: str, *arguments: Any, num_bytes: int = 0, **options: Any) -> Any:
        """Call the client; one that works in its own thread gets a deadline, since some of its waits have none."""
        if not self._files.async_impl:
            return getattr(self._files, method)(*arguments, **options)
        seconds = _CALL_S + num_bytes / _LEAST_BYTES_PER_S
        asynchronous = getattr(self._files, f"_{method}")
        return fsspec.asyn.sync(self._files.loop, asynchronous, *arguments, timeout=seconds, **options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Raise `StoreFailure` for whatever the store's client raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"{name} is not there") from error
    except Exception as error:  # clients have errors of their own, of many kinds
        raise StoreFailure(f"{name}: {type(error).__name__}: {error}") from error
