"""A service of a run: what it does, and the run as it knows it, with its replies and failures.

A service is an object with `handle` (one command in, replies out) and `work` (a slice of work between commands).
`tandem.launch.run_service` drives it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tandem.common import messages
from tandem.common.errors import ConfigError, TandemError, WireError, is_shortage
from tandem.common.texts import shorten
from tandem.common.wire import Arrays, Frames, Link, encode
from tandem.config import Config, config_from_json

_REMEMBERED_COMMANDS = 16


class ServiceContext:
    """The run as a service knows it, and the link to it: replies, and the phase that heartbeats report."""

    def __init__(self, link: Link[Any], welcome: messages.Welcome, coordinator: str) -> None:
        self._link = link
        self.name = welcome.name
        self.coordinator = coordinator
        """Address of the coordinator, as given on the command line."""
        self.keys = link.own
        """Keys by which other processes know this one."""
        self.trainers = link.trainers
        """Keys of the run's trainers."""
        self.index = welcome.index
        self.run_id = welcome.run_id
        self.config: Config = _read_config(welcome)
        self.store_key = welcome.store_key
        """The run's key for signatures in ``refit.store``; empty without one."""
        self._phase = "idle"
        self._heartbeat_s = welcome.heartbeat_interval_s
        self.is_leaving = False
        """Whether this process is to leave the run."""
        self._say_leaving_at = -math.inf
        self._answered: OrderedDict[int, list[Frames]] = OrderedDict()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the process does inside the block, for heartbeats and error messages.

        If the block raises, the name stays, so that the failure report says where it happened.
        """
        outer, self._phase = self._phase, name
        self._link.set_phase(name)
        yield
        self._phase = outer
        self._link.set_phase(outer)

    def reply(self, command_id: int, message: messages.Message, arrays: Arrays | None = None) -> None:
        """Reply to a command, in parts or at once, from any thread; the reply is kept for a repeated command."""
        frames = encode(message, arrays)
        self._answered.setdefault(command_id, []).append(frames)
        self._link.send(frames)

    def leave(self) -> None:
        """Note, in a signal handler, that this process is to leave the run."""
        self.is_leaving = True

    def say_leaving(self) -> None:
        """Ask the coordinator, at once and repeatedly, to release this process, which is to leave."""
        now = time.monotonic()
        if now < self._say_leaving_at:
            return
        if self._say_leaving_at == -math.inf:
            notice = "it finishes its work; a second signal ends it at once"
            print(f"{self.name} was told to leave: {notice}", flush=True)
        self._say_leaving_at = now + self._heartbeat_s
        self._link.send(encode(messages.Leaving()))

    def wake(self) -> None:
        """Make `RunnableService.work` run soon, from any thread."""
        self._link.wake()

    def fail(self, command_id: int, error: BaseException, *, aside: str = "") -> None:
        """Report, from any thread, that a command failed.

        `aside` names the activity, if it is not the current phase.
        """
        failed = describe_failure(self.name, command_id, error, aside or self._phase)
        if not aside:
            self._phase = "idle"
            self._link.set_phase("idle")
        self.reply(command_id, failed)

    def accept(self, command: messages.Command) -> bool:
        """Note a command; return False if it is a repetition, after sending its replies so far again."""
        if command.command_id in self._answered:
            for frames in self._answered[command.command_id]:
                self._link.send(frames)
            return False
        self._answered[command.command_id] = []
        while len(self._answered) > _REMEMBERED_COMMANDS:
            self._answered.popitem(last=False)
        return True


def describe_failure(name: str, command_id: int, error: BaseException, phase: str) -> messages.Failed:
    """Return the report of an error of the process `name` in a phase, and print it."""
    expected = isinstance(error, TandemError) and error.is_final and not is_shortage(error)
    text = shorten(str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}")
    trace = (
        ""
        if isinstance(error, TandemError) and error.is_final
        else shorten("".join(traceback.format_exception(error)), messages.MAX_TRACEBACK)
    )
    with contextlib.suppress(OSError):  # the log may be on the full disk that is reported here
        print(f"{name}: failed while {phase}: {trace or text}", file=sys.stderr, flush=True)
    return messages.Failed(
        command_id=command_id, phase=phase[: messages.MAX_TEXT], error=text, expected=expected, traceback=trace
    )


def _read_config(welcome: messages.Welcome) -> Config:
    """Return the run's configuration. Raises `WireError` if it is invalid."""
    try:
        return config_from_json(welcome.config_json)
    except ConfigError as error:
        raise WireError(f"Welcome.config_json: {error}") from error
