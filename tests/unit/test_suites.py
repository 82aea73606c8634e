"""Every test is in one suite, which `tox` runs; those that it leaves out, CI runs."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys

from tests import ci_suites, suites
from tests.suites import ROOT, SUITES, TWICE

FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
ON_REQUEST = {"slurm", "ray", "s3"}
"""The first installs packages of the system, the second takes minutes and a root that makes namespaces, the third
installs forty packages."""
ONE_OF_TWO = (
    "tests/integration/survival/test_lost_for_cause.py"
    "::test_a_rollout_that_lies_about_its_samples_is_shut_out_by_name_and_replaced"
)
"""A test of which the others of its file are another suite's."""


def test_what_is_named_is_there() -> None:
    named = [place for places in SUITES.values() for place in places]
    for place in named:
        file, _, test = place.partition("::")
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text()
    assert len(named) == len({*named})
    assert {*TWICE} <= {*named}


def test_every_file_is_in_a_suite() -> None:
    assert len(FILES) > 100
    assert {suites.suite_of(file) for file in FILES} == {*SUITES}


def test_pytest_leaves_out_what_another_suite_has() -> None:
    file, _, other = ONE_OF_TWO.partition("::")
    words = suites.arguments("survival")
    left_out = words[words.index(ONE_OF_TWO) - 1 : words.index(ONE_OF_TWO) + 1]
    command = [sys.executable, "-m", "pytest", file, *left_out, "--noconftest", "--collect-only", "-q"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    collected = {line.partition("::")[2].partition("[")[0] for line in said.splitlines() if "::" in line}
    tests = {each.name for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)}
    assert collected == {test for test in tests if test.startswith("test_")} - {other}


def test_what_is_named_more_closely_is_left_to_its_suite() -> None:
    words = suites.arguments("survival")
    assert words[words.index(ONE_OF_TWO) - 1] == "--deselect"
    place = "tests/integration/survival/test_members_only.py"
    assert words[words.index(place) - 1] == "--ignore"
    assert suites.suite_of(place) == "integration"
    assert suites.suite_of("tests/integration/survival/test_join.py") == "survival"


def test_tox_runs_each_suite_and_ci_what_tox_leaves_out() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for suite in SUITES:
        assert re.search(rf"(tests\.suites|\[testenv\]suite\}}) {suite}\b", tox[f"testenv:{suite}"]["commands"])
    typed = tox["tox"]["env_list"].split(", ")
    assert "checks" in typed
    assert sorted(ci_suites.SUITES) == sorted({*SUITES, "benchmarks"} - {*typed} - ON_REQUEST)
