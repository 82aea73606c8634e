"""Inputs of a run that its folder keeps: files that processes read again when they are replaced.

A user may edit or delete them while the run goes on. Its processes then use the copies: custom code is imported from
its copy, under the name of its file, and rows are read from theirs. The environment variable `VARIABLE` names the
folder, so that processes started here inherit it; without it nothing is kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec

from tandem.common.files import irregular

VARIABLE = "TANDEM_INPUTS"
FOLDER = "inputs"
_MANIFEST = "inputs.json"
MOST_BYTES = 1 << 30
"""Most bytes of all copies; data beyond this is not kept."""
_MOST_SIBLINGS = 1000


class InputManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files that are kept."""

    modules: dict[str, str] = {}
    """Absolute path of each custom module, by its name."""
    files: dict[str, str] = {}
    """Name of the copy, by absolute path: of modules, of files beside them, of programs, of data."""
    programs: tuple[str, ...] = ()
    """Absolute paths of agents' programs, which are run where they are and may not change."""
    stamps: dict[str, tuple[int, int]] = {}
    """Size and time of the last change of each data file that is too large to be kept, by absolute path."""


def keep(run: Path, modules: Mapping[str, str], data: Iterable[str], programs: Iterable[str] = ()) -> Path | None:
    """Copy custom code, by module, and data files into a run's folder; return the folder, or None without any.

    Python files beside a module are kept, too: it may import them later. Raises `OSError`.
    """
    code = [Path(path) for path in modules.values()]
    beside = [path for folder in {path.parent for path in code} for path in sorted(folder.glob("*.py"))]
    run_in_place = [Path(path).absolute() for path in programs]
    paths = [*code, *beside[:_MOST_SIBLINGS], *run_in_place, *(Path(path).absolute() for path in data)]
    files, stamps, num_bytes = dict[str, str](), dict[str, tuple[int, int]](), 0
    folder = run.absolute() / FOLDER
    for path in dict.fromkeys(paths):
        if irregular(str(path)) is not None or not path.is_file():
            continue
        size = path.stat().st_size
        if num_bytes + size > MOST_BYTES:
            stamps[str(path)] = _stamp(path)
            continue
        num_bytes += size
        files[str(path)] = f"{len(files)}-{path.name}"
    if not files and not stamps:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    new_folder = folder.with_name(f".{FOLDER}.{os.getpid()}")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir()
    for original, name in files.items():
        shutil.copyfile(original, new_folder / name)
    manifest = InputManifest(modules=dict(modules), files=files, programs=tuple(map(str, run_in_place)), stamps=stamps)
    (new_folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
    shutil.rmtree(folder, ignore_errors=True)
    new_folder.rename(folder)
    read_manifest.cache_clear()
    return folder


@cache
def read_manifest(folder: Path) -> InputManifest:
    """Return what is kept in a folder; nothing if it cannot be read."""
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=InputManifest)
    except (OSError, msgspec.MsgspecError):
        return InputManifest()


def path_of(path: str) -> str:
    """Return the path of the copy of a file; the file's own without one."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return path
    name = read_manifest(Path(folder)).files.get(os.path.abspath(path))
    return path if name is None else str(Path(folder) / name)


def describe_change(folder: Path) -> str:
    """Return the first kept line of code that differs now, as ``FILE:LINE``; empty if none does."""
    manifest = read_manifest(folder)
    code = [path for path in manifest.files if path.endswith(".py") or path in manifest.programs]
    return next(filter(None, (_find_first_difference(path, folder / manifest.files[path]) for path in code)), "")


def find_changed_program(command: Iterable[str]) -> str:
    """Return the first line of an agent's program that differs from when the run began; empty if none does."""
    folder = os.environ.get(VARIABLE)
    if folder is None or not (manifest := read_manifest(Path(folder))).programs:
        return ""
    paths = [path for path in map(os.path.abspath, command) if path in manifest.programs and path in manifest.files]
    return next(filter(None, (_find_first_difference(path, Path(folder) / manifest.files[path]) for path in paths)), "")


def find_changed_data(folder: Path) -> str:
    """Return the first data file that was too large to be kept, and was written since; empty if there is none."""
    for path, stamp in read_manifest(folder).stamps.items():
        try:
            if _stamp(Path(path)) != stamp:
                return path
        except OSError:
            return f"{path}, which is gone"
    return ""


def adopt(keys: Path) -> None:
    """Use what is kept by the run whose key file a process started by hand has got, if this host has it."""
    folder = keys.absolute().parent.parent / FOLDER
    if VARIABLE not in os.environ and folder.is_dir():
        os.environ[VARIABLE] = str(folder)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _find_first_difference(path: str, copy: Path) -> str:
    """Return the first line of a file that differs from its copy; empty if none does."""
    before = copy.read_bytes().splitlines()
    try:
        after = Path(path).read_bytes().splitlines()
    except OSError:
        return f"{path}, which is gone"
    if before == after:
        return ""
    same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    return f"{path}:{(min(len(before), len(after)) if same is None else same) + 1}"


def install() -> None:
    """Import kept modules from their copies, in this process, if there are any."""
    folder = os.environ.get(VARIABLE)
    if folder is None or not (manifest := read_manifest(Path(folder))).modules:
        return
    from tandem.common.kept_code import install_finder

    install_finder(Path(folder), manifest.modules, manifest.files)
