"""One node of a run on Ray: an actor, and the node's process, which never outlives it.

    Ray's worker (`NodeActor`) -- guardian -- coordinator up | coordinator join -- services

Ray starts the actor, restarts it elsewhere when its node is lost, and kills it when the run's program ends. The
guardian (`python -m tandem.launch.ray_node`) ends everything below it when the actor ends in any way, kill -9 included.
What the process prints is held here until it is read; Ray's logs have none of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.common import signals
from tandem.common.distribution import version
from tandem.common.errors import ConfigError, RunFolderError
from tandem.common.process_lifetime import fork_guarded

_OMP = "OMP_NUM_THREADS"
_MOST_LINES = 10_000
"""Lines that are held for a reader; older ones are dropped, and are in no log of Ray's either."""
_ENDED_S = 10.0
"""How long a guardian may take to end what is below it."""


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The run to work on; the same for all of its nodes."""

    folder: str
    """Working directory; empty: that of Ray's worker, where `ray job submit` has copied one there."""
    config: str
    """Path of the configuration file."""
    run: str
    """The run folder."""
    environment: dict[str, str]
    """Environment variables of the node's process."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its actor sees it."""

    incarnation: str
    """Name of this life of the actor; a restarted one has another, and no process."""
    address: str
    """The node's IP address, by which Ray knows it."""
    host: str
    version: str
    """Release of Tandem."""
    missing: str
    """The file or folder that the node does not see; empty if it sees all."""
    run_id: str | None
    """Id of the run in the run folder; None if there is none, or if the node does not see it."""


class ReservedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first node's coordinator will listen."""

    address: str
    coordinator_key: str
    """The coordinator's public key."""


class NodeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New lines of a node's process, and its end."""

    incarnation: str
    lines: tuple[str, ...]
    position: int
    """Number of lines printed so far."""
    code: int | None
    """Exit code, negative for a signal; None while the process runs, or where none has been started."""


class NodeActor:
    """The actor of one node; Ray calls its methods, several at a time."""

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._process: _GuardedCommand | None = None
        self._port: socket.socket | None = None
        self._keys: int | None = None
        """Descriptor of a file in memory with the run's keys."""

    def inspect(self, order: NodeOrder) -> NodeView:
        """Return what this node is, and whether it sees what the run needs."""
        import ray

        folder = Path(order.folder or os.getcwd())
        config = folder / order.config
        missing = next((str(path) for path in (folder, config) if not path.exists()), "")
        return NodeView(
            incarnation=self._incarnation,
            address=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            version=version(),
            missing=missing,
            run_id=_read_run_id(folder / order.run),
        )

    def reserve(self, order: NodeOrder, port: int) -> ReservedAddress:
        """Make the run's keys unless it has them, and keep a port free for its coordinator (0: any).

        Raises `ConfigError` if others can read the keys, and `OSError` if the port is taken.
        """
        import ray

        from tandem.common.keys import read_run_keys, write_run_keys
        from tandem.launch.admission import new_run_keys

        run = Path(order.folder or os.getcwd()) / order.run
        keys = read_run_keys(run) or new_run_keys()
        write_run_keys(run, keys)
        host = ray.util.get_node_ip_address()
        if self._port is None:
            self._port = _reserve_port(host, port)
        host = f"[{host}]" if ":" in host else host
        return ReservedAddress(
            address=f"tcp://{host}:{self._port.getsockname()[1]}", coordinator_key=keys.coordinator.public
        )

    def read_keys(self, order: NodeOrder) -> bytes:
        """Return the keys with which processes join the run, for a node that does not see the run folder."""
        from tandem.common.keys import encode, read_run_keys

        keys = read_run_keys(Path(order.folder or os.getcwd()) / order.run)
        if keys is None:
            raise ConfigError(f"{order.run}: the run's keys are gone")
        return encode(keys.for_processes())

    def sees_keys(self, order: NodeOrder, coordinator_key: str) -> bool:
        """Tell whether this node sees the run folder, by the coordinator's public key in it."""
        from tandem.common.keys import find_key_file, read_key_file

        try:
            keys = read_key_file(find_key_file(Path(order.folder or os.getcwd()) / order.run))
        except ConfigError:
            return False
        return keys.coordinator == coordinator_key

    def start(self, order: NodeOrder, words: Sequence[str], keys: bytes) -> None:
        """Start ``coordinator`` with these words; `keys` are empty where it finds them in the run folder.

        A process that was started earlier is ended first.
        """
        self.stop()
        if keys:
            words = [*words, "--key-file", self._hold_keys(keys)]
        folder = order.folder or os.getcwd()
        environment = {**_copy_environment(), **order.environment}
        self._process = _GuardedCommand(words, folder, environment)

    def read(self, position: int, wait_s: float) -> NodeOutput:
        """Return the lines from `position` on, and how the process has ended; wait a while for news."""
        if self._process is None:
            return NodeOutput(incarnation=self._incarnation, lines=(), position=0, code=None)
        lines, position, code = self._process.read(position, wait_s)
        return NodeOutput(incarnation=self._incarnation, lines=lines, position=position, code=code)

    def send_signal(self, number: int) -> None:
        """Send the node's process a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """End the node's process, and everything that it has started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _hold_keys(self, keys: bytes) -> str:
        """Return the path of a file in memory with the keys: it is on no disk, and ends with this process."""
        if self._keys is not None:
            os.close(self._keys)
        self._keys = os.memfd_create("tandem-keys", os.MFD_CLOEXEC)
        os.fchmod(self._keys, 0o600)
        os.write(self._keys, keys)
        return f"/proc/{os.getpid()}/fd/{self._keys}"


