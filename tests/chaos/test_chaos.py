"""Processes of supervised runs are killed, or stopped, at random moments; nobody does anything about it.

Every run ends by itself with the metrics and the weights of one that was left alone, to the bit, and leaves nothing.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tandem.coordinator.run.live import read_live
from tests import leaks
from tests.integration.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.integration.harness import Command, all_gone, wait_until, write_config

NUM_STEPS = 24
KILLS_OF_A_RUN = 4
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 6},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": 3},
    "cluster": {
        "trainers": 2,
        "rollouts": 2,
        "max_replacements": 100,
        "deadlines": {"refit_s": 15.0},
    },
}
KINDS = ("coordinator", "trainer", "rollout", "refit", "fork server")
STOPS = 0.15
"""The share of those that are stopped, and only hang. The coordinator is not: nobody would notice."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One process that was killed."""

    kind: str
    is_stopped: bool
    phase: str
    """Of the run, as the coordinator had last said."""
    seconds: float
    """Until another step was in the journal."""


def victims(run: Command) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by what they are."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in run.children():
        try:
            words = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "tandem.coordinator.cli up" in words:
            found["coordinator"].append(process)
        elif words.startswith("coordinator: forks services"):
            found["fork server"].append(process)
        elif words.split(" ")[0] in KINDS:
            found[words.split(" ")[0]].append(process)
    return found


def harry(run: Command, dice: random.Random, num_kills: int) -> list[Kill]:
    """Kill processes of a run, each some time after a step was done."""
    kills: list[Kill] = []
    for _ in range(num_kills):
        done = _num_steps(run)
        wait_until(lambda seen=done: _num_steps(run) > seen, run.output, died=lambda: run.process.poll() is not None)
        time.sleep(dice.uniform(0.0, 0.5))
        if run.process.poll() is not None or f"step {NUM_STEPS}/" in _squeezed(run):
            break
        kind = dice.choice(KINDS)
        is_stopped = kind in ("trainer", "rollout", "refit") and dice.random() < STOPS
        live = read_live(Path("run"))
        of_kind = victims(run)[kind]
        if not of_kind:  # one that was killed before is only just being replaced
            continue
        done, began = _num_steps(run), time.monotonic()
        dice.choice(of_kind).send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
        wait_until(lambda seen=done: _num_steps(run) > seen, run.output, died=lambda: run.process.poll() is not None)
        kills.append(
            Kill(
                kind=kind,
                is_stopped=is_stopped,
                phase=live.phase if live is not None else "starting",
                seconds=time.monotonic() - began,
            )
        )
    return kills


def _squeezed(run: Command) -> str:
    return " ".join(run.output().split())


def _num_steps(run: Command) -> int:
    return sum(line.startswith("step ") for line in run.output().splitlines())


def table(kills: list[Kill]) -> str:
    """Return what became of them, by kind and by phase."""
    rows = ["| killed | times | seconds to the next step: median | most |", "|---|---:|---:|---:|"]
    groups: dict[str, list[float]] = defaultdict(list)
    for kill in kills:
        groups[f"{kill.kind}{', stopped' if kill.is_stopped else ''}"].append(kill.seconds)
        groups[f"while {kill.phase}"].append(kill.seconds)
    for name, seconds in sorted(groups.items()):
        rows.append(f"| {name} | {len(seconds)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(rows)


def test_nothing_dies_for_good(tmp_path: Path, chaos: tuple[int, int, Path | None]) -> None:
    num_kills, seed, report = chaos
    dice = random.Random(seed)
    expected = undisturbed_run(tmp_path, CONFIG)
    kills: list[Kill] = []
    num_runs = 0
    while len(kills) < num_kills:
        num_runs += 1
        folder = tmp_path / f"run_{num_runs}"
        folder.mkdir()
        before = leaks.segments()
        with in_folder(folder), Command("coordinator", "up", write_config(CONFIG), "--supervise") as run:
            kills += harry(run, dice, min(KILLS_OF_A_RUN, num_kills - len(kills)))
            left = run.children()
            assert run.wait() == 0, f"seed {seed}, run {num_runs}, {kills}:\n{run.output()}"
            assert not all_gone(left, 20.0), f"seed {seed}, run {num_runs}"
            assert_same_results("run", expected)
        assert leaks.segments_left(before) == set()
    what = f"{len(kills)} kills in {num_runs} runs, seed {seed}: all ended by themselves, with equal results"
    text = f"{what}\n\n{table(kills)}\n"
    print(text)
    if report is not None:
        report.write_text(text)
