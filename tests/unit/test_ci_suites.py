"""What CI runs after `tox`: on which day, with which changes, with how much history and how much time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ci_suites
from tests.ci_suites import (
    DAILY,
    NUM_COMMITS,
    SUITES,
    TURNS,
    Shares,
    count_shares,
    find_base,
    list_changes,
    order_suites,
)
from tests.harness.scripts import ROOT, load_script

NONE_CHANGED = dict.fromkeys(SUITES, Shares(0.0, 0.0))
BEGAN = 1_800_000_000
"""When CI begins, in seconds of the epoch: day 20833, the second of three."""


def make_history(folder: Path, num_commits: int) -> list[str]:
    """Commit a file of its own each time, and return the commits, the last one first."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for place in range(num_commits):
        (folder / f"{place}.txt").write_text("")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"commit {place}")
    return git(folder, "rev-list", "HEAD").split()


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "gc.auto=0")
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("day", range(20000, 20009))
def test_each_suite_has_its_turn_on_one_of_three_days_and_each_is_the_first_on_one_of_nine(day: int) -> None:
    days = [order_suites(day + later, NONE_CHANGED) for later in range(9)]
    num = len(DAILY)
    assert all(tuple(ordered[:num]) == DAILY for ordered in days)
    in_turn = sorted({*SUITES} - {*DAILY})
    assert sorted(suite for ordered in days[:3] for suite in ordered[num:]) == in_turn
    assert sorted(ordered[num] for ordered in days) == in_turn


def test_what_a_change_touches_follows_the_most_touched_first() -> None:
    shares = NONE_CHANGED | {
        "numbers": Shares(0.1, 0.9),
        "survival": Shares(0.5, 0.5),
        "tinker": Shares(0.0, 0.2),
        "weights": Shares(0.9, 1.0),
    }
    assert order_suites(0, shares) == [*DAILY, "runs", "weights", "vllm", "survival", "numbers", "tinker"]
    rest = ["numbers", "benchmarks", "gpu-simulated", "weights", "survival", "tinker"]
    assert order_suites(10, shares) == [*DAILY, *rest]


def test_where_all_count_as_changed_all_follow_and_the_turn_is_still_first() -> None:
    ordered = order_suites(2, dict.fromkeys(SUITES, Shares(1.0, 1.0)))
    assert {*ordered[: len(DAILY) + 3]} == {*DAILY, *TURNS[2]}
    assert sorted(ordered) == sorted(SUITES)


def test_a_change_touches_the_suites_whose_files_import_it_or_name_it() -> None:
    shares = count_shares([file_of("rollout/engines/vllm/engine.py")])
    assert 0 < shares["vllm"].direct < shares["vllm"].indirect
    assert shares["models"] == Shares(0, 0)
    shares = count_shares([file_of("refit/adapters/vllm.py")])
    assert shares["vllm"].direct == 0 < shares["vllm"].indirect
    assert count_shares(["tests/vllm/vllm_harness.py"])["vllm"].direct > 0.5
    assert count_shares(["benchmarks/measure.py"])["benchmarks"].direct > 0.5
    assert count_shares(["tests/tinker/conftest.py"]) == NONE_CHANGED | {"tinker": Shares(1, 1)}
    assert (
        count_shares(["conftest.py", "tests/conftest.py", "pyproject.toml", "tox.ini", "tests/unit/test_loss.py"])
        == NONE_CHANGED
    )
    assert count_shares([".ci/run"]) == NONE_CHANGED


def file_of(name: str) -> str:
    """Return where a module of a service lies, by the end of its path."""
    (path,) = (path for path in (ROOT / "services").rglob("*.py") if path.as_posix().endswith(f"/{name}"))
    return path.relative_to(ROOT).as_posix()


def test_every_file_of_these_suites_can_be_chosen() -> None:
    files = load_script("changed_tests").ci_files()
    assert {file.split("/")[1] for file in files if file.startswith("tests/")} >= {"chaos", "vllm", "gpu", "families"}
    for suite, file in {"survival": "tests/chaos/test_chaos.py", "benchmarks": "benchmarks/test_scheduler.py"}.items():
        assert count_shares([file])[suite].direct > 0


def test_changes_are_counted_from_the_last_tag_or_from_forty_commits_ago(tmp_path: Path) -> None:
    commits = make_history(tmp_path / "history", NUM_COMMITS + 3)
    history = tmp_path / "history"
    assert find_base(history) == commits[NUM_COMMITS]
    changes = {f"{place}.txt" for place in range(3, NUM_COMMITS + 3)}
    assert list_changes(history) == changes
    git(history, "tag", "early", commits[NUM_COMMITS + 1])
    assert find_base(history) == commits[NUM_COMMITS]
    git(history, "tag", "-a", "-m", "a release", "v1", commits[4])
    git(history, "tag", "lightweight", commits[9])
    assert find_base(history) == commits[4]
    git(history, "tag", "v2", commits[0])  # a release is tested against the one before
    assert find_base(history) == commits[4]
    (history / "new").write_text("")
    assert list_changes(history) == {f"{place}.txt" for place in range(NUM_COMMITS - 1, NUM_COMMITS + 3)} | {"new"}


