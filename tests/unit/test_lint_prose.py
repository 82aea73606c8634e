"""The lint of English finds turns of dialect in all of a page but its code, and lets no more of them into sources."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.scripts import load_script

PAGE = """# A page

The run goes
on, to the bit.

| what | where |
|---|---|
| models that see | beside it |

```console
$ coordinator goes on
```

There is no code. This is no code. It is no longer code.
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script = load_script("lint_prose")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return script


def test_a_page_has_none_of_it(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    places = [line.partition(" is '")[0] for line in script.dialect_findings([], [page])]
    assert sorted(places) == [
        "page.md:14: 'is no code'",
        "page.md:3: 'goes on'",
        "page.md:4: 'to the bit'",
        "page.md:8: 'beside'",
        "page.md:8: 'models that see'",
    ]


def test_sources_have_no_more_than_they_had(script: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('"""Whatever goes on."""\n\ngoes_on = True  # it goes on\n')
    assert list(script.dialect_findings([source], [])) == []
    script.DIALECT["continue"] = (script.DIALECT["continue"][0], 1)
    *places, total = script.dialect_findings([source], [])
    assert [line.partition(" is '")[0] for line in places] == ["source.py:1: 'goes on'", "source.py:3: 'goes on'"]
    assert total == "sources may have 1 of 'continue', and have 2"
