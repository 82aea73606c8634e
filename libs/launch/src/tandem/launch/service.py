"""The common loop of trainer, rollout and refit processes: register, answer commands, fail, leave.

A service is an object with `handle` (one command in, replies out) and `work` (a slice of work between commands).
`run_service` drives it: it consumes commands from the link, produces replies, and waits only for the next command. The
coordinator's `Shutdown`, or the heartbeat timeout, always ends that wait.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tandem.common import descriptors, gc_tuning, signals
from tandem.common.errors import ConfigError, NotAdmitted, TandemError, WireError
from tandem.common.keys import ProcessKeys, decode_process_keys, read_key_file
from tandem.common.messages import (
    MAX_TEXT,
    MAX_TRACEBACK,
    PROTOCOL_VERSION,
    Command,
    Failed,
    Hello,
    Leaving,
    Message,
    ServiceKind,
    Shutdown,
    Welcome,
)
from tandem.common.process_lifetime import die_with
from tandem.common.texts import shortened
from tandem.common.wire import EXIT_NOT_ADMITTED, Arrays, Frames, Link, encode, exit_code
from tandem.config import Config, config_from_json
from tandem.config.model_names import fetch_models

_IDLE_POLL_S = 1.0
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a system that is out of descriptors, memory or processes."""
_EXIT_INTERRUPTED = 130
_REMEMBERED_COMMANDS = 16


class ServiceContext:
    """The run as a service knows it, and the link to it: replies, and the phase that heartbeats report."""

    def __init__(self, link: Link[Any], welcome: Welcome, coordinator: str) -> None:
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
        self.config: Config = _config_of(welcome)
        self._phase = "idle"
        self._heartbeat_s = welcome.heartbeat_interval_s
        self._is_leaving = False
        self._say_leaving_at = -math.inf
        self._answered: OrderedDict[int, list[Frames]] = OrderedDict()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the process does inside the block, for heartbeats and error messages.

        If the block raises, the name stays, so that the failure report says where it happened.
        """
        outer = self._phase
        self._set_phase(name)
        yield
        self._set_phase(outer)

    def reply(self, command_id: int, message: Message, arrays: Arrays | None = None) -> None:
        """Reply to a command, in parts or at once, from any thread; the reply is kept for a repeated command."""
        frames = encode(message, arrays)
        self._answered.setdefault(command_id, []).append(frames)
        self._link.send(frames)

    def leave(self) -> None:
        """Note, in a signal handler, that this process is to leave the run."""
        self._is_leaving = True

    def say_if_leaving(self) -> None:
        """Ask the coordinator, at once and repeatedly, to release this process if it is to leave."""
        now = time.monotonic()
        if not self._is_leaving or now < self._say_leaving_at:
            return
        if self._say_leaving_at == -math.inf:
            how = "it finishes its work; a second signal ends it at once"
            print(f"{self.name} was told to leave: {how}", flush=True)
        self._say_leaving_at = now + self._heartbeat_s
        self._link.send(encode(Leaving()))

    def wake(self) -> None:
        """Make `Service.work` run soon, from any thread."""
        self._link.wake()

    def fail(self, command_id: int, error: BaseException, *, aside: str = "") -> None:
        """Report, from any thread, that a command failed.

        `aside` names the activity, if it is not the current phase.
        """
        phase = aside or self._phase
        expected = isinstance(error, TandemError) and error.is_final and not _lacks_resources(error)
        text = shortened(str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}")
        trace = "" if expected else shortened("".join(traceback.format_exception(error)), MAX_TRACEBACK)
        with contextlib.suppress(OSError):  # the log may be on the full disk that is reported here
            print(f"{self.name}: failed while {phase}: {trace or text}", file=sys.stderr, flush=True)
        failed = Failed(
            command_id=command_id,
            phase=phase[:MAX_TEXT],
            error=text,
            expected=expected,
            traceback=trace,
        )
        if not aside:
            self._set_phase("idle")
        self.reply(command_id, failed)

    def accept(self, command: Command) -> bool:
        """Note a command; return False if it is a repetition, after sending its replies so far again."""
        if command.command_id in self._answered:
            for frames in self._answered[command.command_id]:
                self._link.send(frames)
            return False
        self._answered[command.command_id] = []
        while len(self._answered) > _REMEMBERED_COMMANDS:
            self._answered.popitem(last=False)
        return True

    def _set_phase(self, name: str) -> None:
        self._phase = name
        self._link.set_phase(name)


def _lacks_resources(error: BaseException | None) -> bool:
    """Return whether an error comes from a lack of descriptors, memory or processes, which another process may have."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _LACKING):
            return True
        error = error.__cause__ or error.__context__
    return False


def _config_of(welcome: Welcome) -> Config:
    """Return the run's configuration. Raises `WireError` if it is invalid."""
    try:
        return config_from_json(welcome.config_json)
    except ConfigError as error:
        raise WireError(f"Welcome.config_json: {error}") from error


