"""A rollout process that kills others at a moment that a test names: a module that tests start.

A file ``kill_POINT_NUMBER`` in the working directory holds the name of a kind of process and its place among those of
its kind, such as ``trainer 1``, or ``pid`` and that of a process, and the signal. The process goes once the rollout
comes to that point for the first time: ``generate`` a step, ``give`` samples of a step to trainers, ``refit`` to a
version, ``verify`` a version, ``record`` a step, which is when its checkpoint is written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil


def kill_file(point: str, number: int) -> Path:
    """Return the file that says who is killed at a point."""
    return Path(f"kill_{point}_{number}")


def processes_at(address: str, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind of the run whose coordinator listens there, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"{kind} --coordinator {address}"):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def _strike(address: str, point: str, number: int) -> None:
    file, taken = kill_file(point, number), Path(f"killed_{point}_{number}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        file.rename(taken)  # one rollout alone gets it
        kind, place, name = taken.read_text().split()
        victim = psutil.Process(int(place)) if kind == "pid" else processes_at(address, kind)[int(place)]
        victim.send_signal(signal.Signals[name])


def main(arguments: Sequence[str]) -> int:
    """Run the rollout service."""
    from tandem.rollout import cli
    from tandem.rollout.engines.transformers import TransformersEngine
    from tandem.rollout.generating import RunningGenerations
    from tandem.rollout.sample_recorder import SampleRecorder
    from tandem.samples.sample_store import SampleStore

    address = arguments[arguments.index("--coordinator") + 1]
    start, find, apply = RunningGenerations.start, SampleStore._find_samples, TransformersEngine.apply
    digest, record = TransformersEngine.digest_task, SampleRecorder._record
    steps: dict[int, int] = {}

    def starting(self: Any, command: Any) -> None:
        start(self, command)
        steps[command.command_id] = command.step
        if command.purpose == "train":
            _strike(address, "generate", command.step)

    def finding(self: Any, request: Any) -> Any:
        for command_id, *_ in request.keys[:1]:
            _strike(address, "give", steps.get(command_id, 0))
        return find(self, request)

    def applying(self: Any, version: int, *args: Any) -> Any:
        _strike(address, "refit", version)
        return apply(self, version, *args)

    def digesting(self: Any, *args: Any) -> Any:
        _strike(address, "verify", self.version)
        return digest(self, *args)

    def recording(self: Any, command: Any) -> None:
        _strike(address, "record", command.step)
        record(self, command)

    SampleRecorder._record = recording  # type: ignore[method-assign]
    RunningGenerations.start, SampleStore._find_samples = starting, finding  # type: ignore[method-assign]
    TransformersEngine.apply, TransformersEngine.digest_task = applying, digesting  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
