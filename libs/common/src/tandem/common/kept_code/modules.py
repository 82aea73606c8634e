"""Imports of custom code from the copies that a run keeps (`tandem.common.kept_inputs`)."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


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
        from tandem.common.kept_code.sources import make_spec

        return make_spec(fullname, path, *self._kept)
