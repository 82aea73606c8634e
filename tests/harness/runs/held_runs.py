"""Runs that wait on a word: their environment scores nothing while a folder is there."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Protocol

from tandem.observe.run_folder.live import LiveEngine, read_live
from tests.harness.runs.running import HOLDS, Command, wait_until

HELD = f"""{HOLDS}
from tandem.rollout.environments import Score

class Held:
    '''Digits are worth something.'''

    runs_in = "threads"

    def score(self, problem, response):
        wait_while_held()
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
ENVIRONMENT = {"env": {"held": {"class": "held.Held", "timeout_s": 600.0}}}


class Engine(Protocol):
    """The process of one."""

    @property
    def pid(self) -> int: ...


def hold(at: int | None = None, folder: Path = Path()) -> None:
    """Have everything wait that is scored from now on, or from the score of this number on, which is counted from 1.

    A test that does something to a run at a step says beforehand where it waits, a score or more after that step: it
    may be stalled for longer than the run needs to its end. Those of validations count, too.
    """
    place = "hold" if at is None else f"holds/{at}"
    (folder / place).mkdir(parents=True)


def await_hold(run: Command, pattern: str) -> re.Match[str]:
    """Wait until a run has said what matches, and waits, as it was told beforehand; return what it has said."""
    said = run.wait_for(pattern)
    wait_until(Path("hold").exists, lambda: f"it to wait:\n{run.output()}", died=lambda: run.process.poll() is not None)
    return said


def go_on() -> None:
    """Have it go on."""
    Path("hold").rename(f"held-{time.monotonic_ns()}")


def is_held(engine: Engine) -> bool:
    """Tell whether an engine that scores in its threads has a sample that waits, so that its group cannot be done."""
    return Path("hold", str(engine.pid)).exists()


def go_on_until_held(engine: Engine) -> None:
    """Have a run go on until an engine that scores in its threads has something to score, and all waits again."""
    cause = Path("holds", f"of_{engine.pid}")
    cause.mkdir(parents=True)
    if Path("hold").exists():
        go_on()
    wait_until(lambda: is_held(engine), lambda: f"{engine.pid} to score: {engines()}")
    with contextlib.suppress(FileNotFoundError):
        cause.rmdir()  # where something else was the cause


def go_on_until(run: Command, pattern: str, engine: Engine) -> None:
    """Have a run go on until it has said what matches, and all waits with something that an engine has to score."""

    def is_said() -> bool:
        return re.search(pattern, run.output()) is not None

    while not is_said():
        go_on_until_held(engine)
        with contextlib.suppress(AssertionError):  # it could not be said while the others wait
            wait_until(is_said, run.output, died=lambda: run.process.poll() is not None, timeout_s=3.0)


def engines() -> dict[str, LiveEngine]:
    """Return the engines of the run, by name."""
    live = read_live(Path("run"))
    return {} if live is None else {engine.name: engine for engine in live.engines}


def version_of(*names: str) -> int:
    """Return the version that the first of these engines that is shown holds; -1 while none is."""
    shown = engines()
    return next((shown[name].version for name in names if name in shown), -1)
