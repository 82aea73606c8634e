"""The processes that the coordinator launches on its own host: starting, watching and ending them."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from tandem.common.curve import Admitted, new_key_pair
from tandem.common.keys import ProcessKeys, encode
from tandem.common.messages import Listener, ServiceKind
from tandem.common.texts import last_lines
from tandem.launch.child import Child
from tandem.launch.fork_server import ForkServer
from tandem.launch.supervision import Supervision

_KILLED_S = 10.0
"""Longest time that the kernel takes to end a killed process, and a supervisor to report it."""
_LOG_TAIL_LINES = 3


def make_importable(config_file: str | Path) -> None:
    """Let this process, and those it launches, import the user's modules from the folder of a configuration file.

    It sets `PYTHONPATH`, Python's own means, which also works for services started by hand.
    """
    folder = str(Path(config_file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*(path for path in inherited if path not in ("", folder)), folder])


def preload(kinds: Iterable[ServiceKind], environment: Mapping[str, str] | None = None) -> None:
    """Import the slow modules of services of these kinds, after adding `environment` to this process's."""
    os.environ.update(environment or {})
    for kind in kinds:
        importlib.import_module(f"tandem.{kind}.cli").preload()


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the coordinator started."""

    public_key: str
    """Key by which it authenticates when it registers; empty if this process is not the coordinator."""
    kind: ServiceKind
    number: int
    log: Path
    process: Child

    @property
    def name(self) -> str:
        """Name in the run, such as ``rollout-0``."""
        return f"{self.kind}-{self.number}"

    def describe_death(self) -> str:
        """Describe how it ended, with the last lines of its log."""
        code = self.process.wait(0.0)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = last_lines(self.log, _LOG_TAIL_LINES)
        return f"{how}; last in {self.log}: {' | '.join(lines) or 'nothing'}"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials with which one process registers with a run."""

    arguments: tuple[str, ...]
    keys: bytes = b""
    """Keys, handed to the process in a descriptor."""
    public_key: str = ""


class Admits:
    """Credentials of the coordinator's own processes: each gets a new key pair."""

    def __init__(self, coordinator: Listener, admitted: Admitted) -> None:
        """Issue credentials; the keys of these processes are added to `admitted`, which the coordinator accepts."""
        self._coordinator = coordinator
        self._admitted = admitted

    def __call__(self, number: int) -> Credentials:
        """Return the credentials of one process."""
        own = new_key_pair()
        self._admitted.add(own.public)  # before the process exists, so that it is never refused
        keys = ProcessKeys(coordinator=self._coordinator.public_key, own=own, is_joining=False)
        return Credentials(
            arguments=("--coordinator", self._coordinator.address), keys=encode(keys), public_key=own.public
        )


class LocalProcesses:
    """The launched processes. The kernel ends them with this process, however that ends.

    With a supervisor, all but trainers end with the supervisor instead.
    """

    def __init__(
        self,
        credentials: Callable[[int], Credentials],
        log_folder: Path,
        fork_server: ForkServer,
        supervision: Supervision | None = None,
        *,
        are_kept: bool = False,
    ) -> None:
        """Launch nothing yet; `credentials` takes a process's number. With `are_kept`, services outlive this
        process."""
        self._supervision = supervision
        self._are_kept = are_kept
        self._credentials = credentials
        self._fork_server = fork_server
        self._log_folder = log_folder
        self._running: dict[str, Launched] = {}
        """Running processes by name."""
        self._launched: dict[str, ServiceKind] = {}
        """Every process ever launched, by name, except draining ones."""
        self._leaving: list[tuple[float, Launched]] = []
        """Draining processes, and the times by which they must have ended."""

    def start(self, kind: ServiceKind, number: int) -> Launched:
        """Start one process; its output goes to ``<kind>-<number>.log`` in the log folder."""
        credentials = self._credentials(number)
        if self._supervision is not None:
            self._supervision.rest()  # the fork server may have to import everything first, and has its own deadline
        supervision = self._supervision if self._are_kept and kind != "trainer" else None
        parent = os.getpid() if supervision is None else supervision.pid
        arguments = (*credentials.arguments, "--launched-by", str(parent))
        with self._log(kind, number).open("ab") as out:
            process = self._fork_server.start(
                f"tandem.{kind}.cli", arguments, out, heeds_signals=False, keys=credentials.keys, parent=parent
            )
        if supervision is not None:
            process = supervision.keep(f"{kind}-{number}", process.pid)
        return self._note(kind, number, credentials.public_key, process)

    def take_up(self, name: str, public_key: str, process: Child) -> None:
        """Adopt a process of ours that has outlived the coordinator that started it."""
        kind, _, number = name.rpartition("-")
        self._note(msgspec.convert(kind, ServiceKind), int(number), public_key, process)

    @staticmethod
    def end(process: Child) -> None:
        """Kill a process that an earlier coordinator started, and wait until it is gone."""
        process.kill()
        process.wait(_KILLED_S)

    def _note(self, kind: ServiceKind, number: int, public_key: str, process: Child) -> Launched:
        log = self._log(kind, number)
        launched = Launched(public_key=public_key, kind=kind, number=number, log=log, process=process)
        self._running[launched.name] = launched
        self._launched[launched.name] = kind
        return launched

    def _log(self, kind: ServiceKind, number: int) -> Path:
        return self._log_folder / f"{kind}-{number}.log"

    def restart(self, names: Collection[str]) -> list[Launched]:
        """Replace processes that are lost, hang, or cannot go on; ignore those that were not launched here.

        All old processes are gone before the first new one starts.
        """
        gone = [self._running.pop(name) for name in names if name in self._running]
        for launched in gone:
            launched.process.kill()
        for launched in gone:
            launched.process.wait(_KILLED_S)
        ours = [name for name in names if name in self._launched]
        return [self.start(self._launched[name], int(name.rpartition("-")[2])) for name in ours]

    def has_launched(self, name: str) -> bool:
        """Return whether a process of this name was ever started here."""
        return name in self._launched

    def let_go(self, name: str, grace_s: float) -> None:
        """Give a draining process this much time to end; its end is not a loss."""
        self._launched.pop(name, None)
        launched = self._running.pop(name, None)
        if launched is not None:
            self._leaving.append((time.monotonic() + grace_s, launched))

    def died(self) -> list[Launched]:
        """Return the processes that ended since the last call, except draining ones."""
        if self._leaving:
            self._end_leaving(time.monotonic())
        dead = [launched for launched in self._running.values() if launched.process.poll() is not None]
        for launched in dead:
            del self._running[launched.name]
        return dead

    def stop(self, grace_s: float) -> None:
        """Wait `grace_s` for the processes to end, then kill them: they leave all other signals to this process."""
        self._wait(grace_s)
        self._end_leaving(math.inf)
        for launched in self._running.values():
            launched.process.kill()
        self._wait(_KILLED_S)

    def _end_leaving(self, now: float) -> None:
        """Kill draining processes that have not ended in time."""
        self._leaving = [each for each in self._leaving if each[1].process.poll() is None]
        for until, launched in self._leaving:
            if now > until:
                launched.process.kill()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._running or self._leaving) and time.monotonic() < deadline:
            self.died()
            time.sleep(0.02)
