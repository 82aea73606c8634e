"""Check that a path is a regular file before it is opened: opening a FIFO would wait for ever."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def irregular(path: str | Path) -> str | None:
    """Return what a path is, such as ``a FIFO``, if something is there that is no regular file; links are followed."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return None
    return _KINDS.get(stat.S_IFMT(mode))


def first_irregular(paths: Iterable[Path]) -> str | None:
    """Return ``'PATH' is a FIFO`` for the first of some paths that is neither file nor folder, if there is one."""
    for path in paths:
        kind = irregular(path)
        if kind not in (None, _KINDS[stat.S_IFDIR]):
            return f"{str(path)!r} is {kind}"
    return None
