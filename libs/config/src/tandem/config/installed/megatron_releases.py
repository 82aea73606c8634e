"""The known releases of Megatron-Core, and the installed one, read without importing it."""

from __future__ import annotations

import ast

from tandem.config.installed.sources import find_package, parse

RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Releases that are known here, by their first two numbers. The last patch release of each is tested."""

_IMPORTS_TRITON = ("0.18", "0.19")
"""Releases that import triton when they are imported, which torch's builds for CPUs do not bring."""


def is_installed() -> bool:
    """Tell whether Megatron-Core is installed."""
    return find_package("megatron.core") is not None


def find_release() -> str | None:
    """Return the installed release; None if there is none, or it tells none."""
    package = find_package("megatron.core")
    if package is None or not (package / "package_info.py").is_file():
        return None
    numbers: dict[str, object] = {}
    for node in parse(package / "package_info.py").body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                numbers[name] = value
    release = ".".join(str(numbers.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
    return None if "?" in release else release


def is_among(release: str, releases: tuple[str, ...]) -> bool:
    """Tell whether a release, such as 0.16.1, is one of those that are given by their first two numbers."""
    return release.startswith(tuple(f"{first}." for first in releases))


def find_obstacle() -> str | None:
    """Say why the installed release cannot train here; None if it can, or tells no number."""
    release = find_release()
    if release is None:
        return None
    if not is_among(release, RELEASES):
        return f"Megatron-Core {release} is installed, and known releases are {', '.join(RELEASES)}"
    if is_among(release, _IMPORTS_TRITON) and find_package("triton") is None:
        return f"Megatron-Core {release} imports triton, which is not installed: pip install triton"
    return None
