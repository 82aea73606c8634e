"""Environments for tests, found by their paths; processes that only call them need not import what tests do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.messages import Problem
from tandem.rollout.environments import Score, Turn

WAIT_S = 120.0
"""Longest wait of a test, on a machine with much else to do."""
HANG_S = 30.0
"""How long code hangs that a test ends."""
Messages = Sequence[Mapping[str, str]]


class Length:
    """Rewards long responses."""

    def __init__(self, *, per_letter: float = 1.0, cfg: dict[str, Any] | None = None) -> None:
        self.per_letter = per_letter * (cfg or {}).get("factor", 1)

    def score(self, problem: Problem, response: str) -> Score:
        return Score(self.per_letter * len(response), correct=len(response) > 2)


class Returns:
    """Returns the same for every response, whatever it is."""

    def __init__(self, *, reward: Any = None, score: Any = None, components: Any = None) -> None:
        reward = float(reward) if reward else reward
        self.returned = Score(reward, correct=False, components=components or {}) if score is None else score

    def score(self, problem: Problem, response: str) -> Any:
        return self.returned


class Prints:
    """Prints the response a hundred times."""

    def score(self, problem: Problem, response: str) -> Score:
        for _ in range(100):
            print(response)
        return Score(1.0, correct=True)


class PrintsInThreads(Prints):
    """Does so in threads."""

    runs_in = "threads"


class PrintsInCoroutines:
    """Prints the response a hundred times, in turns with others."""

    async def score(self, problem: Problem, response: str) -> Score:
        for _ in range(100):
            print(response)
            await asyncio.sleep(0)
        return Score(1.0, correct=True)


class Raises:
    """Fails."""

    def score(self, problem: Problem, response: str) -> Score:
        raise LookupError("no such letter")


class HoldsOne:
    """Scores; one response to problem 0 not before it may."""

    runs_in = "threads"
    release = threading.Event()
    waits = threading.Lock()

    def score(self, problem: Problem, response: str) -> Score:
        if problem.metadata["number"] == 0 and self.waits.acquire(blocking=False):
            self.release.wait(WAIT_S)
            self.waits.release()
        return Score(1.0, correct=True)


class Hangs:
    """Takes for ever, if the response is what it waits for."""

    runs_in = "threads"
    hangs = threading.Event()
    release = threading.Event()

    def score(self, problem: Problem, response: str) -> Score:
        if response == "hang":
            self.hangs.set()
            self.release.wait(60)
        return Score(float(len(response)), correct=True)


class Counts:
    """Takes its time, and notes how many do so at once."""

    runs_in = "threads"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = 0

    def score(self, problem: Problem, response: str) -> Score:
        with self.lock:
            self.now += 1
        time.sleep(0.05)
        with self.lock:
            most, self.now = self.now, self.now - 1
        return Score(float(most), correct=True)


class NoEnvironment:
    """Has no method to score with."""


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no licence")


def count(conversation: Messages) -> int:
    return sum(message["role"] == "assistant" for message in conversation)


class Talks:
    """Answers with the number of the problem and of the turn; a quarter for each turn, one at the end."""

    def __init__(self, *, turns: int = 2, delay_s: float = 0.0) -> None:
        self.turns = turns
        self.delay_s = delay_s

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        number, turn = problem.metadata["number"], count(conversation)
        assert [message["role"] for message in conversation] == ["assistant", "user"] * (turn - 1) + ["assistant"]
        time.sleep(self.delay_s * (hash(conversation[-1]["content"]) % 5))
        if turn == self.turns:
            return Score(1.0, correct=True)
        return Turn([{"role": "user", "content": f"{number}{turn}"}], reward=0.25)


class Scores:
    """Scores and has nothing to say."""

    def score(self, problem: Problem, response: str) -> Score:
        return Score(float(len(response)), correct=False)


class Fails:
    """Answers once, and then does what it was told to."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def step(self, problem: Problem, conversation: Messages) -> Any:
        if count(conversation) == 1:
            return Turn([{"role": "user", "content": "é" if self.how == "unknown" else "1"}])
        match self.how:
            case "raises":
                raise LookupError("no such room")
            case "hangs":
                time.sleep(HANG_S)
            case "reward":
                return Turn([{"role": "user", "content": "1"}], reward=float("nan"))
            case "nothing":
                return Turn([])
            case "text":
                return Turn("1")  # type: ignore[arg-type]
            case "assistant":
                return Turn([{"role": "assistant", "content": "1"}])
        return None


