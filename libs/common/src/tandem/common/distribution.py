"""The installed distribution: its version, how to install an extra, and the search path of programs."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

NAME = "tandem-rl"
"""Name on package indexes, where ``tandem`` is another project; the import name is ``tandem``."""


def search_path() -> str:
    """Return the search path, with the folder of this interpreter first, so that `python` is this one."""
    return os.pathsep.join(filter(None, [os.path.dirname(sys.executable), os.environ.get("PATH")]))


def version() -> str:
    """Return the installed version, or else that of a clone's ``pyproject.toml``; ``unknown`` without either."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return str(_clone_project().get("version", "unknown"))


def list_requirements() -> list[str]:
    """Return the requirements of the distribution and its extras, in the form of package metadata."""
    try:
        return importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        project = _clone_project()
        extras = project.get("optional-dependencies", {})
        return [*project.get("dependencies", ()), *(each for extra in extras.values() for each in extra)]


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the clone that holds this module or else from an index."""
    clone = _clone()
    if clone is None:
        return f"pip install '{NAME}[{extra}]'"
    is_here = clone == Path.cwd()
    return f"pip install -e '{'.' if is_here else clone}[{extra}]'"


@functools.cache
def _clone() -> Path | None:
    """Return the root of the clone that holds this module; None for an installed wheel."""
    above = Path(__file__).resolve().parents
    root = above[5] if len(above) > 5 else None  # libs/common/src/tandem/common
    return root if root is not None and _project(root / "pyproject.toml").get("name") == NAME else None


def _clone_project() -> dict[str, Any]:
    clone = _clone()
    return {} if clone is None else _project(clone / "pyproject.toml")


def _project(path: Path) -> dict[str, Any]:
    """Return the ``project`` table of a ``pyproject.toml``; empty if the file is missing or unreadable."""
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return {}
    return project if isinstance(project, dict) else {}
