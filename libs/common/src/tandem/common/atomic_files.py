"""Files that are replaced as a whole: a reader sees the old content or the new, and never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PRIVATE, _USUAL = 0o600, 0o666


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
