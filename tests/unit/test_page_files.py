"""What browsers load of the page: its modules and what they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.observe.page.server import STATIC

MODULES = sorted(STATIC.glob("*.js"))

_IMPORT = re.compile(r"^import .*\"\./(\w+\.js)\";$", re.MULTILINE)


def imports(name: str) -> set[str]:
    """Return the modules that are loaded before this one runs."""
    direct = {*_IMPORT.findall((STATIC / name).read_text())}
    return direct.union(*map(imports, direct))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_lines_are_no_longer_than_those_of_python(path: Path) -> None:
    assert [line for line in path.read_text().splitlines() if len(line) > 120] == []


def test_what_the_page_begins_with_is_asked_for_at_once() -> None:
    preloaded = re.findall(r'rel="modulepreload" href="([^"]+)"', (STATIC / "index.html").read_text())
    assert {*preloaded} == imports("app.js") | {"curves.js"} | imports("curves.js")


def test_modules_name_what_is_there() -> None:
    named = {name for path in MODULES for name in re.findall(r"\./(\w+\.js)", path.read_text())}
    assert named <= {path.name for path in MODULES}
    assert {path.name for path in MODULES} - named == {"theme.js"}, "which index.html names"