def test_history_may_be_missing_or_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = make_history(tmp_path / "history", NUM_COMMITS + 3)
    for depth, base in ((1, None), (NUM_COMMITS, None), (NUM_COMMITS + 1, commits[NUM_COMMITS])):
        clone = tmp_path / f"clone {depth}"
        git(tmp_path, "clone", "-q", f"--depth={depth}", f"file://{tmp_path}/history", str(clone))
        assert find_base(clone) == base
        assert (list_changes(clone) is None) == (base is None)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert list_changes(empty) is None
    git(empty, "init", "-q")
    assert list_changes(empty) is None
    monkeypatch.setenv("PATH", str(empty))
    assert list_changes(tmp_path / "history") is None


def test_it_prints_the_suites_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ci_suites", "--day", "20000"])
    ci_suites.main()
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[: len(DAILY) + 3] == order_suites(20000, NONE_CHANGED)
    assert {*lines} <= {*SUITES}
    assert len(lines) == len({*lines})
    assert printed.err.startswith("changed: ")


class Machine:
    """A machine on which `.ci/run` calls programs that only write their names, with a clock of its own."""

    def __init__(self, folder: Path, suites: list[str], seconds: dict[str, int]) -> None:
        self.folder, self._bin = folder, folder / "bin"
        (folder / ".ci").mkdir()
        (folder / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
        (folder / "now").write_text(str(BEGAN))
        (folder / "seconds").mkdir()
        for words, number in seconds.items():
            (folder / "seconds" / words).write_text(str(number))
        (folder / ".tox" / "venv" / "bin").mkdir(parents=True)
        listing = "".join(f"echo {suite}\n" for suite in suites)
        self._write(folder / ".tox" / "venv" / "bin" / "python", f'echo "$*" >> {folder}/calls\n{listing}')
        self._bin.mkdir()
        self._write(self._bin / "date", f"cat {folder}/now\n")
        self._write(self._bin / "chromium", "")
        tox = folder / "tox"
        self._write(
            tox,
            f'echo "tox $*" >> {folder}/calls\n'
            f'seconds=$(cat "{folder}/seconds/${{*: -1}}" 2> /dev/null || echo 0)\n'
            # One may run in the background, and a file is empty before it is written.
            f"echo $(($(cat {folder}/now) + seconds)) > {folder}/now.$$\n"
            f'if [ "$seconds" = 0 ]; then rm {folder}/now.$$; else mv {folder}/now.$$ {folder}/now; fi\n'
            f'[ ! -e "{folder}/failing" ] || [ "$(cat {folder}/failing)" != "${{*: -1}}" ]\n',
        )
        pip = folder / "pip"
        self._write(pip, f"cp {tox} $(dirname $0)/tox\n")
        self._write(self._bin / "python3", f'mkdir -p "$3/bin"; cp {pip} "$3/bin/pip"\n')

    def _write(self, program: Path, lines: str) -> None:
        program.write_text(f"#!/usr/bin/env bash\n{lines}")
        program.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{self._bin}:{os.environ['PATH']}", "TMPDIR": str(self.folder)}
        words = ["bash", str(self.folder / ".ci" / "run")]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def test_ci_runs_tox_and_then_the_suites_of_the_day(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ["models", "runs", "weights", "families", "vllm"], {"tox": 900, "runs": 60})
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.calls() == [
        "tox run -q -e venv --notest",
        "-m tests.ci_suites",
        "tox ",
        *(f"tox run -e {suite}" for suite in ("models", "runs", "weights", "families", "vllm")),
    ]
    assert "after tox: models runs weights families vllm" in done.stdout
    assert done.stdout.splitlines()[-1] == "60 seconds"


def test_ci_begins_no_suite_late_and_names_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ["numbers", "runs", "survival"], {"numbers": 35 * 60, "runs": 60})
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.calls()[-2:] == ["tox run -e numbers", "tox run -e runs"]
    assert done.stdout.splitlines()[-2:] == ["no time was left for survival", "2160 seconds"]


def test_ci_installs_beforehand_what_has_its_turn_and_waits_for_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ["models", "weights", "vllm", "runs", "gpu-simulated"], {})
    assert machine.run().returncode == 0
    calls = machine.calls()
    assert calls.count("tox run -q -e vllm-venv") == 1
    assert "tox run -q -e gpu-simulated-venv" not in calls
    assert calls.index("tox run -q -e vllm-venv") < calls.index("tox run -e weights")


@pytest.mark.parametrize("failing", ["venv", "vllm-venv", "runs"])
def test_ci_fails_with_what_it_calls(tmp_path: Path, failing: str) -> None:
    machine = Machine(tmp_path, ["vllm", "runs", "weights"], {})
    (tmp_path / "failing").write_text("--notest" if failing == "venv" else failing)
    assert machine.run().returncode != 0
    assert "tox run -e weights" not in machine.calls()
