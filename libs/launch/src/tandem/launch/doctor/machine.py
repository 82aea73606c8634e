"""Checks of the machine: shared memory, limits, clocks, disks; they cannot hang, and need no torch."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tandem.common import descriptors
from tandem.common.memory import available_bytes
from tandem.launch.doctor.findings import DoctorFinding

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
