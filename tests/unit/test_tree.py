"""The architecture's tree is true: it lists every file, each with a caption that fits on its line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_CHARACTERS = 100


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree", ROOT / "scripts" / "tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_is_up_to_date(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert script.tree() in page, "run: python scripts/tree.py --write"
    assert script.with_tree(page) == page


def test_every_file_has_a_caption_of_one_line(script: ModuleType) -> None:
    for part in script.PARTS:
        for name, caption in script.captions(part).items():
            assert 0 < len(caption) <= MOST_CHARACTERS, f"{part}: {name}: {caption}"
