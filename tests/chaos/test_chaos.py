"""Processes of supervised runs are killed, or stopped, at random moments; nobody does anything about it.

What the run reads is edited or deleted meanwhile, and disks fill up until somebody frees them.

Every run ends by itself with the metrics and the weights of one that was left alone, to the bit, and leaves nothing. Of
asynchronous ones, which no other is equal to, every step is there once, with samples as old as they may be.
One engine of each was started by hand, by a loop that starts another whenever one ends. What is stopped is mostly
continued later, when others have long taken its place, and ends then. Kinds of processes are struck in turns, in an
order that is thrown for: each is as often as any other.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tandem.observe.run_folder.live import read_live
from tests.harness import leaks
from tests.harness.ports import free_port
from tests.harness.runs.agent_run_harness import AGENT
from tests.harness.runs.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.harness.runs.harms import PROMPT, SmallDisk, edit_an_input, small_disk
from tests.harness.runs.running import Command, all_gone, joins, merged, steps_of, wait_until, write_config

NUM_STEPS = 16
KILLS_OF_A_RUN = 8
TIMEOUT_S = 8.0
"""Of heartbeats."""
JOIN_S = 120.0
"""A machine with much else to do takes more than half of it to import what services need."""
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 6},
    "policy": {"train_micro_batch_size": 4},
    "data": {"prompt_file": "prompt.txt"},
    "checkpointing": {"save_period": 3},
    "logger": {"page": "auto"},
    "cluster": {
        "trainers": 2,
        "rollouts": 2,
        "max_replacements": 100,
        "heartbeat_timeout_s": TIMEOUT_S,
        "deadlines": {"refit_s": 15.0, "join_s": JOIN_S},
    },
}
BY_HAND = "rollout by hand"
LEAVES = f"{BY_HAND}, told to leave"
SUPERVISOR, EDITS, DISK, SEVERAL = "supervisor", "files that the run reads", "disk", "several at once"
"""The supervisor is only stopped, and continued; a file is edited or deleted; the disk is full for a while; any number
of the run's processes are killed at one instant."""
SERVICES = ("coordinator", "trainer", "rollout", BY_HAND, "refit")
OF_ENGINES = {
    "fork server of environments": "rollout: forks reward workers",
    "reward worker": "rollout: scores with ",
    "what starts agents": "rollout: starts agents",
    "agent": "python agent.py",
}
"""Helpers of engines, and what their titles begin with; the guardian of a process has its title, or its parent's."""
OF_COORDINATOR = {"fork server": "coordinator: forks services", "page": "page "}
HELPERS = OF_COORDINATOR | OF_ENGINES
KINDS = (*SERVICES, *OF_COORDINATOR, "fork server of environments", "reward worker", SUPERVISOR, EDITS, SEVERAL)
MAX_AGE = 2
ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": MAX_AGE}},
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {"generation": {"colocated": {"enabled": False}}},
    "cluster": {"deadlines": {"leave_s": 10.0}},
}
PLAYED: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 2},
    "policy": {"train_global_batch_size": 8},
    "data": {"environment": "agent"},
    "env": {"agent": {"command": ["python", "agent.py"], "timeout_s": 120}},
}
"""Episodes of agents; each starts a program."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that are alike, and what of them is killed."""

    changes: dict[str, Any]
    kinds: tuple[str, ...]
    is_repeatable: bool = True
    """Whether another run equals it to the bit."""
    has_small_disk: bool = False
    """Whether the run's folder is on a disk that can be filled."""