class _GuardedCommand:
    """A ``coordinator`` command under a guardian, and what it prints."""

    def __init__(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        read_pid, write_pid = os.pipe()
        descriptors = (theirs.fileno(), write_pid)
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, descriptors), str(os.getpid()), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
        )
        theirs.close()
        os.close(write_pid)
        self._lifeline, self._pid_pipe = ours, read_pid
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._position = 0
        self._code: int | None = None
        self._news = threading.Condition()
        self._pid: int | None = None
        self._follower = threading.Thread(target=self._follow, daemon=True, name="output")
        self._follower.start()

    def read(self, position: int, wait_s: float) -> tuple[tuple[str, ...], int, int | None]:
        """Return the lines from a position on, the next position, and the exit code."""
        with self._news:
            self._news.wait_for(lambda: self._position > position or self._code is not None, wait_s)
            unread = max(0, min(len(self._lines), self._position - position))
            return tuple(self._lines)[len(self._lines) - unread :], self._position, self._code

    def send_signal(self, number: int) -> None:
        """Send the command a signal, unless it has ended."""
        with self._news:
            if self._code is None and (pid := self._read_pid()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """End the command and everything below it, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)  # which wakes the guardian
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(_ENDED_S)
        self._guardian.kill()  # which does nothing to one that has ended
        self._follower.join(_ENDED_S)
        if self._pid_pipe >= 0:
            os.close(self._pid_pipe)

    def _read_pid(self) -> int | None:
        """Return the command's process id, once the guardian's child has written it."""
        if self._pid_pipe >= 0:
            text = os.read(self._pid_pipe, 32)
            os.close(self._pid_pipe)
            self._pid_pipe, self._pid = -1, int(text or b"0") or None
        return self._pid

    def _follow(self) -> None:
        """Read what is printed, to the end; then the exit code, which the guardian writes."""
        assert self._guardian.stdout is not None
        with self._guardian.stdout as output:
            for line in output:
                with self._news:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._position += 1
                    self._news.notify_all()
        code = b""
        with contextlib.suppress(OSError):
            code = self._lifeline.recv(32)
        self._guardian.wait()
        with self._news:
            self._code = int(code) if code else -signal.SIGKILL
            self._news.notify_all()
        self._lifeline.close()


def _read_run_id(run: Path) -> str | None:
    from tandem.observe.run_folder.journal import read_journal

    with contextlib.suppress(RunFolderError), read_journal(run) as journal:
        return journal.run_id
    return None


def _reserve_port(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen.

    The system gives its port to no process that asks for any free one. A process that names the port can bind to it, if
    it sets SO_REUSEADDR as libzmq does.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except BaseException:
        reserved.close()
        raise
    return reserved


def _copy_environment() -> dict[str, str]:
    """Return this process's environment without the number of threads that Ray sets by itself, for small tasks."""
    environment = dict(os.environ)
    if _OMP in environment and f"{_OMP}=".encode() not in Path("/proc/self/environ").read_bytes():
        del environment[_OMP]
    return environment


def main(argv: Sequence[str]) -> None:
    """Run as the guardian, or become its child: a ``coordinator`` command."""
    lifeline, write_pid, owner = map(int, argv[:3])
    fork_guarded(lifeline, owner)
    signals.restore()  # Ray's daemon may have been started with Ctrl-C ignored, as shells do in the background
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.write(write_pid, str(os.getpid()).encode())
    os.close(write_pid)
    os.execv(sys.executable, [sys.executable, "-m", "tandem.coordinator.cli", *argv[3:]])


if __name__ == "__main__":
    main(sys.argv[1:])
