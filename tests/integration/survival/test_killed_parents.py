"""Any processes of a run are killed at one instant; what is left ends, and the run can be resumed."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import leaks
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import HOLDS, Command, all_gone, coordinator, kill_at_once, wait_until, write_config

DAEMONIC = (
    HOLDS
    + """
import subprocess
from tandem.rollout.environments import Score

def note(pid):
    with Path("pids").open("a") as file:
        file.write(f"{pid}\\n")

def start_one():
    '''Start a program of its own session, as daemons are; its parent ends at once.'''
    words, null = ["/bin/sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], subprocess.DEVNULL
    note(int(subprocess.run(words, stdin=null, capture_output=True, start_new_session=True, check=True).stdout))

def fork_one():
    '''The same without a program.'''
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 100)
            note(os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()

start_one()

class Daemonic:
    '''Scores digits; each instance starts two daemons.'''

    def __init__(self):
        start_one()
        fork_one()

    def score(self, problem, response):
        wait_while_held()
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
)
RUN: dict[str, Any] = {
    "grpo": {"max_num_steps": 12, "val_period": 0},
    "checkpointing": {"metric_name": "reward", "save_period": 2},
    "env": {"daemonic": {"class": "daemonic.Daemonic", "num_workers": 2, "timeout_s": 300.0}},
    "cluster": {"rollouts": 2, "max_replacements": 9},
}
SEED = datetime.date.today().toordinal()
"""Other processes every day."""
NUM_DAEMONS = 1 + 2 * (1 + 2 * 2)
"""Of the check before the run, and of each engine's import and workers."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "daemonic.py").write_text(DAEMONIC)
    return undisturbed_run(folder, RUN)


def daemons() -> list[int]:
    """Return the ids of the daemons that the run in the working directory has started."""
    return [int(word) for word in Path("pids").read_text().split()] if Path("pids").exists() else []


@pytest.mark.parametrize("part", [1.0, 0.7, 0.5, 0.3])
def test_parents_that_are_killed_at_one_instant_leave_nothing_and_the_run_is_resumed(
    part: float, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor and the coordinator are, and of all others that have children this part, by a seed of the day."""
    monkeypatch.delenv("SPT_NOENV", raising=False)  # which tests have set, and users have not
    Path("daemonic.py").write_text(DAEMONIC)
    before, config, dice = leaks.segments(), write_config(RUN), random.Random(SEED)
    hold(at=49)
    with Command("coordinator", "up", config, "--supervise") as run:
        await_hold(run, "step 3/12")
        wait_until(lambda: len(daemons()) >= NUM_DAEMONS, lambda: f"{NUM_DAEMONS} daemons")
        supervisor = psutil.Process(run.process.pid)
        children = {process: process.children() for process in run.children()}
        (coordinator_,) = (each for each in children if "tandem.coordinator.cli" in " ".join(each.cmdline()))
        others = [process for process, below in children.items() if below and process != coordinator_]
        others = [process for process in others if process.pid not in daemons()]
        victims = [supervisor, coordinator_, *dice.sample(others, round(part * len(others)))]
        titles = [" ".join(victim.cmdline())[:40] for victim in victims]
        kill_at_once(victims)
        left = all_gone([*children, *map(psutil.Process, filter(psutil.pid_exists, daemons()))], leaks.SETTLE_S)
        assert left == [], (SEED, titles)
        run.wait()
    go_on()
    assert leaks.segments_left(before) == set()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_results("run", undisturbed)
