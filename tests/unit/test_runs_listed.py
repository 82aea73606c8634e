"""The table of runs below a folder: what is listed, found, noted and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_harness import make_run

from tandem.coordinator import cli
from tandem.coordinator.cli import main
from tandem.coordinator.loop.run import record_outcome
from tandem.coordinator.scheduler.events import FinishRun
from tandem.coordinator.sweeping.checking import parse_sweep
from tandem.observe.listing import NOTES_NAME, curve_of
from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.pages_harness import ROOT, quoted


def settings(lr: float, seed: int, folder: str) -> dict[str, Any]:
    return {
        "policy": {"model_name": "org/model", "optimizer": {"kwargs": {"lr": lr}}},
        "grpo": {"max_num_steps": 9, "seed": seed},
        "checkpointing": {"metric_name": "val_accuracy", "higher_is_better": True},
        "logger": {"log_dir": folder},
    }


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave three runs below `results`: one that has finished, one that was killed, and one that is going on."""
    monkeypatch.chdir(tmp_path)
    for number, (name, lr, seed, num_steps) in enumerate(
        [("a", 1e-3, 1, 6), ("deep/b", 1e-3, 2, 4), ("c", 5e-4, 2, 0)]
    ):
        journal = make_run(f"results/{name}", num_steps, settings(lr, seed, name), run_id=f"id-{number}")
        if name == "a":
            record_outcome(journal, lambda: FinishRun(outcome="finished"))
        if name != "c":
            journal.close()
        else:
            going_on = journal
    Path("results/a/checkpoints/step_3").mkdir(parents=True)
    yield
    going_on.close()


def listed(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["runs", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_runs_are_listed_with_what_they_have_reached(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["folder"]: row for row in listed("--sort", "name", capsys=capsys)["runs"]}
    assert [*rows] == ["results/a", "results/c", "results/deep/b"]
    assert [row["state"] for row in rows.values()] == ["finished", "running", "ended"]
    a = rows["results/a"]
    # Six steps of `commit`: the reward of step n is n / 10, every second one is validated with n / 100.
    assert (a["step"], a["num_steps"], a["reward"], a["seconds"]) == (6, 9, 0.6, 12.0)
    score = {"metric": "val_accuracy", "last": 0.06, "best": 0.06, "best_step": 6, "higher_is_better": True}
    assert a["score"] == score
    assert rows["results/c"]["score"] is None


def test_the_table_has_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "results"]) == 0
    head, *lines, curves = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "algorithm", "steps", "val_accuracy", "best", "reward", "time", "begun"]
    assert lines[0].split()[:8] == ["results/a", "finished", "grpo", "6/9", "0.06", "0.06", "@6", "0.6"]
    assert curves == "curves: coordinator view results/a results/deep/b results/c"


def test_notes_and_tags_are_written_shown_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["note", "results/a", "--text", "as in the paper", "--tag", "baseline", "--tag", "kept"]) == 0
    assert main(["note", "results/a", "results/c", "--tag", "sevens", "--untag", "keep"]) == 2
    assert "no such run has the tag 'keep'; did you mean 'kept'?" in capsys.readouterr().err
    assert main(["note", "results/a", "results/c", "--tag", "sevens", "--untag", "kept"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "results/a: [baseline sevens] as in the paper",
        "results/c: [sevens]",
    ]
    for words in (["--tag", "baseline"], ["--search", "THE PAPER"], ["--search", "finished"]):
        assert [row["folder"] for row in listed(*words, capsys=capsys)["runs"]] == ["results/a"]
    assert main(["runs", "--tag", "basline"]) == 2
    assert capsys.readouterr().err == "error: --tag: no run has the tag 'basline'; did you mean 'baseline'?\n"
    assert main(["note", "results/a", "--tag", "two words", "--untag", "sevns"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --tag: 'two words' is not a word of at most 60 characters",
        "error: --untag: no such run has the tag 'sevns'; did you mean 'sevens'?",
        "2 problems",
    ]
    assert main(["note", "results/deep", "--text", "x"]) == 1
    assert "results/deep holds no run" in capsys.readouterr().err


def test_runs_are_found_by_settings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed("--search", "grpo.seed=2", "--search", "policy.optimizer.kwargs.lr=0.001", capsys=capsys)["runs"]
    assert [row["folder"] for row in rows] == ["results/deep/b"]
    assert main(["runs", "--search", "grpo.sed=2"]) == 2
    assert "--search: grpo.sed: no run has this key; did you mean 'grpo.seed'?" in capsys.readouterr().err


def test_differences_say_which_runs_have_which_value(capsys: pytest.CaptureFixture[str]) -> None:
    differences = listed("--differences", capsys=capsys)["differences"]
    assert differences == {
        "policy.optimizer.kwargs.lr": {"0.001": ["results/a", "results/deep/b"], "0.0005": ["results/c"]},
        "grpo.seed": {"1": ["results/a"], "2": ["results/deep/b", "results/c"]},
    }
    assert main(["runs", "--differences"]) == 0
    out = capsys.readouterr().out
    assert "\npolicy.optimizer.kwargs.lr\n  0.001   results/a, results/deep/b\n  0.0005  results/c\n" in out


def test_the_best_score_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed("--sort", "score", capsys=capsys)["runs"]
    assert [row["folder"] for row in rows] == ["results/c", "results/deep/b", "results/a"]


def test_a_run_that_cannot_be_read_is_a_line_and_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    Path("results/a/journal.sqlite").write_bytes(b"no journal")
    Path("results/c", NOTES_NAME).write_text("{")
    assert main(["runs", "results"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^results/a: .*journal\.sqlite", out, re.MULTILINE)
    assert re.search(r"^results/c: results/c/notes\.json cannot be read", out, re.MULTILINE)
    assert re.search(r"^results/deep/b +ended", out, re.MULTILINE)


def test_a_folder_without_runs_and_none_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["runs", "empty"]) == 0
    assert capsys.readouterr().out == "no run below empty\n"
    assert main(["runs", "result"]) == 1
    assert "there is no folder result; did you mean" in capsys.readouterr().err


def test_values_that_are_no_number_are_left_out_of_curves() -> None:
    with read_journal(Path("results/a")) as journal:
        assert curve_of(journal, "loss") == [(1, -1.0), (3, -3.0), (4, -4.0), (5, -5.0), (6, -6.0)]


def test_the_commands_of_the_page_are_carried_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep is only parsed: `tests/integration/runs/test_sweep.py` runs one."""
    make_run("results/arithmetic", 2, settings(1e-3, 42, "arithmetic"), run_id="learned").close()
    commands = [words for words, _ in quoted((ROOT / "docs" / "runs.md").read_text())]
    assert [words[1] for words in commands] == ["runs", "note", "runs", "runs", "runs", "sweep"]
    for words in commands[:-1]:
        assert main(words[1:]) == 0
        assert "results/arithmetic" in capsys.readouterr().out
    settings_of_sweep = parse_sweep(cli._parse(commands[-1][1:]).overrides)
    assert (settings_of_sweep.num_runs, settings_of_sweep.fixed) == (6, ())
