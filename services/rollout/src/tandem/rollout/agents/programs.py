"""The programs of agents as the rollout process sees them: started, fed, listened to, ended.

All of it runs in the event loop of `tandem.rollout.agents.agents`. It waits for a program's output and for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import msgspec

from tandem.common import kept_inputs
from tandem.common.errors import HelperLost, RewardError
from tandem.rollout.agents.launcher import AgentProgram
from tandem.rollout.environments.printing import bounded
from tandem.rollout.environments.processes.guarded import GuardedProcess, describe_exit

_MOST_STARTS = 3
"""Launchers in a row that may die before starting programs is given up."""
_KEPT = 20_000
"""Bytes kept of each of a program's streams: the last ones."""


class ProgramChanged(RewardError):
    """An agent's program that differs from the one that the run began with."""


class ProgramLauncher:
    """The process that starts programs."""

    def __init__(self) -> None:
        self._process = GuardedProcess(f"{__package__}.launcher")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], streams: tuple[int, int, int]
    ) -> socket.socket:
        """Start a program with these standard streams; return its lifeline.

        A launcher that has died is replaced first. Raises `HelperLost` if each replacement dies, `ProgramChanged` if
        the program has changed since the run began.
        """
        if line := kept_inputs.find_changed_program(command):
            raise ProgramChanged(
                f"the agent's program has changed since the run began: {line}: put it back, or continue with what it "
                "is now by --resume"
            )
        lifeline, far = socket.socketpair()
        with far, memory_file(msgspec.msgpack.encode(AgentProgram(tuple(command), dict(environment)))) as order:
            descriptors = [far.fileno(), *streams, order]
            for _ in range(_MOST_STARTS):
                try:
                    socket.send_fds(self._process.commands, [b"."], descriptors)
                    return lifeline
                except ConnectionError:
                    ending = self._process.ask_for_ending()
                    self._start_again(f"has ended ({ending})")
        lifeline.close()
        raise HelperLost(f"the process that starts agents has ended {_MOST_STARTS} times in a row: {ending}")

    def is_any_stopped(self) -> bool:
        """Tell whether the launcher, or a process below it, is stopped by a signal."""
        return self._process.is_stopped()

    def replace_stopped(self) -> None:
        """Start another launcher if this one is stopped by a signal; all programs end with it."""
        if self._process.child_is_stopped():
            self._start_again("was stopped from outside")

    def _start_again(self, ending: str) -> None:
        print(f"the process that starts agents {ending}; starting another", flush=True)
        self._process.close()
        self._process = GuardedProcess(f"{__package__}.launcher")

    def close(self) -> None:
        """End the launcher and all programs."""
        self._process.close()


class memory_file(contextlib.AbstractContextManager[int]):
    """A descriptor of an unnamed file in memory, to be read from its beginning."""

    def __init__(self, content: bytes) -> None:
        self._descriptor = os.memfd_create("tandem")
        os.pwrite(self._descriptor, content, 0)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)


class ProgramExit(msgspec.Struct, frozen=True):
    """The way in which a program has ended."""

    code: int | None
    """Its exit code, negative for a signal; None if unknown."""
    output: str
    """The end of its standard output."""
    errors: str

    @property
    def ending(self) -> str:
        """The end of the program, in words."""
        return "nobody knows how" if self.code is None else describe_exit(self.code)


async def run(
    launcher: ProgramLauncher, command: Sequence[str], environment: Mapping[str, str], stdin: int, *, logs: bool = False
) -> ProgramExit:
    """Run a program until it and all it has started have ended; cancelling this ends them.

    `logs`: copy its standard error to this process's as it comes, within the bounds for what environments print.
    """
    out, their_out = os.pipe()
    errors, their_errors = os.pipe()
    try:
        lifeline = launcher.start(command, environment, (stdin, their_out, their_errors))
    except BaseException:
        os.close(out)
        os.close(errors)
        raise
    finally:
        os.close(their_out)
        os.close(their_errors)
    lifeline.setblocking(False)
    with lifeline:
        reading = [asyncio.create_task(_last_of(out)), asyncio.create_task(_last_of(errors, logs=logs))]
        try:
            code = await _code(lifeline)
            output, error_output = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    return ProgramExit(code, output, error_output)


async def _code(lifeline: socket.socket) -> int | None:
    """Wait for the end of a program's guardian; return the exit code that the guardian reports."""
    loop, words = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while word := await loop.sock_recv(lifeline, 16):
            words += word
    return int(words) if words else None


async def _last_of(pipe: int, *, logs: bool = False) -> str:
    """Read a pipe to its end; return the last of it."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    file = os.fdopen(pipe, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    tail = b""
    try:
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-_KEPT:]
            if logs:
                with contextlib.suppress(OSError), bounded():  # the disk may be full
                    print(data.decode(errors="replace"), end="", file=sys.stderr, flush=True)
    finally:
        transport.close()
    return tail.decode(errors="replace")
