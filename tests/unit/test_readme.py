"""The README is true: its tree lists every file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tree_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("readme_tree", ROOT / "scripts" / "readme_tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    assert module.with_tree(readme) == readme, "run: python scripts/readme_tree.py --write"
