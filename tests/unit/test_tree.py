"""docs/files.md is true: it lists every file, each with a caption that fits on its line."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

from tests.harness.scripts import ROOT, load_script

MOST_CHARACTERS = 100
MOST_FILES = 25
"""Of a folder: more would be two folders."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("tree")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert script.tree() in page, "run: python scripts/tree.py --write"
    assert script.with_tree(page) == page


def test_every_part_has_a_section_with_its_folder_and_files(script: ModuleType) -> None:
    sections = script.tree().split("\n## ")
    assert len(sections) == len(script.PARTS)
    for section, part in zip(sections, script.PARTS, strict=True):
        assert part in section.splitlines()[0]
        listed = section.partition("```\n")[2].partition("\n```")[0].splitlines()
        assert len(listed) == len(list(script.folder(part).rglob("*.py"))) - 1
        for line in listed:
            assert (script.folder(part) / line.split()[0]).exists(), line


def test_every_file_has_a_caption_of_one_line(script: ModuleType) -> None:
    for part in script.PARTS:
        for name, caption in script.captions(part).items():
            assert 0 < len(caption) <= MOST_CHARACTERS, f"{part}: {name}: {caption}"


def test_no_folder_has_more_files_than_can_be_held_in_mind(script: ModuleType) -> None:
    sizes = Counter(path.parent for part in script.PARTS for path in script.folder(part).rglob("*.py"))
    assert {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > MOST_FILES} == {}