class Holds:
    """Answers everybody once; the first sample of problem 0 not before it is told to."""

    runs_in = "threads"
    release = threading.Event()

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        if problem.metadata["number"] == 0 and count(conversation) == 1:
            self.release.wait(WAIT_S)
        return Score(1.0, correct=True) if count(conversation) == 2 else Turn([{"role": "user", "content": "1"}])


class Dawdles:
    """Answers twice, each time after a while of its own."""

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        time.sleep(0.004 * (len(conversation[-1]["content"]) % 4))
        return Score(1.0, correct=True) if count(conversation) == 3 else Turn([{"role": "user", "content": "1"}])


class ScoresAtOnce:
    """Scores at once."""

    def score(self, problem: Problem, response: str) -> Score:
        return Score(1.0, correct=True)


class Misbehaves:
    """Does what the response says, and scores everything else by its length."""

    def score(self, problem: Problem, response: str) -> Any:
        match response:
            case "freeze":
                return Score(float(9**9**9 % 7), correct=False)  # holds the interpreter's lock meanwhile
            case "raise":
                raise LookupError("no such\n\ud800letter")
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "group":
                os.killpg(0, signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit("enough")
            case "fork":
                os.fork()  # and forgets that there are two now
            case "write":
                for name in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                            os.write(int(name), b"\xff" * 64)
            case "start":
                start_processes(Path("pids"))
            case "start and sleep":
                start_processes(Path("pids"))
                time.sleep(HANG_S)
            case "pid":
                return Score(float(os.getpid()), correct=True)
        return Score(float(len(response)), correct=True)


class MisbehavesInThreads(Misbehaves):
    """The same, in the rollout process."""

    runs_in = "threads"


class Unmade(Misbehaves):
    """The same; while there is a file of that name, making it does what that says."""

    def __init__(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            match Path("unmade").read_text():
                case "exit":
                    os._exit(5)
                case "raise":
                    raise OSError("no licence")
                case "hang":
                    time.sleep(HANG_S)


class Asks:
    """Waits, together with others."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def score(self, problem: Problem, response: str) -> Score:
        self.now += 1
        self.most = max(self.most, self.now)
        match response:
            case "for ever":
                await asyncio.sleep(HANG_S)
            case "stubborn":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(HANG_S)
            case "block":
                time.sleep(HANG_S)
            case "exit":
                os._exit(3)
            case "raise":
                raise LookupError("nobody answers")
        await asyncio.sleep(0.1)
        self.now -= 1
        return Score(float(self.most), correct=True, components={"length": len(response)})


def start_processes(pids: Path) -> None:
    """Start a child, one in a session of its own, and a daemon; write their ids down."""
    started = [subprocess.Popen(["sleep", "600"]).pid]
    started.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            os.execvp("sleep", ["sleep", "600"])
        os.write(write, str(daemon).encode())
        os._exit(0)
    started.append(int(os.read(read, 32)))
    with pids.open("a") as file:
        file.write("".join(f"{pid}\n" for pid in started))


class HeldUntilTold:
    """Writes the id of its process for each call, and answers once the file ``go`` is there."""

    def score(self, problem: Problem, response: str) -> Score:
        with Path("calls").open("a") as file:
            file.write(f"{os.getpid()}\n")
        deadline = time.monotonic() + WAIT_S
        while not Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return Score(float(len(response)), True)
