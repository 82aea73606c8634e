"""Shortages: errors of a system that is out of memory, disk or descriptors, and may have them later."""

from __future__ import annotations

import errno
import re
import sqlite3

_LACKING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
)
_LACKING_SQLITE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM})
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust, such as safetensors, name an error of the system in the text of a bare exception."""


def is_shortage(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it was raised from, is a shortage, which may be over later."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in _LACKING:
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _LACKING_SQLITE:
            return True
        if (number := _OF_RUST.search(str(error)[:10_000])) is not None and int(number[1]) in _LACKING:
            return True
        error = error.__cause__ or error.__context__
    return False
