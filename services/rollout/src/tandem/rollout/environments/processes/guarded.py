"""Processes that fork others, behind a guardian: all of them end with the process that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from tandem.common.errors import ConfigError, HelperLost
from tandem.common.process_lifetime import (
    WATCH,
    be_named_by_descendants,
    continue_stopped,
    is_stopped,
    list_descendants,
    name_this_process,
)
from tandem.config import Config, config_to_json
from tandem.rollout.environments.outcomes import KILLED_FROM_OUTSIDE
from tandem.rollout.environments.processes.channel import ClassImported, MessageReader, packed

_MAIN = "import sys; sys.path[:] = sys.argv[4:]; from {module} import main; main(*map(int, sys.argv[1:4]))"
_GUARDIAN_S = 8.0
_CONTINUE_S = 0.5
"""How often a guardian that owes an answer is continued, should it be stopped."""
STOPPED = "it was stopped from outside"
_LOOK_S = 10.0
"""How often to look whether a process that imports is stopped."""
_MOST_FORKING = 3
"""Processes started in a row to import an environment's class, or to fork, before it is given up."""
_imported = msgspec.msgpack.Decoder(ClassImported)


class GuardedProcess:
    """A new interpreter that runs ``main(orders_fd, lifeline_fd, owner)`` of a module.

    That function begins with `tandem.common.process_lifetime.fork_guarded`.
    """

    def __init__(self, module: str) -> None:
        self.commands, theirs = socket.socketpair()
        self.lifeline, far = socket.socketpair()
        with theirs, far:
            descriptors = (theirs.fileno(), far.fileno())
            # The child must find what this process finds, such as a module beside the configuration file.
            words = [sys.executable, "-c", _MAIN.format(module=module), *map(str, descriptors), str(os.getpid())]
            # What it starts names this process; what else this process starts, such as vLLM's, does not.
            self._process = subprocess.Popen(
                [*words, *sys.path], pass_fds=descriptors, stdin=subprocess.DEVNULL, env=name_this_process()
            )

    def is_stopped(self) -> bool:
        """Tell whether the guardian, or anything below it, is stopped by a signal."""
        return any(map(is_stopped, (self._process.pid, *list_descendants(self._process.pid))))

    def child_is_stopped(self) -> bool:
        """Tell whether the guardian, or the process that it guards, is stopped by a signal."""
        return any(map(is_stopped, (self._process.pid, *list_descendants(self._process.pid)[:1])))

    def ask_for_ending(self) -> str:
        """Ask the guardian how the process behind it has ended."""
        return ask_guardian(self.lifeline, self._process.pid)

    def close(self) -> None:
        """End the process and everything below it."""
        self.commands.close()
        self.lifeline.close()
        continue_stopped(self._process.pid)
        try:
            self._process.wait(_GUARDIAN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _StoppedError(Exception):
    """The process that imports the environment's class is stopped from outside."""


class WorkerForkServer:
    """The process that forks workers (`tandem.rollout.environments.processes.fork_server`), behind its guardian.

    It is restarted if it is killed from outside during the import, or has ended when it should fork.
    """

    def __init__(self, config: Config) -> None:
        """Start it; it imports the environment's class while this process does something else."""
        self._config = config
        self._name = str(config.data.environment)
        self._watches = False
        self._start()

    def _start(self) -> None:
        self._process = GuardedProcess(f"{__package__}.fork_server")
        self._commands, self._lifeline = self._process.commands, self._process.lifeline
        with contextlib.suppress(ConnectionError):  # if it ended at once, that is noticed when it is waited for
            self._commands.sendall(packed(msgspec.Raw(config_to_json(self._config))))
            if self._watches:
                self._lifeline.sendall(WATCH)

    def imported(self, deadline_s: float) -> ClassImported:
        """Wait until the class is imported. Raises `ConfigError` if the import fails.

        Raises `HelperLost` if each process that should import it was killed from outside.
        """
        deadline, ending = time.monotonic() + deadline_s, ""
        for attempt in range(_MOST_FORKING):
            if attempt:
                self._start_again(ending)
            try:
                imported = self._hear_of_import(deadline)
            except TimeoutError as error:
                raise ConfigError(f"env.{self._name}: it could not be imported within {deadline_s:g} s") from error
            except _StoppedError:
                deadline, ending = time.monotonic() + deadline_s, STOPPED
                continue
            if imported is not None:
                if imported.error:
                    raise ConfigError(imported.error)
                return imported
            ending = self._process.ask_for_ending()
            if ending not in KILLED_FROM_OUTSIDE:
                raise ConfigError(f"env.{self._name}: importing its class ended the process: {ending}")
        raise self._lost(ending)

    def _hear_of_import(self, deadline: float) -> ClassImported | None:
        """Wait for the process's report of the import; return None if it has ended.

        Raises `TimeoutError`, or `_StoppedError` if it has been stopped from one look to the next.
        """
        reader, was_stopped = MessageReader(), False
        try:
            while True:
                self._commands.settimeout(min(_LOOK_S, max(0.01, deadline - time.monotonic())))
                try:
                    data = self._commands.recv(1 << 16)
                except TimeoutError:
                    is_stopped = self._process.is_stopped()
                    if is_stopped and was_stopped:
                        raise _StoppedError from None
                    if time.monotonic() > deadline:
                        raise
                    was_stopped = is_stopped
                    continue
                if not data:
                    return None
                for message in reader.messages(data):
                    return _imported.decode(message)
        except ConnectionError:  # it ended before it read what to import
            return None
        finally:
            self._commands.settimeout(None)

    def fork(self) -> tuple[socket.socket, socket.socket]:
        """Fork a worker; return the socket for its calls, and its lifeline.

        Raises `HelperLost` if the fork server is killed again and again, `ConfigError` if another cannot import the
        environment's class.
        """
        calls, theirs = socket.socketpair()
        lifeline, far = socket.socketpair()
        with theirs, far:
            try:
                self._order_fork([theirs.fileno(), far.fileno()])
            except BaseException:
                calls.close()
                lifeline.close()
                raise
        return calls, lifeline

    def _order_fork(self, descriptors: list[int]) -> None:
        ending = ""
        for attempt in range(_MOST_FORKING):
            if attempt:
                self._start_again(ending)
                self.imported(self._config.cluster.deadlines.build_s)
            try:
                socket.send_fds(self._commands, [b"."], descriptors)
                return
            except ConnectionError:
                ending = self._process.ask_for_ending()
        raise self._lost(ending)

    def replace_hanging(self, patience_s: float) -> None:
        """Start another fork server in place of one that has forked nothing for `patience_s`; its workers end.

        Raises the same as `fork`.
        """
        self._start_again(STOPPED if self._process.is_stopped() else f"it forked nothing for {patience_s:g} s")
        self.imported(self._config.cluster.deadlines.build_s)

    def _start_again(self, ending: str) -> None:
        """Start another fork server in its place."""
        print(f"environment {self._name!r}: the process that forks workers has ended ({ending}); starting another")
        self._process.close()
        self._start()

    def _lost(self, ending: str) -> HelperLost:
        description = f"the process that forks workers has ended {_MOST_FORKING} times in a row: {ending}"
        return HelperLost(f"environment {self._name!r}: {description}")

    def watch(self) -> None:
        """Have the guardian also end what this process starts, should this process be killed."""
        self._watches = True
        be_named_by_descendants()
        self._lifeline.sendall(WATCH)

    def close(self) -> None:
        """End the fork server and everything below it."""
        self._process.close()


def ask_guardian(lifeline: socket.socket, guardian: int | None, patience_s: float = _GUARDIAN_S) -> str:
    """Ask a guardian how the process behind it has ended; one that is known is continued whenever it is stopped."""
    deadline = time.monotonic() + patience_s
    while True:
        if guardian is not None:
            continue_stopped(guardian)
        try:
            lifeline.settimeout(max(0.001, min(_CONTINUE_S, deadline - time.monotonic())))
            return describe_exit(int(lifeline.recv(16) or b"-9"))
        except TimeoutError:
            if time.monotonic() > deadline:
                return "nobody knows how"
        except (OSError, ValueError):
            return "nobody knows how"


def describe_exit(code: int) -> str:
    """Describe how a process ended that its guardian saw end with this code."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