MATRICES = {
    "synchronous": Matrix(changes={}, kinds=KINDS),
    "asynchronous": Matrix(changes=ASYNCHRONOUS, kinds=(*KINDS, LEAVES), is_repeatable=False),
    "agents": Matrix(
        changes=PLAYED, kinds=(*SERVICES, *OF_COORDINATOR, "what starts agents", "agent", SUPERVISOR, EDITS, SEVERAL)
    ),
    "disks": Matrix(changes={}, kinds=(*SERVICES, DISK, EDITS, DISK, SUPERVISOR, DISK), has_small_disk=True),
}
NEVER_STOPPED, NEVER_KILLED = (LEAVES, EDITS, DISK, SEVERAL), (SUPERVISOR, EDITS, DISK)
STOPS = 0.3
"""The share of those that are stopped, and only hang."""
STAYS = 0.3
"""Of these the share of those that are never continued."""
APPEARS_S = 3.0
"""How long to look for a process of a kind: it may just be being replaced, or do its work in a moment."""
FULL_S = 20.0
"""Longest time that a disk is full."""
ENDS_S = 60.0
"""How long all that is left of a run may take to end."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One process that was killed."""

    kind: str
    is_stopped: bool
    phase: str
    """Of the run, as the coordinator had last said."""
    seconds: float
    """Until another step was in the journal."""

    def __str__(self) -> str:
        what = {LEAVES: "", EDITS: "edited", DISK: "full"}.get(self.kind, "killed")
        return f"{self.kind} {'stopped' if self.is_stopped else what} while {self.phase}, {self.seconds:.1f} s"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run."""

    kills: list[Kill]
    survived: bool = False
    equal: bool = False
    """To a run that was left alone; if it is asynchronous, it has done every step once."""
    num_left: int = 0
    """Processes, segments of shared memory."""
    why: str = ""
    """Something was not as it should."""


class Harried:
    """A supervised run, an engine by hand, and what is stopped."""

    def __init__(self, run: Command, address: str, stack: contextlib.ExitStack, disk: SmallDisk | None) -> None:
        self.run = run
        self._disk = disk
        self._words = ("rollout", *joins(address), "--join-timeout", "120")
        self._stack = stack
        self._by_hand: list[Command] = []
        self._wakes: list[tuple[float, Callable[[], None]]] = []
        """When processes that are stopped go on, and disks are freed."""
        self._stopped: set[int] = set()
        """The ids of engines by hand that hang."""

    def tend(self) -> None:
        """Start the engine by hand again if it has ended, or hangs; continue what was stopped long enough ago."""
        for wake in [*self._wakes]:
            if time.monotonic() >= wake[0]:
                self._wakes.remove(wake)
                with contextlib.suppress(psutil.NoSuchProcess):
                    wake[1]()
        there = [
            each for each in self._by_hand if each.process.poll() is None and each.process.pid not in self._stopped
        ]
        if not there and self.run.process.poll() is None:
            self._by_hand.append(self._stack.enter_context(Command(*self._words)))

    def victims(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind."""
        if kind in (BY_HAND, LEAVES):
            return self._engines()
        if kind in (SUPERVISOR, EDITS, DISK, SEVERAL):
            return [psutil.Process(self.run.process.pid)]
        processes = children_of(self.run)
        if kind in OF_ENGINES:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [child for engine in self._engines() for child in engine.children(recursive=True)]
        return [process for process in processes if _kind_of(process) == kind]

    def _engines(self) -> list[psutil.Process]:
        """Return the engine by hand, unless it hangs."""
        there = [each.process.pid for each in self._by_hand if _is_there(each)]
        return [psutil.Process(pid) for pid in there if pid not in self._stopped]

    def strike(self, kind: str, victim: psutil.Process, wakes_in_s: float | None, dice: random.Random) -> None:
        """Kill a process; or stop it, for so long; or tell it to leave; or harm the files of the run."""
        if kind == LEAVES:
            victim.terminate()
            return
        if kind == EDITS:
            edit_an_input(dice)
            return
        if kind == DISK:
            assert self._disk is not None, "see `Matrix.has_small_disk`"
            self._disk.fill()
            self._wakes.append((time.monotonic() + dice.uniform(0.5, FULL_S), self._disk.free))
            return
        if kind == SEVERAL:
            kill_at_once(children_of(self.run), dice)
            return
        if wakes_in_s is None:
            victim.kill()
            return
        victim.suspend()
        self._wakes.append((time.monotonic() + wakes_in_s, victim.resume))
        if kind == BY_HAND:
            self._stopped.add(victim.pid)

    def wait(self, condition: Callable[[], bool], timeout_s: float = 4 * JOIN_S) -> None:
        """Wait for a condition, and tend meanwhile."""

        def is_met() -> bool:
            self.tend()
            return condition()

        wait_until(is_met, self.run.output, died=lambda: self.run.process.poll() is not None, timeout_s=timeout_s)

    def end_of_all(self) -> list[psutil.Process]:
        """Continue whoever is stopped, and wait for the end of all that is left; return those that have none."""
        for _, wake in self._wakes:
            with contextlib.suppress(psutil.NoSuchProcess):
                wake()
        self._wakes.clear()
        for each in self._by_hand:  # those that wait for a run that is over
            if _is_there(each) and " joined " not in each.output():
                each.process.kill()
        deadline = time.monotonic() + ENDS_S
        while any(map(_is_there, self._by_hand)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [psutil.Process(each.process.pid) for each in self._by_hand if _is_there(each)]

    @property
    def num_steps(self) -> int:
        """Steps that were done, those that were done again included."""
        return len(self._done())

    @property
    def is_over(self) -> bool:
        """Whether the last step is done."""
        return self.run.process.poll() is not None or NUM_STEPS in self._done()

    def _done(self) -> list[int]:
        """Return the steps that were said to be done; of one that takes long it is also said what it waits for."""
        return [int(step) for step in re.findall(r"^step +(\d+)/\d+  ", self.run.output(), re.MULTILINE)]


def _kind_of(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
    if "tandem.coordinator.cli up" in words:
        return "coordinator"
    helpers = [kind for kind, title in HELPERS.items() if words.startswith(title)]
    return helpers[0] if helpers else words.partition(" ")[0]


def children_of(run: Command) -> list[psutil.Process]:
    """Return the processes of a run; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return run.children()
    return []


def kill_at_once(processes: list[psutil.Process], dice: random.Random) -> None:
    """Kill some processes, each of which is stopped first: none sees the end of another before its own."""
    victims = dice.sample(processes, dice.randint(min(2, len(processes)), len(processes)))
    for do in (psutil.Process.suspend, psutil.Process.kill):
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                do(victim)


def _is_there(command: Command) -> bool:
    return command.process.poll() is None


@contextlib.contextmanager
def started(matrix: Matrix) -> Iterator[Harried]:
    """Start a run, and its engine by hand."""
    write_inputs()
    cluster = {"address": f"tcp://127.0.0.1:{free_port()}"}
    launch = {"trainers": 2, "rollouts": 1, "refit": True}
    config = write_config(merged(merged(CONFIG, matrix.changes), {"cluster": {**cluster, "launch": launch}}))
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(Path("run"))) if matrix.has_small_disk else None
        run = stack.enter_context(Command("coordinator", "up", config, "--supervise"))
        run.wait_for("listens on ")
        yield Harried(run, cluster["address"], stack, disk)


def write_inputs() -> None:
    """Write what a run reads besides its configuration, data and environment."""
    Path("agent.py").write_text(AGENT)
    Path("prompt.txt").write_text(PROMPT)


class Turns:
    """Says which kind is next: all of them, in an order that is thrown for, before any is again."""

    def __init__(self, dice: random.Random, kinds: tuple[str, ...]) -> None:
        self._dice = dice
        self._kinds = kinds
        self._left: list[str] = []

    def next(self) -> str:
        """Return a kind."""
        if not self._left:
            self._left = self._dice.sample(self._kinds, len(self._kinds))
        return self._left.pop()

    def put_back(self, kind: str) -> None:
        """Have a kind again, after one other, since there was no process of it."""
        self._left.insert(max(0, len(self._left) - 1), kind)


def harry(harried: Harried, dice: random.Random, turns: Turns, num_kills: int, kills: list[Kill]) -> None:
    """Kill processes of a run, each some time after a step was done."""
    while len(kills) < num_kills:
        done = harried.num_steps
        harried.wait(lambda seen=done: harried.num_steps > seen or harried.is_over)
        time.sleep(dice.uniform(0.0, 0.5))
        kind, is_stopped, stays = turns.next(), dice.random() < STOPS, dice.random() < STAYS
        is_stopped = kind not in NEVER_STOPPED and (is_stopped or kind in NEVER_KILLED)
        wakes_in_s = dice.uniform(0.5, 3 * TIMEOUT_S)
        of_kind = victims_soon(harried, kind)
        if not of_kind:
            turns.put_back(kind)
        if harried.is_over:
            return
        if not of_kind:
            continue
        live = read_live(Path("run"))
        done, began = harried.num_steps, time.monotonic()
        if stays and kind != SUPERVISOR:  # whose end the test waits for
            wakes_in_s = 1000.0
        try:
            harried.strike(kind, dice.choice(of_kind), wakes_in_s if is_stopped else None, dice)
        except psutil.NoSuchProcess:  # it has just ended by itself
            continue
        harried.wait(lambda seen=done: harried.num_steps > seen or harried.is_over)
        phase = live.phase if live is not None else "starting"
        kills.append(Kill(kind=kind, is_stopped=is_stopped, phase=phase, seconds=time.monotonic() - began))


def victims_soon(harried: Harried, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind, as soon as there are some."""
    until = time.monotonic() + APPEARS_S
    while not (found := harried.victims(kind)) and time.monotonic() < until and not harried.is_over:
        harried.tend()
        time.sleep(0.02)
    return found


def assert_asynchronous_results(run: str | Path) -> None:
    """Check that every step was done, and counts once, with samples that are not too old."""
    steps = steps_of(run)
    assert [step.step for step in steps if step.step] == list(range(1, NUM_STEPS + 1))
    for step in steps:
        assert step.metrics.get("max_trajectory_age", 0) <= MAX_AGE, step
        assert all(map(math.isfinite, step.metrics.values())), step


def harried_run(dice: random.Random, turns: Turns, matrix: Matrix, num_kills: int, expected: Path | None) -> Ended:
    """Carry out a run and kill processes of it; return what became of it. It is asynchronous if nothing is expected."""
    before, kills = leaks.segments(), list[Kill]()
    survived = equal = False
    left: set[Any] = set()
    try:
        with started(matrix) as harried:
            harry(harried, dice, turns, num_kills, kills)
            children = children_of(harried.run)
            harried.wait(lambda: harried.run.process.poll() is not None)
            assert harried.run.wait() == 0, harried.run.output()
            survived = True
            left |= {*all_gone(children, ENDS_S), *harried.end_of_all()}
            if expected is None:
                assert_asynchronous_results("run")
            else:
                assert_same_results("run", expected)
            equal = True
        why = ""
    except AssertionError as error:
        why = str(error)
    left |= leaks.segments_left(before)
    return Ended(kills=kills, survived=survived, equal=equal, num_left=len(left), why=why or f"{left or ''}")


def table(runs: list[Ended]) -> str:
    """Return what became of processes and of their runs, by kind and by phase."""
    columns = ("times", "runs went on", "equal", "leaks", "seconds to the next step: median", "most")
    rows = [f"| killed | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    groups: dict[str, list[tuple[Kill, Ended]]] = defaultdict(list)
    for run in runs:
        for kill in run.kills:
            groups[f"{kill.kind}{', stopped' if kill.is_stopped else ''}"].append((kill, run))
            groups[f"while {kill.phase}"].append((kill, run))
    for name, found in sorted(groups.items()):
        seconds = [kill.seconds for kill, _ in found]
        of_runs = [sum(run.survived for _, run in found), sum(run.equal for _, run in found)]
        counts = [len(found), *of_runs, sum(run.num_left for _, run in found)]
        times = (statistics.median(seconds), max(seconds))
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {times[0]:.1f} | {times[1]:.1f} |")
    return "\n".join(rows)


def report(runs: list[Ended], seed: int) -> str:
    num_kills, survived, equal = (
        sum(len(run.kills) for run in runs),
        *(sum(getattr(run, name) for run in runs) for name in ("survived", "equal")),
    )
    left = sum(run.num_left for run in runs)
    what = f"{num_kills} kills in {len(runs)} runs, seed {seed}: {survived} went on to their end, {equal} of them equal"
    bad = [f"run {place}: {'; '.join(map(str, run.kills))}\n{run.why}" for place, run in enumerate(runs, 1) if run.why]
    return "\n\n".join([f"{what}; {left} processes and segments were left", table(runs), *bad]) + "\n"


@pytest.mark.parametrize("name", MATRICES)
def test_nothing_dies_for_good(name: str, tmp_path: Path, chaos: tuple[int, int, Path | None]) -> None:
    num_kills, seed, file = chaos
    matrix, dice = MATRICES[name], random.Random(seed)
    turns = Turns(dice, matrix.kinds)
    with in_folder(tmp_path):
        write_inputs()
    expected = undisturbed_run(tmp_path, merged(CONFIG, matrix.changes)) if matrix.is_repeatable else None
    runs: list[Ended] = []
    while (num_left := num_kills - sum(len(run.kills) for run in runs)) > 0:
        folder = tmp_path / f"run_{len(runs) + 1}"
        folder.mkdir()
        with in_folder(folder):
            runs.append(harried_run(dice, turns, matrix, min(KILLS_OF_A_RUN, num_left), expected))
        if file is not None:  # also of a test that is ended before its time
            file.with_stem(f"{file.stem}-{name}").write_text(report(runs, seed))
    told = report(runs, seed)
    print(told)
    assert not any(run.why for run in runs), told
    if num_kills > 2 * len(matrix.kinds):
        assert {kill.kind for run in runs for kill in run.kills} == {*matrix.kinds}, told
