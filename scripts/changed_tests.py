"""Print the test files that what differs from main can change, by the import graph; ``tox -e changed`` runs them.

A test file is chosen if it is changed, or imports what is changed: itself, through its helpers, or through modules of
the package. A file that is no module (a page, an example, a script) chooses the test files that name it, its folder or
all files that end like it. What a test starts as a process of its own is not followed: nearly every module takes part
in a whole run, so that every such test would be chosen by every change. One file of runs (`A_RUN`) stands for them,
``--runs`` chooses them all, and CI runs everything.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

import tandem

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("unit", "protocol", "integration", "page", "fuzz")
"""Of `tests`, whose files are chosen from: they need nothing but the development environment."""
A_RUN = "tests/integration/runs/test_run.py"
"""Whole runs of every kind of service; two minutes."""
STARTERS = ("tests/harness/runs/running.py", "tests/harness/runs/consoles.py")
"""Helpers that start services."""
OF_ALL = ("pyproject.toml", "tox.ini", "conftest.py", "tests/conftest.py", "tests/harness/leaks.py")
"""What every test depends on."""


def differing(against: str, root: Path = ROOT) -> set[str]:
    """Return the files that differ from where this branch left another, uncommitted and new ones included."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (base,) = git("merge-base", against, "HEAD")
    return {*git("diff", "--name-only", "--no-renames", base), *git("ls-files", "--others", "--exclude-standard")}


def test_files() -> list[Path]:
    """Return all test files that are chosen from."""
    return sorted(path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py"))


def chosen(changed: Iterable[str], *, with_runs: bool = False) -> list[str]:
    """Return the test files, by their paths from the root, that these changed files choose."""
    changed = {*changed}
    every = [path.relative_to(ROOT).as_posix() for path in test_files()]
    if changed & {*OF_ALL}:
        return every
    modules = _affected(changed)
    is_product = any(name.startswith(("libs/", "services/")) for name in changed)

    def starts_runs(name: str) -> bool:
        return is_product and (name == A_RUN or (with_runs and not _names_read(name).isdisjoint(STARTERS)))

    return [name for name in every if starts_runs(name) or _depends(name, changed, modules)]


def ci_files() -> list[str]:
    """Return all test files and benchmarks, by their paths from the root."""
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("test_*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def importers(changed: Iterable[str], names: Iterable[str], *, is_direct: bool) -> list[str]:
    """Return those of these test files that import what is changed, or name it; what every test depends on left aside.

    Direct is what they import themselves or through helpers. Otherwise modules of the package are followed, and what
    starts services depends on all of them.
    """
    changed = {*changed} - {*OF_ALL}
    if is_direct:
        modules = {_module_at(name) for name in changed if "/src/" in name}
        return [name for name in names if _depends(name, changed, modules)]
    modules = _affected(changed)
    starters = {*STARTERS} if any(name.startswith(("libs/", "services/")) for name in changed) else set[str]()
    return [name for name in names if _names_read(name) & starters or _depends(name, changed, modules)]


def _depends(name: str, changed: set[str], modules: set[str]) -> bool:
    """Tell whether a test file is changed, imports a module or a helper that is, or names another file that is."""
    helpers = _with_helpers(ROOT / name)
    others = [Path(other) for other in changed if not other.startswith(("libs/", "services/", "tests/"))]
    imports = {module for path in helpers for module in _imported(path)}
    return bool(_names_read(name) & changed or imports & modules) or _names_one(ROOT / name, helpers, others)


def _names_read(name: str) -> set[str]:
    """Return a test file, its helpers, and what pytest reads before it, by their paths from the root."""
    files = (*_with_helpers(ROOT / name), *_conftests(ROOT / name))
    return {path.relative_to(ROOT).as_posix() for path in files}


def _affected(changed: Iterable[str]) -> set[str]:
    """Return the modules of the package that are changed, or import one that is."""
    graph, affected = _graph(), set[str]()
    for name in changed:
        module = _module_at(name)
        if module in graph.modules:
            affected |= {module, *graph.find_downstream_modules(module, as_package=name.endswith("__init__.py"))}
    return affected


@cache
def _graph() -> grimp.ImportGraph:
    """Return which module of the package imports which, wherever in the module."""
    spec = importlib.util.find_spec("tandem")
    assert spec is not None
    spec.submodule_search_locations = list(tandem.__path__)  # grimp sees one of the package's folders else
    return grimp.build_graph("tandem", cache_dir=None)


def _module_at(name: str) -> str:
    """Return the module that a file of the package is; for any other file no module's name."""
    _, _, inside = name.partition("/src/")
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _with_helpers(path: Path) -> frozenset[Path]:
    """Return a test file with the test modules that it imports, and those that they import."""
    found: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += [helper for module in _imported(file) for helper in _helpers(module, file.parent)]
    return frozenset(found)


def _conftests(path: Path) -> list[Path]:
    """Return what pytest reads before a test file; what that imports is no matter of the file's."""
    return [folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").exists()]


def _helpers(module: str, folder: Path) -> Iterator[Path]:
    """Yield the file of a module of the tests or benchmarks, beside one of them or by its path from the root."""
    for base in (ROOT, folder):
        path = (base / module.replace(".", "/")).with_suffix(".py")
        if path.is_relative_to(ROOT / folder.relative_to(ROOT).parts[0]) and path.exists():
            yield path


@cache
def _imported(path: Path) -> frozenset[str]:
    """Return the names of modules that a file imports, with those of the packages around them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    parents = {name[:place] for name in names for place, letter in enumerate(name) if letter == "."}
    return frozenset(names | parents)


def _names_one(path: Path, helpers: Iterable[Path], others: Iterable[Path]) -> bool:
    """Tell whether a test file, or a helper, names one of these, or the test file its folder or files of its kind."""
    folders = {f'"{folder}"' for other in others for folder in other.parts[:-1]}
    folders |= {f"*{other.suffix}" for other in others if other.suffix}
    # A name such as `run` says nothing.
    names = [other.name for other in others if other.suffix or len(other.parts) == 1]
    is_named = any(name in _text(each) for name in names for each in helpers)
    return is_named or any(folder in _text(path) for folder in folders)


@cache
def _text(path: Path) -> str:
    return path.read_text()


def main() -> int:
    """Print the files, or run them with what else is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="main", metavar="REVISION", help="(default: main)")
    parser.add_argument("--runs", action="store_true", help="choose also every test that starts services")
    parser.add_argument("--run", action="store_true", help="run them, with the arguments of pytest that follow")
    given, pytest_arguments = parser.parse_known_args()
    files = chosen(differing(given.against), with_runs=given.runs)
    if not given.run:
        print("\n".join(files))
        return 0
    print(f"{len(files)} of {len(test_files())} test files: {' '.join(files)}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *pytest_arguments, *files], cwd=ROOT) if files else 0


if __name__ == "__main__":
    sys.exit(main())
