"""The order of checks on a node: the machine, then steps in another process, then the network.

The process of the steps is given up when it dies or hangs.

The checks of the machine (shared memory, limits, clocks, disks) cannot hang, and need no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.common import descriptors
from tandem.common.memory import available_bytes
from tandem.config import Config
from tandem.launch.doctor.network import measure_loopback, measure_peer
from tandem.launch.doctor.steps import DoctorFinding, DoctorStep, OutputLine, StepOutcome

_GB = 1e9
_SHM = Path("/dev/shm")
_LEAST_SHM_GB = 1.0
"""Containers often have 64 MB, which is less than the weights of any model worth training."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_INFINIBAND = Path("/sys/class/infiniband")
_LEAST_DISK_GB = 10.0
_CLOCK_S = 0.2
_CLOCK_DRIFT_S = 0.05
_UNSYNCHRONISED = 0x40
"""``STA_UNSYNC`` of ``adjtimex``."""


def look_at_machine(folder: Path) -> Iterator[DoctorFinding]:
    """Yield the findings about this machine, and about the disk of a folder, which need not exist yet."""
    yield _look_at_python()
    yield _look_at_memory()
    yield _look_at_shared_memory()
    yield _look_at_huge_pages()
    yield _look_at_files()
    yield _look_at_locked_memory()
    yield _look_at_clocks()
    yield _look_at_clock_sync()
    yield _look_at_disk(folder)


def _look_at_python() -> DoctorFinding:
    says = f"{platform.python_version()} ({sys.executable}), {os.cpu_count()} cores, {platform.machine()}"
    return DoctorFinding("Python", "ok", says)


def _look_at_memory() -> DoctorFinding:
    return DoctorFinding("memory", "ok", f"{available_bytes() / _GB:.1f} GB available")


def _look_at_shared_memory() -> DoctorFinding:
    try:
        disk = shutil.disk_usage(_SHM)
    except OSError as error:
        return DoctorFinding("shared memory", "missing", f"{_SHM}: {error.strerror}", "mount a tmpfs there")
    says = f"{_SHM} has {disk.total / _GB:.1f} GB, {disk.free / _GB:.1f} GB free"
    if disk.free < _LEAST_SHM_GB * _GB:
        advice = "weights on CPUs are shared there: give the container more, as by docker run --shm-size"
        return DoctorFinding("shared memory", "warning", says, advice)
    return DoctorFinding("shared memory", "ok", says)


def _look_at_huge_pages() -> DoctorFinding:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return DoctorFinding("huge pages", "skipped", "the kernel does not say")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        advice = f"echo madvise > {_HUGE_PAGES}, as root: memory is copied and touched faster"
        return DoctorFinding("huge pages", "warning", "switched off", advice)
    return DoctorFinding("huge pages", "ok", f"transparent: {mode}")


def _look_at_files() -> DoctorFinding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{_limit(hard)} files and connections may be open in a process of a run, which raises its limit to that"
    if descriptors.describe_low_limit():
        advice = f"ulimit -Hn {descriptors.LEAST}, or LimitNOFILE= of the unit"
        return DoctorFinding("open files", "warning", says, advice)
    return DoctorFinding("open files", "ok", says)


def _look_at_locked_memory() -> DoctorFinding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return DoctorFinding("locked memory", "ok", "no limit")
    says = f"{soft / 1e6:.3g} MB a process"
    if _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        return DoctorFinding("locked memory", "warning", says, "NCCL over InfiniBand needs more: ulimit -l unlimited")
    return DoctorFinding("locked memory", "ok", f"{says}; there is no InfiniBand, which would need more")


def _look_at_clocks() -> DoctorFinding:
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_S)
    passed = time.monotonic() - steady
    drift = (time.time() - wall) - passed
    resolution = time.get_clock_info("monotonic").resolution
    says = f"wall and monotonic differ by {abs(drift) * 1e3:.1f} ms after {passed:.1f} s; resolution {resolution:g} s"
    if abs(drift) > _CLOCK_DRIFT_S or resolution > 1e-3:
        return DoctorFinding(
            "clocks", "warning", says, "the wall clock is being set: logs of nodes may not be comparable"
        )
    return DoctorFinding("clocks", "ok", says)


def _look_at_clock_sync() -> DoctorFinding:
    """Ask the kernel whether its clock is synchronised; asking takes no privilege."""
    name = "clock sync"
    timex = (ctypes.c_byte * 512)()  # ``struct timex`` with room to spare; its first field, modes, is 0: change nothing
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        state = -1
    if state == -1:
        return DoctorFinding(name, "skipped", "the kernel does not say")
    status = ctypes.c_int.from_buffer(timex, _find_status_offset()).value
    if status & _UNSYNCHRONISED:
        advice = "on several nodes, run chrony or systemd-timesyncd on the hosts"
        return DoctorFinding(name, "warning", "nothing keeps the clock right (NTP)", advice)
    return DoctorFinding(name, "ok", "the kernel's clock is synchronised")


def _find_status_offset() -> int:
    """Return the offset of ``status`` in ``struct timex``: after modes, which is padded, and four longs."""
    word = ctypes.sizeof(ctypes.c_long)
    return word + 4 * word


