"""Check the layers of ``pyproject.toml``: import-linter, shown where all the folders of the package are.

It looks a package up without importing it, and so would see only the one folder of ``tandem`` that has an
``__init__.py``, which adds the others to its path when it runs.
"""

from __future__ import annotations

import importlib.util

import tandem

spec = importlib.util.find_spec("tandem")
assert spec is not None
spec.submodule_search_locations = list(tandem.__path__)

from importlinter.cli import lint_imports_command  # noqa: E402 (once the package is whole)

if __name__ == "__main__":
    lint_imports_command()
