"""The processes that the coordinator launches on its own host: starting, watching and ending them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.keys import ProcessKeys, encode
from tandem.common.messages import Listener, ServiceKind
from tandem.launch.child import KILLED_S, ForkedChild, LaunchedProcess, WatchedProcesses
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.supervision import SupervisorConnection


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


class ProcessCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials with which one process registers with a run."""

    arguments: tuple[str, ...]
    keys: bytes = b""
    """Keys, handed to the process in a descriptor."""
    public_key: str = ""


class OwnCredentials:
    """Credentials of the coordinator's own processes: each gets a new key pair."""

    def __init__(self, coordinator: Listener, admitted: AdmittedKeys) -> None:
        """Issue credentials; the keys of these processes are added to `admitted`, which the coordinator accepts."""
        self._coordinator = coordinator
        self._admitted = admitted

    def __call__(self, number: int) -> ProcessCredentials:
        """Return the credentials of one process."""
        key_pair = new_key_pair()
        self._admitted.add(key_pair.public)  # before the process exists, so that it is never refused
        keys = ProcessKeys(coordinator=self._coordinator.public_key, own=key_pair, is_joining=False)
        return ProcessCredentials(
            arguments=("--coordinator", self._coordinator.address), keys=encode(keys), public_key=key_pair.public
        )


class LocalProcesses(WatchedProcesses):
    """The launched processes. The kernel ends them with this process, however that ends.

    With a supervisor, all but trainers end with the supervisor instead.
    """

    def __init__(
        self,
        credentials: Callable[[int], ProcessCredentials],
        log_folder: Path,
        fork_server: ServiceForkServer,
        supervision: SupervisorConnection | None = None,
        *,
        are_kept: bool = False,
    ) -> None:
        """Launch nothing yet; `credentials` takes a process's number. With `are_kept`, services outlive this
        process."""
        super().__init__()
        self._supervision = supervision
        self._are_kept = are_kept
        self._credentials = credentials
        self._fork_server = fork_server
        self._log_folder = log_folder

    def start(self, kind: ServiceKind, number: int) -> LaunchedProcess:
        """Start one process; its output goes to ``<kind>-<number>.log`` in the log folder."""
        credentials = self._credentials(number)
        if self._supervision is not None:
            self._supervision.leave_loop()  # the fork server may import everything first, and has its own deadline
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

    def take_up(self, name: str, public_key: str, process: ForkedChild) -> None:
        """Adopt a process of ours that has outlived the coordinator that started it."""
        kind, _, number = name.rpartition("-")
        self._note(msgspec.convert(kind, ServiceKind), int(number), public_key, process)

    @staticmethod
    def end(process: ForkedChild) -> None:
        """Kill a process that an earlier coordinator started, and wait until it is gone."""
        process.kill()
        process.wait(KILLED_S)

    def _note(self, kind: ServiceKind, number: int, public_key: str, process: ForkedChild) -> LaunchedProcess:
        log = self._log(kind, number)
        launched = LaunchedProcess(public_key=public_key, kind=kind, number=number, log=log, process=process)
        self._running[launched.name] = launched
        self._launched[launched.name] = kind
        return launched

    def _log(self, kind: ServiceKind, number: int) -> Path:
        return self._log_folder / f"{kind}-{number}.log"

    def restart(self, names: Collection[str]) -> list[LaunchedProcess]:
        """Replace processes that are lost, hang, or cannot go on; ignore those that were not launched here.

        All old processes are gone before the first new one starts.
        """
        gone = [self._running.pop(name) for name in names if name in self._running]
        for launched in gone:
            launched.process.kill()
        for launched in gone:
            launched.process.wait(KILLED_S)
        ours = [name for name in names if name in self._launched]
        return [self.start(self._launched[name], int(name.rpartition("-")[2])) for name in ours]

    def has_launched(self, name: str) -> bool:
        """Return whether a process of this name was ever started here."""
        return name in self._launched