class Service(Protocol):
    """The interface that `run_service` drives."""

    def handle(self, command: Any, arrays: Arrays) -> None:
        """Execute one command and reply through the `ServiceContext`; exceptions become `Failed`."""
        ...

    def work(self) -> bool:
        """Do a slice of work between commands; return True if more is ready at once."""
        ...

    def close(self) -> None:
        """Release everything that the service holds."""
        ...


def run_service(
    kind: ServiceKind,
    incoming: Any,
    make_service: Callable[[ServiceContext], Service],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one service process from its command line to its end; return the exit code."""
    gc_tuning.retire_at_exit()
    descriptors.raise_limit()
    arguments = _parser(kind).parse_args(argv)
    host = socket.gethostname()
    identity = f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(16)}"
    hello = Hello(protocol_version=PROTOCOL_VERSION, service=kind, host=host, pid=os.getpid(), index=arguments.index)

    def say_so() -> None:
        timeout_s = f"{arguments.join_timeout:g}"
        print(f"{kind}: waiting for a coordinator at {arguments.coordinator}, up to {timeout_s} s", flush=True)

    try:
        watch = _heed_signals(arguments.launched_by)
        keys = _keys(arguments)
        link: Link[Any] = Link(arguments.coordinator, kind, identity, incoming, keys, str(arguments.key_file or ""))
        welcome = link.join(hello, arguments.join_timeout, say_so)
    except TandemError as error:
        print(f"{kind}: {error}", file=sys.stderr)
        return EXIT_NOT_ADMITTED if isinstance(error, NotAdmitted) else 1
    except KeyboardInterrupt:
        print(f"{kind}: interrupted before it had joined", file=sys.stderr)
        return _EXIT_INTERRUPTED
    service, code = None, 0
    try:
        print(f"{welcome.name} joined {arguments.coordinator} (run {welcome.run_id})", flush=True)
        context = ServiceContext(link, welcome, arguments.coordinator)
        if kind == "rollout" and _hears_of_signals():  # every other kind is indispensable
            signals.leave_when_asked(context.leave, is_launched=bool(arguments.launched_by))
            if watch is not None:
                watch.leave_first()
        with gc_tuning.paused():
            fetch_models(context.config, partial(print, flush=True))  # needed on nodes other than the coordinator's
            service = make_service(context)
        gc_tuning.keep()
        shutdown = _answer_commands(link, context, service)
        reason, code = shutdown.reason, exit_code(shutdown)
    except KeyboardInterrupt:
        reason = "interrupted"
    except WireError as error:
        reason, code = f"the coordinator has sent {error}", 1
    gc_tuning.retire()
    if service is not None:
        service.close()
    link.close(reason)
    print(f"{welcome.name} leaves: {reason}", flush=True)
    return code


def _keys(arguments: argparse.Namespace) -> ProcessKeys:
    """Return the keys of this process, which the coordinator hands to its own processes in a descriptor."""
    if arguments.key_fd is None:
        return read_key_file(arguments.key_file)
    with os.fdopen(arguments.key_fd, "rb") as file:
        return decode_process_keys(file.read())


def _heed_signals(launched_by: int) -> signals.Watch | None:
    """End with the coordinator that launched this process, or at a signal if there is none."""
    if launched_by:
        die_with(launched_by)
        signals.leave_to_coordinator()
    elif _hears_of_signals():
        signals.interrupt_when_asked()
        return signals.end_when_stuck()
    return None


def _hears_of_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


def _answer_commands(link: Link[Any], context: ServiceContext, service: Service) -> Shutdown:
    """Answer commands until the coordinator ends this process; return its `Shutdown`.

    Raises `WireError` for a malformed message without a readable id.
    """
    busy = False
    while True:
        context.say_if_leaving()
        try:
            received = link.receive(0.0 if busy else _IDLE_POLL_S)
        except WireError as error:
            if error.command_id is None:
                raise
            context.fail(error.command_id, error)
            continue
        if received is None:
            busy = service.work()
            continue
        match received.message:
            case Shutdown() as shutdown:
                return shutdown
            case Command() as command:
                if context.accept(command):
                    try:
                        service.handle(command, received.arrays)
                    except Exception as error:
                        context.fail(command.command_id, error)
                busy = service.work()
            case other:
                raise WireError(f"{context.name} did not expect {type(other).__name__}")


def _parser(kind: ServiceKind) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=kind, description=f"One {kind} process of a Tandem run.")
    parser.add_argument(
        "--coordinator", required=True, metavar="tcp://HOST:PORT", help="address of the run's coordinator"
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait to be admitted (default: 300)",
    )
    parser.add_argument(
        "--index",
        type=int,
        metavar="N",
        help=f"its number among the run's {kind} processes, from 0 (default: the first free one)",
    )
    keys = parser.add_mutually_exclusive_group(required=True)
    keys.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with the run's keys, written by its coordinator to RUN/keys/members.json, readable only by its user",
    )
    keys.add_argument("--key-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--launched-by", type=int, default=0, help=argparse.SUPPRESS)
    return parser
