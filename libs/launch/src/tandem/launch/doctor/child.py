"""Execution of steps in another process, which is given up when it dies or hangs."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tandem.launch.doctor.findings import DoctorFinding, StepOutcome
from tandem.launch.doctor.steps import DoctorStep, OutputLine

_GONE_S = 5.0
"""Longest wait for a killed process: one that hangs in a driver cannot be killed."""
_CHUNK = 1 << 16


def carry_out_apart(
    steps: Mapping[str, DoctorStep], num_threads: int, deadline_s: float, program: Sequence[str]
) -> Iterator[StepOutcome]:
    """Yield the outcome of each step as it arrives from a process that runs `program`.

    A step fails if its process dies, or if it takes longer than `deadline_s`. A new process then carries out the
    others, but for those that need the step that has failed.
    """
    steps_left = list(steps)
    while steps_left:
        reason = "it did not begin"
        with _Child(program, num_threads, steps_left) as child:
            while steps_left:
                line = child.read(deadline_s)
                if line is None:
                    reason = child.explain_end(deadline_s)
                    break
                if line.outcome is not None:
                    yield line.outcome
                    steps_left.remove(line.step)
        if not steps_left:
            return
        failed = steps_left.pop(0)
        yield StepOutcome((DoctorFinding(steps[failed].finding, "missing", reason),))
        for name in [name for name in steps_left if failed in steps[name].needs]:
            yield StepOutcome((DoctorFinding(steps[name].finding, "skipped", f"{steps[failed].finding} has failed"),))
            steps_left.remove(name)


class _Child:
    """A process that carries out steps; leaving the context kills it and its children."""

    def __init__(self, program: Sequence[str], num_threads: int, names: Sequence[str]) -> None:
        self._said, theirs = os.pipe()
        os.set_blocking(self._said, False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is left
        self._rest = b""
        self._is_late = False
        try:
            self._process = subprocess.Popen(
                [*program, str(theirs), str(num_threads), *names],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            )
        finally:
            os.close(theirs)

    def read(self, deadline_s: float) -> OutputLine | None:
        """Return the next line; None if the process has ended, or sends nothing for `deadline_s`."""
        until = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._said, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    self._is_late = True
                    return None
                data = os.read(self._said, _CHUNK)
                if not data:
                    return None
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=OutputLine)

    def explain_end(self, deadline_s: float) -> str:
        """Return the reason for which no further line came."""
        if self._is_late:
            return f"hangs: no answer for {deadline_s:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        text = os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")
        last = (text.strip().splitlines() or ["it said nothing"])[-1]
        return f"ended its process (exit code {self._process.returncode}): {last[:300]}"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        os.close(self._said)
        self._output.close()
