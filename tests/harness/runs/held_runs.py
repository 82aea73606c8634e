"""Runs that wait on a word: their environment scores nothing while a folder is there."""

from __future__ import annotations

import time
from pathlib import Path

from tandem.observe.run_folder.live import LiveEngine, read_live

HELD = """
import contextlib
import os
import time
from pathlib import Path
from tandem.rollout.environments import Score

class Held:
    '''Scores nothing while the folder `hold` is there, and notes in it which engine waits; digits are worth something.

    The folder `seen` keeps which engines have scored at all.
    '''

    runs_in = "threads"

    def score(self, problem, response):
        Path("seen").mkdir(exist_ok=True)
        Path("seen", str(os.getpid())).touch()
        while Path("hold").exists():
            with contextlib.suppress(FileNotFoundError):
                Path("hold", str(os.getpid())).touch()
            time.sleep(0.02)
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
"""The module ``held``, for the working directory of a run."""
ENVIRONMENT = {"env": {"held": {"class": "held.Held", "timeout_s": 600.0}}}


def hold() -> None:
    """Have everything wait that is generated from now on."""
    Path("hold").mkdir()


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
