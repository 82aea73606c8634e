"""A sweep: its runs, its table, and that it continues after Ctrl-C and kill -9 with the runs that have not finished."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tandem.observe.listing import read_run
from tests.harness.runs.running import Command, all_gone, coordinator, steps_of, wait_until, write_config

PATIENT = {"cluster": {"deadlines": {"join_s": 200.0, "build_s": 200.0}}}
"""Each run of a sweep is typed: its processes import, two runs at a time."""
LONG = {"grpo": {"max_num_steps": 5000, "val_period": 2500}, "checkpointing": {"save_period": 5}, **PATIENT}
SWEEP = ["config.yaml", "grpo.seed=1,2", "--jobs", "2"]
FOLDERS = ["run_sweep/seed=1", "run_sweep/seed=2"]


def last_step(folder: str) -> int:
    """Return the newest step of a run, which may not have begun."""
    return read_run(Path(folder)).row.step


def test_a_sweep_that_is_interrupted_and_killed_goes_on_where_it_was() -> None:
    write_config(LONG)
    with Command("coordinator", "sweep", *SWEEP) as sweep:
        sweep.wait_for(r"2/2 seed=2 begins")
        # The second began no earlier than the first had.
        assert Path(FOLDERS[0], "journal.sqlite").exists()
        wait_until(lambda: all(last_step(folder) >= 3 for folder in FOLDERS), lambda: "three steps of both")
        everything = sweep.children()
        sweep.signal(signal.SIGINT)
        assert sweep.wait() == 130
        assert "continue with: coordinator sweep config.yaml grpo.seed=1,2 --jobs=2" in sweep.output()
        assert all_gone(everything, 20.0) == []
        assert len(re.findall(r"^seed=\d: interrupted, step", sweep.output(), re.MULTILINE)) == 2
    reached = [last_step(folder) for folder in FOLDERS]
    assert all(3 <= step < 5000 for step in reached)
    with Command("coordinator", "sweep", *SWEEP) as sweep:
        wait_until(lambda: all(last_step(f) > step for f, step in zip(FOLDERS, reached, strict=True)), lambda: "more")
        assert "1/2 seed=1 goes on" in sweep.output()
        everything = sweep.children()
        sweep.signal(signal.SIGKILL)
        sweep.wait()
        assert all_gone(everything, 20.0) == []
    last = max(map(last_step, FOLDERS)) + 2
    shorter = [*SWEEP, f"grpo.max_num_steps={last}"]
    ended = coordinator("sweep", *shorter)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all([record.step for record in steps_of(folder)] == [*range(1, last + 1)] for folder in FOLDERS)
    head, *rows, curves = ended.stdout.splitlines()[-4:]
    assert head.split() == ["grpo.seed", "state", "steps", "val_reward", "best", "reward", "time", "run"]
    assert [(row.split()[:3], row.split()[-1]) for row in rows] == [
        ([seed, "finished", f"{last}/{last}"], folder) for seed, folder in zip("12", FOLDERS, strict=True)
    ]
    assert curves == "curves: run_sweep/report.html; on the page: coordinator view run_sweep/*/"
    assert Path("run_sweep/report.html").exists()
    again = coordinator("sweep", *shorter, "--json")
    assert again.returncode == 0
    assert "2 runs below run_sweep, of which 2 have finished before\n" in again.stderr
    table = json.loads(again.stdout)
    assert [(row["settings"], row["state"], row["step"]) for row in table] == [
        ({"grpo.seed": seed}, "finished", last) for seed in "12"
    ]
    other = coordinator("sweep", *shorter, "policy.optimizer.kwargs.lr=5e-4")
    assert other.returncode == 2
    assert "run_sweep/seed=1 holds a run that differs in policy.optimizer.kwargs.lr" in other.stderr


def test_a_run_that_fails_fails_alone() -> None:
    write_config(PATIENT)
    Path("broken.py").write_text("class Broken:\n    def score(self, *_):\n        raise OSError\n")
    ended = coordinator("sweep", "config.yaml", "env.digits.class=broken.Broken,digits.Digits", "grpo.max_num_steps=1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"^class=broken\.Broken: failed, .*; exit code 1: error: ", ended.stdout, re.MULTILINE)
    assert re.search(r"^broken\.Broken +failed .*\ndigits\.Digits +finished ", ended.stdout, re.MULTILINE)