def _look_at_disk(folder: Path) -> DoctorFinding:
    absolute_folder = folder.absolute()
    existing_folder = next(path for path in (absolute_folder, *absolute_folder.parents) if path.exists())
    try:
        disk = shutil.disk_usage(existing_folder)
    except OSError as error:
        return DoctorFinding("disk", "missing", f"{existing_folder}: {error.strerror}", "choose another folder")
    says = f"{disk.free / _GB:.1f} GB free for {absolute_folder}"
    if not os.access(existing_folder, os.W_OK):
        return DoctorFinding("disk", "missing", f"{existing_folder} cannot be written", "choose another folder")
    if disk.free < _LEAST_DISK_GB * _GB:
        return DoctorFinding(
            "disk", "warning", says, "checkpoints and samples need room: see logger.samples and keep_top_k"
        )
    return DoctorFinding("disk", "ok", says)


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY or number > math.pow(2, 40) else str(number)


_CLOCKS_APART_S = 1.0
_GPU_FINDINGS = ("CUDA", "copy kernel", "CUDA IPC", "NCCL", "GPU to GPU")
_GONE_S = 5.0
"""Longest wait for a killed process: one that hangs in a driver cannot be killed."""
_CHUNK = 1 << 16


def look(
    config: Config | None, peer: str | None, deadline_s: float, steps: Mapping[str, DoctorStep], program: Sequence[str]
) -> Iterator[StepOutcome]:
    """Yield findings as they arrive; a process that runs `program` carries out the steps."""
    folder = Path("." if config is None else config.logger.log_dir)
    for finding in look_at_machine(folder):
        yield StepOutcome((finding,))
    # Processes of a run share the cores; the default of cluster.links.memory was measured with one thread.
    threads = 1 if config is None else config.cluster.threads_per_process or 1
    yield from carry_out_apart(steps, threads, deadline_s, program)
    yield _look_at_network(peer)


def list_needed(config: Config | None) -> frozenset[str]:
    """Return the names of findings that a configuration needs on a node."""
    if config is None:
        return frozenset()
    needed = {"torch", "memory copy", "shared memory", "disk"}
    if config.generates and config.policy.generation.kind.module:
        needed.add(config.policy.generation.kind.title)
    if config.policy.megatron_cfg.enabled:
        needed.add("Megatron-Core")
    if config.cluster.gpus_per_node:  # without a GPU those are skipped, and the run takes the CPU
        needed.update(_GPU_FINDINGS)
    return frozenset(needed)


def carry_out_apart(
    steps: Mapping[str, DoctorStep], num_threads: int, deadline_s: float, program: Sequence[str]
) -> Iterator[StepOutcome]:
    """Yield the outcome of each step as it arrives from a process that runs `program`.

    A step fails if its process dies, or if it takes longer than `deadline_s`. A new process then carries out the
    others, but for those that need the step that has failed.
    """
    steps_left = list(steps)
    while steps_left:
        reason = "it did not begin"
        with _Child(program, num_threads, steps_left) as child:
            while steps_left:
                line = child.read(deadline_s)
                if line is None:
                    reason = child.explain_end(deadline_s)
                    break
                if line.outcome is not None:
                    yield line.outcome
                    steps_left.remove(line.step)
        if not steps_left:
            return
        failed = steps_left.pop(0)
        yield StepOutcome((DoctorFinding(steps[failed].finding, "missing", reason),))
        for name in [name for name in steps_left if failed in steps[name].needs]:
            yield StepOutcome((DoctorFinding(steps[name].finding, "skipped", f"{steps[failed].finding} has failed"),))
            steps_left.remove(name)


def _look_at_network(peer: str | None) -> StepOutcome:
    rate = measure_loopback() if peer is None else measure_peer(peer)
    route = "within this host" if peer is None else f"to {peer}"
    says = f"{rate.sent:.2f} GB/s sent, {rate.received:.2f} GB/s received {route}, one TCP connection"
    if peer is None:
        advice = "between nodes: coordinator doctor --listen HOST:PORT there, --peer HOST:PORT here"
        return StepOutcome((DoctorFinding("network", "ok", says, advice),))
    apart = DoctorFinding("clock of peer", "ok", f"{abs(rate.clock_ahead_s) * 1e3:.1f} ms from this one's")
    if abs(rate.clock_ahead_s) > _CLOCKS_APART_S:
        apart = DoctorFinding("clock of peer", "warning", apart.says, "run chrony or systemd-timesyncd on both")
    return StepOutcome((DoctorFinding("network", "ok", says), apart), {"network": rate.slower})


class _Child:
    """A process that carries out steps; leaving the context kills it and its children."""

    def __init__(self, program: Sequence[str], num_threads: int, names: Sequence[str]) -> None:
        self._said, theirs = os.pipe()
        os.set_blocking(self._said, False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is left
        self._rest = b""
        self._is_late = False
        try:
            self._process = subprocess.Popen(
                [*program, str(theirs), str(num_threads), *names],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            )
        finally:
            os.close(theirs)

    def read(self, deadline_s: float) -> OutputLine | None:
        """Return the next line; None if the process has ended, or sends nothing for `deadline_s`."""
        until = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._said, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    self._is_late = True
                    return None
                data = os.read(self._said, _CHUNK)
                if not data:
                    return None
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=OutputLine)

    def explain_end(self, deadline_s: float) -> str:
        """Return the reason for which no further line came."""
        if self._is_late:
            return f"hangs: no answer for {deadline_s:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        text = os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")
        last = (text.strip().splitlines() or ["it said nothing"])[-1]
        return f"ended its process (exit code {self._process.returncode}): {last[:300]}"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        os.close(self._said)
        self._output.close()
