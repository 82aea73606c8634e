"""A Slurm of two nodes on this machine, all of it in a folder: munge, the controller and two node daemons."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.harness.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2")
_START_S = 30.0
_CONFIGURATION = """\
ClusterName=tandem
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout=6
KillWait=5
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""
"""A node that has been silent for `SlurmdTimeout` is down. A job that lost one begins again `cred_expire` later."""


class Slurm:
    """The daemons, and what one types to see what they do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons and wait for both nodes."""
        self.folder.chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()
        of_nodes = free_port(len(NODES))
        ports = (free_port(), *range(of_nodes, of_nodes + len(NODES)))
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(host=socket.gethostname(), ports=ports, user=_user_name(), folder=self.folder)
        )
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{option}={self.folder / name}" for option, name in {**files, "seed-file": "munge.seed"}.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_for((self.folder / "munge.sock").exists, "munge's socket", _START_S)
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), "both nodes to be idle", _START_S)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, called=node)

    def kill_node(self, node: str) -> list[psutil.Process]:
        """Kill a node's daemon, and everything that runs on it, as when its power fails; return what was killed."""
        name = f"SLURMD_NODENAME={node}"
        killed = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_step = process.name() == "slurmstepd" and self._is_of(process, node)
                if is_step or name in Path(f"/proc/{process.pid}/environ").read_text().split("\0"):
                    process.kill()
                    killed.append(process)
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(_START_S)
        return killed

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        words = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def state_of(self, job: str) -> str:
        """Return the state of a job, such as ``RUNNING`` or ``COMPLETED``."""
        fields = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(field.removeprefix("JobState=") for field in fields if field.startswith("JobState="))

    def run(self, *words: str) -> str:
        """Run one of Slurm's commands; return what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """End all daemons, and jobs with them."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--quiet", "--user", _user_name())
        for node in NODES:
            if node in self._daemons:
                self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            daemon.wait(_START_S)

    def _start(self, program: str, *arguments: str, called: str = "") -> None:
        with (self.folder / f"{called or program}.out").open("ab") as out:
            self._daemons[called or program] = subprocess.Popen(
                [shutil.which(program) or program, *arguments], env=self.environment, stdout=out, stderr=out
            )

    def _is_of(self, process: psutil.Process, node: str) -> bool:
        """Tell whether a step's daemon is a child of this node's, or has lost its parent since it was."""
        opened = {file.path for file in process.open_files()}
        return any(f"slurmd.{node}." in path or f"spool.{node}" in path for path in opened) or any(
            f"SLURMD_NODENAME={node}" in Path(f"/proc/{child.pid}/environ").read_text() for child in process.children()
        )


@contextlib.contextmanager
def slurm_in(folder: Path) -> Iterator[Slurm]:
    """Have a Slurm run in a folder."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait for a condition, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.1)


def _user_name() -> str:
    return psutil.Process().username()
