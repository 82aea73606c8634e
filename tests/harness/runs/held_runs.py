"""Runs that wait on a word: their environment scores nothing while a folder is there."""

from __future__ import annotations

import time
from pathlib import Path

from tandem.observe.run_folder.live import LiveEngine, read_live
from tests.harness.runs.running import HOLDS, Command, wait_until

HELD = f"""{HOLDS}
from tandem.rollout.environments import Score

class Held:
    '''Digits are worth something. The folder `seen` keeps which engines have scored at all.'''

    runs_in = "threads"

    def score(self, problem, response):
        Path("seen").mkdir(exist_ok=True)
        Path("seen", str(os.getpid())).touch()
        wait_while_held()
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
ENVIRONMENT = {"env": {"held": {"class": "held.Held", "timeout_s": 600.0}}}


def hold(at: int | None = None) -> None:
    """Have everything wait that is generated from now on, or from the score of this number on, which is counted from 1.

    A test that does something to a run at a step says beforehand where it waits, a score or more after that step: it
    may be stalled for longer than the run needs to its end. Those of validations count, too.
    """
    if at is None:
        Path("hold").mkdir()
    else:
        Path("holds", str(at)).mkdir(parents=True)


def await_hold(run: Command, pattern: str) -> None:
    """Wait until a run has said what matches, and waits, as it was told beforehand."""
    run.wait_for(pattern)
    wait_until(Path("hold").exists, lambda: f"it to wait:\n{run.output()}", died=lambda: run.process.poll() is not None)


def go_on() -> None:
    """Have it go on."""
    Path("hold").rename(f"held-{time.monotonic_ns()}")


def engines() -> dict[str, LiveEngine]:
    """Return the engines of the run, by name."""
    live = read_live(Path("run"))
    return {} if live is None else {engine.name: engine for engine in live.engines}


def version_of(*names: str) -> int:
    """Return the version that the first of these engines that is shown holds; -1 while none is."""
    shown = engines()
    return next((shown[name].version for name in names if name in shown), -1)
