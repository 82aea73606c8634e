"""Imports of custom code from the copies that a run keeps (`tandem.common.kept_inputs`)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


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
