"""Check that a path is a regular file before opening it: opening a FIFO would block for ever."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tandem.common.errors import ConfigError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def irregular(path: str | Path) -> str | None:
    """Return what a path is, such as ``a FIFO``, if it exists and is not a regular file; follow links."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening the file reports the error
        return None
    return _KINDS.get(stat.S_IFMT(mode))


def read_text(key: str, path: str) -> str:
    """Return the text of the file that a key names. Raise `ConfigError`, with the key first, if that fails."""
    kind = irregular(path)
    if kind is not None:
        raise ConfigError(f"{key}: cannot read {path!r}: it is {kind}, not a text file")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error


def first_irregular(paths: Iterable[Path]) -> str | None:
    """Return ``'PATH' is a FIFO`` for the first path that is neither a file nor a folder, None if there is none."""
    for path in paths:
        kind = irregular(path)
        if kind not in (None, _KINDS[stat.S_IFDIR]):
            return f"{str(path)!r} is {kind}"
    return None
