"""Folders of samples that a resumed run may train on again, with the limits on their validity."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tandem.common.files import replace_file

_ASIDE = "before-resume-"
"""Prefix of the folders with files from before the run was resumed; a number follows."""
_LIMITS = "limits.json"


class RestoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the validity of files that were put aside together."""

    newest_proven: int | None
    """Newest weights that engines were verified to hold, if they are verified; samples of newer weights are valid
    only if a step was trained on them."""
    quarantined: dict[str, tuple[int, ...]] = {}
    """Versions that an engine was found not to hold at first, with the same effect."""
    below: int | None = None
    """Version from which on samples are invalid, because the run has made others with these numbers."""


def folders_aside(folder: Path) -> list[Path]:
    """Return the folders of files that were put aside, the newest first, in the folder of a rollout log."""
    return sorted(filter(_number, folder.glob(f"{_ASIDE}*")), key=_number, reverse=True)


def new_folder_aside(folder: Path, limits: RestoreLimits) -> Path:
    """Make another one, and return it. Raises `OSError`."""
    newest = max(map(_number, folders_aside(folder)), default=0)
    aside = folder / f"{_ASIDE}{newest + 1}"
    aside.mkdir()
    _write_limits(aside, limits)
    return aside


def invalidate(aside: Path, version: int) -> None:
    """Invalidate the files of such a folder for this version of the weights and later ones, if it can be written."""
    with contextlib.suppress(OSError):
        limits = read_limits(aside)
        below = version if limits.below is None else min(limits.below, version)
        _write_limits(aside, msgspec.structs.replace(limits, below=below))


def remove_folder_aside(aside: Path) -> None:
    """Remove such a folder without files, as far as the disk allows."""
    for remove in ((aside / _LIMITS).unlink, aside.rmdir):
        with contextlib.suppress(OSError):
            remove()


def read_limits(aside: Path) -> RestoreLimits:
    """Return the validity limits of a folder of files put aside. Raises `OSError`."""
    try:
        return msgspec.json.decode((aside / _LIMITS).read_bytes(), type=RestoreLimits)
    except msgspec.MsgspecError as error:
        raise OSError(None, f"{aside / _LIMITS}: {error}") from error


def _write_limits(aside: Path, limits: RestoreLimits) -> None:
    """Write the validity limits, atomically. Raises `OSError`."""
    replace_file(aside / _LIMITS, msgspec.json.encode(limits))


def _number(aside: Path) -> int:
    """Return the number of a folder of files put aside; zero for any other folder."""
    number = aside.name.removeprefix(_ASIDE)
    return int(number) if number.isdecimal() else 0
