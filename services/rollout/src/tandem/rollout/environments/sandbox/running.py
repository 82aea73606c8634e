"""Untrusted Python programs, run shut in: without network, in a root of their own, within limits.

Each program is a process tree in Linux namespaces that an unprivileged user may begin
(`tandem.rollout.environments.sandbox.program`); no daemon is needed. Killing its starter ends the tree, whatever it has
forked and whatever signals it ignores. Limits of memory are for each of its processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tandem.common.errors import ConfigError
from tandem.rollout.environments.sandbox import program

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
"""Paths that programs see in addition to the interpreter's folder, as far as they exist."""
_UNPRIVILEGED = 65534
_BLOCK = 1 << 16
_STARTING_S = 10.0
"""Longest time until a process has begun its namespaces."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one program."""

    time_s: float = 5.0
    """Seconds from its start to its end."""
    memory_mb: int = 512
    """Address space of each of its processes."""
    disk_mb: int = 32
    """All of its files, which lie in memory."""
    processes: int = 16
    files: int = 256
    """Files that are open, and files that exist."""
    output_bytes: int = 1 << 20
    """Size of its standard output, and of its standard error."""


class SandboxedRun(msgspec.Struct, frozen=True):
    """The end of a program."""

    ending: Literal["exit", "time", "output"]
    """Whether it ended by itself, took too long, or wrote too much."""
    exit_code: int
    """128 and more for a signal; -1 if it was ended."""
    output: str
    errors: str


def run_program(source: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxedRun:
    """Run a program to its end, or to that of its limits."""
    limits = limits or SandboxLimits()
    orders = {
        "memory_bytes": limits.memory_mb << 20,
        "disk_bytes": limits.disk_mb << 20,
        "processes": limits.processes,
        "files": limits.files,
        "cpu_s": int(limits.time_s) + 1,
    }
    ours, theirs = socket.socketpair()
    with ours, theirs, _memory_file(source) as source_fd, _memory_file(stdin) as stdin_fd:
        process = _start(theirs.fileno(), source_fd, stdin_fd)
        theirs.close()
        try:
            with contextlib.suppress(OSError):  # it has ended, and says why
                ours.sendall(program.write_orders(orders, _list_paths()).encode())
                ours.settimeout(_STARTING_S)
                if ours.recv(1) == b"m" and _map_users(process.pid):
                    ours.sendall(b"m")
            return _await_end(process, limits)
        finally:
            process.kill()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
            process.wait()


def check_machine() -> None:
    """Raise `ConfigError` unless a program can be shut in here."""
    run = run_program("print(1)", limits=SandboxLimits(time_s=30.0))
    if run.output != "1\n":
        raise ConfigError(f"this machine runs no shut-in program: {run.errors.strip() or run.ending}")


def _start(orders_fd: int, source_fd: int, stdin_fd: int) -> subprocess.Popen[bytes]:
    """Start the program that shuts itself in."""
    return subprocess.Popen(
        [_interpreter(), "-I", "-S", program.__file__, str(orders_fd), str(source_fd)],
        stdin=stdin_fd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        pass_fds=(orders_fd, source_fd),
        start_new_session=True,
    )


def _map_users(pid: int) -> bool:
    """Write the map of users of a process that has begun a namespace of them; return whether that was possible.

    Root gets an unprivileged user for the program: the limit of processes does not hold for root.
    """
    user, group, inside = os.geteuid(), os.getegid(), program.INSIDE
    maps = [(f"{inside} {user} 1", f"{inside} {group} 1", True)]
    if user == 0:
        pair = f"0 0 1\n{inside} {_UNPRIVILEGED} 1"
        maps.insert(0, (pair, pair, False))
    for users, groups, denies in maps:
        try:
            if denies:
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            Path(f"/proc/{pid}/uid_map").write_text(users)
            Path(f"/proc/{pid}/gid_map").write_text(groups)
        except OSError:
            continue
        return True
    return False


def _await_end(process: subprocess.Popen[bytes], limits: SandboxLimits) -> SandboxedRun:
    """Read what a program writes until it ends, or until a limit ends it."""
    deadline = time.monotonic() + limits.time_s
    assert process.stdout is not None
    assert process.stderr is not None
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    output, errors = texts.values()
    ending = "exit"
    with selectors.DefaultSelector() as selector:  # unlike `select.select`, it takes descriptors of any number
        for file in texts:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map() and ending == "exit":
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                block = os.read(key.fd, _BLOCK)
                texts[key.fd] += block
                if not block:
                    selector.unregister(key.fd)
                if len(texts[key.fd]) > limits.output_bytes:
                    ending = "output"
            if not ready:
                ending = "time"
    if ending == "exit":
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
            return SandboxedRun("exit", code, _decode(output), _decode(errors))
        except subprocess.TimeoutExpired:
            ending = "time"
    return SandboxedRun("output" if ending == "output" else "time", -1, _decode(output), _decode(errors))


def _decode(text: bytearray) -> str:
    return text.decode(errors="replace")


@functools.cache
def _interpreter() -> str:
    """Return the interpreter itself, where a virtual environment has a link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def _list_paths() -> list[str]:
    """Return what programs see; nothing twice."""
    paths = [path for path in _SYSTEM if os.path.exists(path)]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if any(Path(prefix).is_relative_to(path) for path in paths) else [*paths, prefix]


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator[int]:
    """Yield the descriptor of an unnamed file with a text."""
    descriptor = os.memfd_create("tandem")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(text.encode(errors="surrogatepass"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
