"""Start, watch and end the processes that the coordinator launches on its own host."""

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
from tandem.common.keys import MemberKeys, encode
from tandem.common.messages import Listener, ServiceKind
from tandem.common.texts import last_lines
from tandem.launch.fork_server import Child, ForkServer
from tandem.launch.supervision import Supervision

_KILLED_S = 10.0
"""How long the kernel may take to end a process that was killed, and a supervisor to say so."""
_LOG_TAIL_LINES = 3


def make_importable(config_file: str | Path) -> None:
    """Let this process, and those that it launches, import the user's own modules from beside a configuration file.

    Python's own way to say so, `PYTHONPATH`, is also how services that are started by hand are told.
    """
    folder = str(Path(config_file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*(path for path in inherited if path not in ("", folder)), folder])


def preload(kinds: Iterable[ServiceKind], environment: Mapping[str, str] | None = None) -> None:
    """Import what services of these kinds take long to import, with more in this process's `environment`."""
    os.environ.update(environment or {})
    for kind in kinds:
        importlib.import_module(f"tandem.{kind}.cli").preload()


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A process the coordinator started."""

    public_key: str
    """By which it is known when it joins, empty where this process is not the coordinator."""
    kind: ServiceKind
    number: int
    log: Path
    process: Child

    @property
    def name(self) -> str:
        """Its name in the run, such as ``rollout-0``."""
        return f"{self.kind}-{self.number}"

    def describe_death(self) -> str:
        """Say how it ended, with the last lines it wrote."""
        code = self.process.wait(0.0)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = last_lines(self.log, _LOG_TAIL_LINES)
        return f"{how}; last in {self.log}: {' | '.join(lines) or 'nothing'}"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """By what one process joins a run."""

    arguments: tuple[str, ...]
    keys: bytes = b""
    """Given to it by a descriptor."""
    public_key: str = ""


class Admits:
    """How the coordinator's own processes join: each has a key pair that was made for it."""

    def __init__(self, coordinator: Listener, admitted: Admitted) -> None:
        """`admitted` are the keys that the coordinator hears, to which those of these processes come."""
        self._coordinator = coordinator
        self._admitted = admitted

    def __call__(self, number: int) -> Credentials:
        """Return those of one process."""
        own = new_key_pair()
        self._admitted.add(own.public)  # before there is anyone to prove it
        keys = MemberKeys(coordinator=self._coordinator.public_key, own=own, is_joining=False)
        return Credentials(
            arguments=("--coordinator", self._coordinator.address), keys=encode(keys), public_key=own.public
        )


class LocalProcesses:
    """The launched processes. They die with this one, whatever ends it: the kernel sees to that.

    Where there is a supervisor, all but trainers die with that one instead.
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
        """`credentials` are those of the process with a number. With `are_kept` services outlive this process."""
        self._supervision = supervision
        self._are_kept = are_kept
        self._credentials = credentials
        self._fork_server = fork_server
        self._log_folder = log_folder
        self._running: dict[str, Launched] = {}
        """By their names."""
        self._launched: dict[str, ServiceKind] = {}
        """Every process ever launched, by name; not those that were let go."""
        self._leaving: list[tuple[float, Launched]] = []
        """Those that were let go, and when they must have ended."""

    def start(self, kind: ServiceKind, number: int) -> Launched:
        """Start one process; its output goes to ``<kind>-<number>.log`` in the log folder."""
        credentials = self._credentials(number)
        if self._supervision is not None:
            self._supervision.rest()  # what forks may have to import everything first, and has a deadline of its own
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
        """Take a process for one of ours that has outlived the coordinator which started it."""
        kind, _, number = name.rpartition("-")
        self._note(msgspec.convert(kind, ServiceKind), int(number), public_key, process)

    @staticmethod
    def end(process: Child) -> None:
        """Kill a process that an earlier coordinator has started, and wait until it is gone."""
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
        """Start processes in the place of some that are lost, or hang, or cannot go on; not of those that are not ours.

        None is started before all that it takes the place of are gone.
        """
        gone = [self._running.pop(name) for name in names if name in self._running]
        for launched in gone:
            launched.process.kill()
        for launched in gone:
            launched.process.wait(_KILLED_S)
        ours = [name for name in names if name in self._launched]
        return [self.start(self._launched[name], int(name.rpartition("-")[2])) for name in ours]

    def has_launched(self, name: str) -> bool:
        """Tell whether a process of the name was ever started here."""
        return name in self._launched

    def let_go(self, name: str, grace_s: float) -> None:
        """Give a process so long to end that was told to go; that it ends is no loss."""
        self._launched.pop(name, None)
        launched = self._running.pop(name, None)
        if launched is not None:
            self._leaving.append((time.monotonic() + grace_s, launched))

    def died(self) -> list[Launched]:
        """Return the processes that ended since the last call, but for those that were let go."""
        self._end_leaving(time.monotonic())
        dead = [launched for launched in self._running.values() if launched.process.poll() is not None]
        for launched in dead:
            del self._running[launched.name]
        return dead

    def stop(self, grace_s: float) -> None:
        """Wait `grace_s` for the processes to end, then kill them: they leave other signals to this one."""
        self._wait(grace_s)
        self._end_leaving(math.inf)
        for launched in self._running.values():
            launched.process.kill()
        self._wait(_KILLED_S)

    def _end_leaving(self, now: float) -> None:
        """Kill those that were let go and have not ended in time."""
        self._leaving = [each for each in self._leaving if each[1].process.poll() is None]
        for until, launched in self._leaving:
            if now > until:
                launched.process.kill()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._running or self._leaving) and time.monotonic() < deadline:
            self.died()
            time.sleep(0.02)
