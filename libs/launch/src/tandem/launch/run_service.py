"""The common loop of trainer, rollout and refit processes: register, answer commands, fail, leave.

It consumes commands from the link, produces replies, and waits only for the next command. The coordinator's `Shutdown`,
or the heartbeat timeout, always ends that wait.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tandem.common import descriptors, gc_tuning, kept_inputs, outputs, signals
from tandem.common.errors import INTERRUPTED, NotAdmitted, TandemError, WireError
from tandem.common.keys import ProcessKeys, decode_process_keys, read_key_file
from tandem.common.messages import PROTOCOL_VERSION, Command, Hello, ServiceKind, Shutdown
from tandem.common.network import forget_empty_endpoint
from tandem.common.process_lifetime import die_with
from tandem.common.wire import EXIT_NOT_ADMITTED, Arrays, Link, exit_code
from tandem.config.model_names import fetch_models
from tandem.launch.service import ServiceContext

_IDLE_POLL_S = 1.0


class RunnableService(Protocol):
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


@outputs.outlast_readers()
def run_service(
    kind: ServiceKind,
    incoming: Any,
    make_service: Callable[[ServiceContext], RunnableService],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one service process from its command line to its end; return the exit code."""
    gc_tuning.retire_at_exit()
    forget_empty_endpoint()
    descriptors.raise_limit()
    arguments = _make_parser(kind).parse_args(argv)
    host = socket.gethostname()
    identity = f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(16)}"
    hello = Hello(protocol_version=PROTOCOL_VERSION, service=kind, host=host, pid=os.getpid(), index=arguments.index)

    def say_so() -> None:
        timeout_s = f"{arguments.join_timeout:g}"
        print(f"{kind}: waiting for a coordinator at {arguments.coordinator}, up to {timeout_s} s", flush=True)

    try:
        watch = _heed_signals(arguments.launched_by)
        keys = _read_keys(arguments)
        link: Link[Any] = Link(arguments.coordinator, kind, identity, incoming, keys, str(arguments.key_file or ""))
        welcome = link.join(hello, arguments.join_timeout, say_so)
    except TandemError as error:
        print(f"{kind}: {error}", file=sys.stderr)
        return EXIT_NOT_ADMITTED if isinstance(error, NotAdmitted) else 1
    except KeyboardInterrupt:
        print(f"{kind}: interrupted before it had joined", file=sys.stderr)
        return INTERRUPTED
    if arguments.key_file is not None:  # only now: a service may have waited for its run to begin
        kept_inputs.adopt(arguments.key_file)
    kept_inputs.install()
    service, code = None, 0
    try:
        print(f"{welcome.name} joined {arguments.coordinator} (run {welcome.run_id})", flush=True)
        context = ServiceContext(link, welcome, arguments.coordinator)
        if kind == "rollout" and _hears_of_signals():  # every other kind is indispensable
            signals.leave_when_asked(context.leave, is_launched=bool(arguments.launched_by))
            if watch is not None:
                watch.leave_first()
        with gc_tuning.pause_collection():
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


def _read_keys(arguments: argparse.Namespace) -> ProcessKeys:
    """Return the keys of this process, which the coordinator hands to its own processes in a descriptor."""
    if arguments.key_fd is None:
        return read_key_file(arguments.key_file)
    with os.fdopen(arguments.key_fd, "rb") as file:
        return decode_process_keys(file.read())


def _heed_signals(launched_by: int) -> signals.TerminationWatch | None:
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


def _answer_commands(link: Link[Any], context: ServiceContext, service: RunnableService) -> Shutdown:
    """Answer commands until the coordinator ends this process; return its `Shutdown`.

    Raises `WireError` for a malformed message without a readable id.
    """
    busy = False
    while True:
        if context.is_leaving:
            context.say_leaving()
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
            case unexpected:
                raise WireError(f"{context.name} did not expect {type(unexpected).__name__}")


def _make_parser(kind: ServiceKind) -> argparse.ArgumentParser:
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
