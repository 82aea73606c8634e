"""A real Ray cluster on this machine: each node in namespaces of its own, with a cable to a switch."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.harness.runs.hosts_harness import ip

PORT = 6379
DASHBOARD_PORT = 8265
START_S = 300.0
"""Longest start of a Ray node, on a machine that is busy."""
_NUMBERS = itertools.count()
"""Of nodes, of which those that have ended keep their names until the kernel has cleaned up."""
_TOKEN = secrets.token_hex(32)
MEMORY = 80 << 20
"""Bytes of an object store: nothing is put into it."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


class RayNode:
    """A node: a process id namespace, whose end is that of all within, with its own network, host name and /dev/shm."""

    def __init__(self, name: str, index: int, bridge: str, folder: Path) -> None:
        self.name = name
        self.address = f"10.98.75.{index}"
        number = next(_NUMBERS)
        self._namespace = f"tandem-ray{number}-{os.getpid()}"
        end = f"tdr{number}-{os.getpid()}"
        ip("netns", "add", self._namespace)
        ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        ip("link", "set", end, "master", bridge, "up")
        for words in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up")):
            ip("-n", self._namespace, *words)
        ip("-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self._namespace, "route", "add", "default", "dev", "eth0")
        self.sessions = folder / name
        self.sessions.mkdir()
        # Ray's sockets have paths of limited length, so its folder is the same short one in each mount namespace.
        script = (
            f"hostname {name} && mkdir -p /tmp/ray && mount --bind {self.sessions} /tmp/ray && "
            "mount -t tmpfs tmpfs /dev/shm && echo up; sleep infinity & wait"  # which also collects orphans
        )
        options = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        words = [
            "setpriv",
            "--pdeathsig=KILL",
            "ip",
            "netns",
            "exec",
            self._namespace,
            "unshare",
            *options,
            "sh",
            "-c",
            script,
        ]
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        unshare = psutil.Process(self._holder.pid)  # `ip` has become it
        self._init = unshare.children()[0]

    def words(self, *command: str | Path) -> list[str]:
        """Return the words that run a command on the node, in this process's working directory."""
        enter = ["nsenter", "-t", str(self._init.pid), "-m", "-u", "-i", "-n", "-p"]
        return [*enter, "env", "--default-signal", "-C", os.getcwd(), *map(str, command)]

    def run(self, *command: str | Path, timeout_s: float = START_S) -> str:
        """Run a command on the node to its end; return what it prints."""
        done = subprocess.run(
            self.words(*command), capture_output=True, text=True, timeout=timeout_s, check=False, env=_environment()
        )
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_head(self, *, has_jobs: bool, storage: Path | None) -> None:
        """Start Ray as a cluster's head, which runs no actor; `storage`: where its tables survive its end."""
        jobs = [f"--include-dashboard={str(has_jobs).lower()}", f"--dashboard-host={self.address}"]
        kept = [] if storage is None else ["env", "RAY_gcs_storage=rocksdb", f"RAY_gcs_storage_path={storage}"]
        self._start("--head", f"--port={PORT}", *jobs, "--num-cpus=0", "--num-gpus=0", before=kept)

    def start_worker(self, head: RayNode) -> None:
        """Start Ray as a worker, with room for one node of a run."""
        self._start(f"--address={head.address}:{PORT}", "--num-cpus=1", "--num-gpus=1")

    def _start(self, *options: str, before: Sequence[str] = ()) -> None:
        options = (*options, f"--node-ip-address={self.address}", f"--object-store-memory={MEMORY}")
        for last in (False, False, True):
            try:
                self.run(*before, *_RAY, "start", *options, "--disable-usage-stats")
                return
            except AssertionError as error:  # Ray gives its daemon 30 s to start, which a busy machine does not
                if last or "timed out during startup" not in str(error):
                    raise
                self.kill_ray()

    def processes(self) -> list[psutil.Process]:
        """Return what runs on the node."""
        space = _namespace_of(self._init)
        return [each for each in psutil.process_iter() if space and _namespace_of(each) == space]

    def kill_ray(self) -> None:
        """Kill Ray's own processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "/ray/" in " ".join(process.cmdline()):
                    process.kill()

    def titled(self, *titles: str) -> list[psutil.Process]:
        """Return the node's processes whose command lines begin with one of these."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(titles):
                    found[process.pid] = process
        return [*found.values()]

    def kill(self) -> None:
        """End everything on the node, as when its power fails."""
        if self._init.is_running():
            self._init.kill()
        self._holder.wait(30)
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def close(self) -> None:
        """Kill the node and remove its network."""
        self.kill()
        ip("netns", "del", self._namespace)


class RayCluster:
    """A head, which runs nothing of a run, and workers that come and go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bridge = f"tdrb-{os.getpid()}"
        self._nodes: list[RayNode] = []
        self.workers: list[RayNode] = []
        ip("link", "add", "name", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")

    def start(self, *, has_jobs: bool = False, storage: Path | None = None) -> None:
        """Start the head and two workers."""
        self._storage = storage
        self.head = self._make("head")
        self.head.start_head(has_jobs=has_jobs, storage=storage)
        for _ in range(2):
            self.add()

    def add(self) -> RayNode:
        """Start another worker, which claims to have a GPU."""
        worker = self._make(f"worker{len(self._nodes)}")
        worker.start_worker(self.head)
        self.workers.append(worker)
        return worker

    def restart_head(self) -> None:
        """Kill all of Ray on the head, and start it again with the tables that it had."""
        self.head.kill_ray()
        self.head.start_head(has_jobs=False, storage=self._storage)

    def at(self, address: str) -> RayNode:
        """Return the worker at an address."""
        return next(worker for worker in self.workers if worker.address == address)

    def kill(self, worker: RayNode) -> None:
        """Take a worker's power away."""
        worker.kill()
        self.workers.remove(worker)

    def close(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            with contextlib.suppress(subprocess.CalledProcessError):
                node.close()
        ip("link", "del", self._bridge)

    def _make(self, name: str) -> RayNode:
        node = RayNode(name, len(self._nodes) + 1, self._bridge, self._folder)
        self._nodes.append(node)
        return node


@contextlib.contextmanager
def ray_in(folder: Path, *, has_jobs: bool = False, storage: Path | None = None) -> Iterator[RayCluster]:
    """Have a Ray cluster with two workers run in a folder; `has_jobs`: it takes ``ray job submit``."""
    cluster = RayCluster(folder)
    try:
        cluster.start(has_jobs=has_jobs, storage=storage)
        yield cluster
    finally:
        cluster.close()


def missing() -> str:
    """Return what such a cluster lacks here, in words; empty if nothing."""
    lacking = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if os.geteuid():
        return "namespaces need root"
    probe = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return f"namespaces cannot be made here: {probe.stderr.decode().strip()}" if probe.returncode else ""


class Typed:
    """A command that runs on a node while the test does something to it."""

    def __init__(self, node: RayNode, words: Sequence[str | Path], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                node.words(*words), stdout=output, stderr=subprocess.STDOUT, env=_environment()
            )

    def output(self) -> str:
        """Return what it has printed."""
        return self._log.read_text()

    def wait_for(self, condition: Callable[[str], object], timeout_s: float = START_S) -> None:
        """Wait until its output meets a condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.output()):
            assert self.process.poll() is None or condition(self.output()), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended:\n{self.output()}") from None


def _environment() -> dict[str, str]:
    """Return this process's environment with its Python path, for what runs on nodes.

    Ray's own way is a head that asks for a token if this user's home has one, of which workers then know nothing.
    """
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    return {**os.environ, **with_token, "PYTHONPATH": os.pathsep.join(paths), "RAY_DEDUP_LOGS": "0"}


def _namespace_of(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    return ""
