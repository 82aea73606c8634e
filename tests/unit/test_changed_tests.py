"""What a change selects: the test files that import what is changed, or name it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("grimp")
    return load_script("changed_tests")


def file_of(name: str) -> str:
    """Return where a module of the sources lies, by the end of its path."""
    (path,) = (p for part in ("libs", "services") for p in (ROOT / part).rglob("*.py") if p.as_posix().endswith(name))
    return path.relative_to(ROOT).as_posix()


def test_a_module_selects_what_imports_it_through_any_other_and_a_run(script: ModuleType) -> None:
    chosen = script.chosen([file_of("trainer/losses/__init__.py")])
    assert {"tests/unit/test_loss.py", "tests/integration/trainer/test_policy_gradients.py", script.A_RUN} <= {*chosen}
    assert "tests/unit/test_scheduler.py" not in chosen
    assert "tests/integration/survival/test_deaths.py" not in chosen
    assert len(chosen) < len(script.test_files()) / 3
    with_runs = script.chosen([file_of("trainer/losses/__init__.py")], with_runs=True)
    assert {*chosen, "tests/integration/survival/test_deaths.py"} <= {*with_runs}


def test_a_test_selects_itself_and_a_helper_whoever_imports_it(script: ModuleType) -> None:
    assert script.chosen(["tests/unit/test_loss.py"]) == ["tests/unit/test_loss.py"]
    assert "tests/unit/test_loss.py" in script.chosen(["tests/unit/loss_harness.py"])
    chosen = script.chosen(["tests/integration/conftest.py"])
    assert {Path(name).parts[1] for name in chosen} == {"integration"}


def test_a_page_selects_what_names_it_and_the_settings_of_tests_everything(script: ModuleType) -> None:
    assert "tests/unit/test_pages.py" in script.chosen(["docs/architecture.md"])
    assert "tests/unit/test_tree.py" in script.chosen(["scripts/tree.py"])
    assert len(script.chosen(["tox.ini"])) == len(script.test_files())


def test_what_differs_is_what_was_committed_changed_or_made_since(script: ModuleType, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("kept", "changed", "moved"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("checkout", "-q", "-b", "mine")
    git("mv", "moved", "there")
    git("commit", "-q", "-m", "second")
    (tmp_path / "changed").write_text("otherwise")
    (tmp_path / "new").write_text("new")
    assert script.differing("main", tmp_path) == {"moved", "there", "changed", "new"}
