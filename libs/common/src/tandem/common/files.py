"""Files: replaced as a whole, so that none is read in part; and opened only if they are regular."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.common.errors import ConfigError

_PRIVATE, _USUAL = 0o600, 0o666
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


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[Path]:
    """Yield a path for the new content beside a file, which takes the file's place at the end.

    If that fails, nothing is left of it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace_file(path: Path, content: bytes, *, is_private: bool = False, is_synced: bool = False) -> None:
    """Replace a file, which is readable for its owner alone if private. Raise `OSError` if that fails.

    A synced file outlives a crash of the machine.
    """
    with open_replacement(path) as temporary:
        temporary.unlink(missing_ok=True)  # of a process that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, _PRIVATE if is_private else _USUAL), "wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
