"""Inputs of a run that its folder keeps: files that processes read again when they are replaced.

A user may edit or delete them while the run goes on. Its processes then use the copies: custom code is imported from
its copy, under the name of its file, and rows are read from theirs. The environment variable `VARIABLE` names the
folder, so that processes started here inherit it; without it nothing is kept.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import msgspec

from tandem.common.regular_files import irregular

VARIABLE = "TANDEM_INPUTS"
FOLDER = "inputs"
_MANIFEST = "inputs.json"
MOST_BYTES = 1 << 30
"""Most bytes of all copies; data beyond this is not kept."""
_MOST_SIBLINGS = 1000


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files that are kept."""

    modules: dict[str, str] = {}
    """Absolute path of each custom module, by its name."""
    files: dict[str, str] = {}
    """Name of the copy, by absolute path: of modules, of files beside them, of data."""


def keep(run: Path, modules: Mapping[str, str], data: Iterable[str]) -> Path | None:
    """Copy custom code, by module, and data files into a run's folder; return the folder, or None without any.

    Python files beside a module are kept, too: it may import them later. Raises `OSError`.
    """
    code = [Path(path) for path in modules.values()]
    beside = [path for folder in {path.parent for path in code} for path in sorted(folder.glob("*.py"))]
    wanted = [*code, *beside[:_MOST_SIBLINGS], *(Path(path).absolute() for path in data)]
    files, num_bytes = dict[str, str](), 0
    folder = run.absolute() / FOLDER
    for path in dict.fromkeys(wanted):
        if irregular(str(path)) is not None or not path.is_file():
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MOST_BYTES:
            break
        files[str(path)] = f"{len(files)}-{path.name}"
    if not files:
        return None
    made = folder.with_name(f".{FOLDER}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for original, name in files.items():
        shutil.copyfile(original, made / name)
    (made / _MANIFEST).write_bytes(msgspec.json.encode(Manifest(modules=dict(modules), files=files)))
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
    read_manifest.cache_clear()
    return folder


@cache
def read_manifest(folder: Path) -> Manifest:
    """Return what is kept in a folder; nothing if it cannot be read."""
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return Manifest()


def path_of(path: str) -> str:
    """Return the path of the copy of a file; the file's own without one."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return path
    name = read_manifest(Path(folder)).files.get(os.path.abspath(path))
    return path if name is None else str(Path(folder) / name)


def changed_line(folder: Path) -> str:
    """Return the first kept line of code that differs now, as ``FILE:LINE``; empty if none does."""
    manifest = read_manifest(folder)
    for path, name in manifest.files.items():
        if not path.endswith(".py"):
            continue
        before = (folder / name).read_bytes().splitlines()
        try:
            after = Path(path).read_bytes().splitlines()
        except OSError:
            return f"{path}, which is gone"
        if before != after:
            same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
            return f"{path}:{(min(len(before), len(after)) if same is None else same) + 1}"
    return ""


def install() -> None:
    """Import kept modules from their copies, in this process, if there are any."""
    folder = os.environ.get(VARIABLE)
    if folder is None or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    manifest = read_manifest(Path(folder))
    if manifest.modules:
        sys.meta_path.insert(0, _Finder(Path(folder), manifest))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of kept modules, and of those beside them where the usual one finds them there."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module whose source is kept."""
        origin = self._manifest.modules.get(fullname)
        if origin is None:
            usual = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            origin = None if usual is None else usual.origin
        copy = self._manifest.files.get(origin or "")
        if origin is None or copy is None:
            return None
        inner = [str(Path(origin).parent)] if Path(origin).name == "__init__.py" else None
        loader = _Loader(origin, self._folder / copy)
        return importlib.util.spec_from_file_location(fullname, origin, loader=loader, submodule_search_locations=inner)


class _Loader(importlib.abc.SourceLoader):
    """A loader of the copy of a source; the module has the name of the file that was copied."""

    def __init__(self, origin: str, copy: Path) -> None:
        self._origin = origin
        self._copy = copy

    def get_filename(self, fullname: str) -> str:
        """Return the path of the file that was copied."""
        return self._origin

    def get_data(self, path: str | bytes | os.PathLike[str]) -> bytes:
        """Return the source; of other files, what is there."""
        return (self._copy if path == self._origin else Path(os.fsdecode(path))).read_bytes()
