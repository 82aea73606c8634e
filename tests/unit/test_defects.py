"""The list of defects is true: each can be made in one place, and names a test that there is."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests import suites
from tests.harness.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("defects")


def test_each_defect_can_be_made_in_one_place(script: ModuleType) -> None:
    texts = {path: path.read_text() for path in script.sources()}
    found = {defect.name: len(script.places(defect, texts)) for defect in script.DEFECTS}
    assert found == dict.fromkeys(found, 1)
    assert len(found) == len(script.DEFECTS), "two of one name"


def test_each_defect_names_a_test_that_tox_runs(script: ModuleType) -> None:
    named = suites.places()
    for defect in script.DEFECTS:
        file, _, function = defect.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), defect.name
        assert named.get(defect.test, suites.suite_of(file)) in ("unit", "integration"), defect.name
