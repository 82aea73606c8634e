"""The check of names: what it finds, what it lets pass, and that a file may only get better."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from scripts import lint_names

SOURCE = """
class Box: ...

class BoxPart: ...

class Trainer: ...

class _Box: ...

def found_in(wanted: int) -> int:
    found = [each for each in range(wanted)]
    for each in found:
        print(each)
    return len(found)

def find_parts(parts: list[int]) -> int:
    def told() -> int: ...
    said = 3
    return said
"""


def findings_of(source: str, **num_classes: int) -> list[tuple[str, str]]:
    tree = ast.parse(source)
    counts = Counter({"Box": 1, "BoxPart": 1, "Trainer": 1}) + Counter(num_classes)
    return sorted((kind, name) for kind, _, name in lint_names.findings(tree, counts))


def test_each_kind_is_found() -> None:
    assert findings_of(SOURCE) == [
        ("function", "found_in"),
        ("function", "told"),
        ("generic", "each"),
        ("generic", "found"),
        ("generic", "said"),
        ("generic", "wanted"),
        ("one word", "Box"),
    ]
    assert ("shared", "BoxPart") in findings_of(SOURCE, BoxPart=1)


def test_a_file_may_have_fewer_and_a_new_one_has_none() -> None:
    by_file = {"old.py": [("generic", 3, "found"), ("generic", 9, "said")], "new.py": [("function", 1, "told")]}
    assert list(lint_names.excess(by_file, {"old.py": {"generic": 3}})) == [
        "new.py:1: told opens with no verb (1 here, at most 0)"
    ]
    assert len(list(lint_names.excess(by_file, {"old.py": {"generic": 1}, "new.py": {"function": 1}}))) == 2


def test_the_list_is_written_only_where_the_house_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "libs" / "box" / "src" / "box.py"
    source.parent.mkdir(parents=True)
    source.write_text("found = 1\nsaid = 2\n")
    allowed = tmp_path / "allowed.json"
    monkeypatch.setattr(lint_names, "ROOT", tmp_path)
    monkeypatch.setattr(lint_names, "ALLOWED", allowed)
    monkeypatch.setattr("sys.argv", ["lint_names.py", "--write"])
    allowed.write_text('{"libs/gone.py": {"generic": 1}}')
    assert lint_names.main() == 1
    assert capsys.readouterr().out == "2 names where there were 1: each says nothing of what it names\n"
    assert "gone.py" in allowed.read_text()
    allowed.write_text('{"libs/gone.py": {"generic": 3}}')
    assert lint_names.main() == 0
    assert json.loads(allowed.read_text()) == {"libs/box/src/box.py": {"generic": 2}}
    monkeypatch.setattr("sys.argv", ["lint_names.py"])
    assert lint_names.main() == 0
    source.write_text("found = 1\nsaid = 2\ntold = 3\n")
    assert lint_names.main() == 1
    assert capsys.readouterr().out.endswith("box.py:3: told says nothing of what it names (3 here, at most 2)\n")
