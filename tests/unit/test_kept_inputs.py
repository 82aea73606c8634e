"""What a run keeps of its inputs, and what it refuses where it cannot keep it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common import kept_inputs


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(kept_inputs.VARIABLE, raising=False)
    Path("run").mkdir()


def test_an_agents_program_that_has_changed_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["python", "agent.py", "--fast"]
    Path("agent.py").write_text("a = 1\nb = 2\n")
    folder = kept_inputs.keep(Path("run"), {}, [], ["agent.py"])
    assert folder is not None
    assert kept_inputs.find_changed_program(command) == "", "nothing is kept for this process"
    monkeypatch.setenv(kept_inputs.VARIABLE, str(folder))
    assert kept_inputs.find_changed_program(command) == ""
    Path("agent.py").write_text("a = 1\nb = 3\n")
    assert kept_inputs.find_changed_program(command) == f"{Path('agent.py').absolute()}:2"
    assert kept_inputs.describe_change(folder) == f"{Path('agent.py').absolute()}:2"
    assert kept_inputs.find_changed_program(["python", "another.py"]) == ""
    Path("agent.py").unlink()
    assert kept_inputs.find_changed_program(command) == f"{Path('agent.py').absolute()}, which is gone"


def test_data_too_large_to_be_kept_is_watched_and_what_is_small_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_inputs, "MOST_BYTES", 100)
    Path("large.jsonl").write_text("x" * 101)
    Path("small.jsonl").write_text("small")
    folder = kept_inputs.keep(Path("run"), {}, ["large.jsonl", "small.jsonl"])
    assert folder is not None
    monkeypatch.setenv(kept_inputs.VARIABLE, str(folder))
    Path("small.jsonl").write_text("edited")
    assert Path(kept_inputs.path_of("small.jsonl")).read_text() == "small"
    assert kept_inputs.path_of("large.jsonl") == "large.jsonl"
    assert kept_inputs.find_changed_data(folder) == ""
    Path("large.jsonl").write_text("y" * 102)
    assert kept_inputs.find_changed_data(folder) == str(Path("large.jsonl").absolute())
    Path("large.jsonl").unlink()
    assert kept_inputs.find_changed_data(folder) == f"{Path('large.jsonl').absolute()}, which is gone"


def test_a_process_started_by_hand_uses_what_the_run_of_its_keys_keeps() -> None:
    Path("mine.py").write_text("pass\n")
    keys = Path("run/keys/members.json")
    kept_inputs.adopt(keys)
    assert kept_inputs.VARIABLE not in os.environ
    folder = kept_inputs.keep(Path("run"), {"mine": str(Path("mine.py").absolute())}, [])
    try:
        kept_inputs.adopt(keys)
        assert os.environ[kept_inputs.VARIABLE] == str(folder)
    finally:
        os.environ.pop(kept_inputs.VARIABLE, None)


def test_what_an_earlier_run_kept_is_not_left_for_one_that_keeps_nothing() -> None:
    Path("prompt.txt").write_text("{}")
    folder = kept_inputs.keep(Path("run"), {}, ["prompt.txt"])
    assert folder is not None
    assert kept_inputs.keep(Path("run"), {}, []) is None
    assert not folder.exists()
