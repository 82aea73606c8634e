"""Inputs of a run that its folder keeps for processes started again, and imports of custom code there.

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
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import msgspec

from tandem.common.files import irregular

VARIABLE = "TANDEM_INPUTS"
FOLDER = "inputs"
_MANIFEST = "inputs.json"
MOST_BYTES = 1 << 30
"""Most bytes of all copies; data beyond this is not kept."""
_MOST_SIBLINGS = 1000


def make_spec(
    fullname: str, path: Sequence[str] | None, folder: Path, modules: Mapping[str, str], files: Mapping[str, str]
) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module of `modules`, or of one beside them where the usual finder finds it there."""
    origin = modules.get(fullname)
    if origin is None:
        usual = importlib.machinery.PathFinder.find_spec(fullname, path)
        origin = None if usual is None else usual.origin
    copy = files.get(origin or "")
    if origin is None or copy is None:
        return None
    inner = [str(Path(origin).parent)] if Path(origin).name == "__init__.py" else None
    loader = _Loader(origin, folder / copy)
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


def install_finder(folder: Path, modules: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Import these modules, and those of `files` beside them, from their copies in a folder, in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(folder, modules, files))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of kept modules, which says of any other name at once that it is none."""

    def __init__(self, folder: Path, modules: Mapping[str, str], files: Mapping[str, str]) -> None:
        self._kept = folder, modules, files
        paths = [*map(Path, files)]
        self._names = {name.rpartition(".")[2] for name in modules} | {path.stem for path in paths}
        self._names |= {path.parent.name for path in paths if path.name == "__init__.py"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module whose source is kept."""
        if fullname.rpartition(".")[2] not in self._names:
            return None

        return make_spec(fullname, path, *self._kept)


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

    Python files in a module's folder are kept, too: it may import them later. A file that is kept already (`path_of`)
    is copied from there. Raises `OSError`.
    """
    code = [Path(path) for path in modules.values()]
    beside = [path for folder in {path.parent for path in code} for path in sorted(folder.glob("*.py"))]
    run_in_place = [Path(path).absolute() for path in programs]
    paths = [*code, *beside[:_MOST_SIBLINGS], *run_in_place, *(Path(path).absolute() for path in data)]
    files, stamps, num_bytes = dict[str, str](), dict[str, tuple[int, int]](), 0
    folder = run.absolute() / FOLDER
    for path in dict.fromkeys(paths):
        source = Path(path_of(str(path)))
        if irregular(str(source)) is not None or not source.is_file():
            continue
        size = source.stat().st_size
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
        shutil.copyfile(path_of(original), new_folder / name)
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

    install_finder(Path(folder), manifest.modules, manifest.files)
