"""The program that shuts itself in and becomes an untrusted one: namespaces, its own root, limits.

``python -I -S program.py ORDERS PROGRAM`` reads its limits (`read_orders`) from the socket ORDERS. It begins
namespaces of users, processes, mounts, network, IPC and names, and asks there for the users' map. Its child is the
first process there: once that ends, or is killed, the kernel ends all others. It sees the interpreter's files,
read-only, and a folder in memory of bounded size. It imports nothing beyond Python's own library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

FAILED = 120
"""Exit code of a sandbox that could not be made; its standard error says why."""
INSIDE = 1000
"""User within the sandbox."""
SCRATCH = "/scratch"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MOUNT_FLAGS = 15
"""Flags of a mount that statvfs tells of: read-only, no set-user-id, no devices, no programs."""
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def write_orders(limits: dict[str, int], paths: list[str]) -> str:
    """Return limits and the paths to show as a text; reading JSON would take as long as all else."""
    return "\n".join([" ".join(f"{name}={value}" for name, value in limits.items()), *paths])


def read_orders(text: str) -> tuple[dict[str, int], list[str]]:
    """Return what `write_orders` was given."""
    first, *paths = text.split("\n")
    pairs = (word.split("=") for word in first.split())
    return {name: int(value) for name, value in pairs}, paths


def check(result: int, call: str) -> None:
    """Raise `OSError` if a call of the C library failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system."""
    words = [word.encode() for word in (source, target, kind)]
    check(_libc.mount(*words, flags, options.encode() or None), f"mount {target}")


def shut_in(orders: int) -> None:
    """Begin namespaces, and become their first process; the process that was here waits for it and ends alike."""
    spaces = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    check(_libc.unshare(spaces), "unshare")
    os.write(orders, b"m")
    if os.read(orders, 1) != b"m":
        raise OSError("the map of users cannot be written")
    child = os.fork()
    if child:
        os.close(orders)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def make_root(limits: dict[str, int], paths: list[str]) -> None:
    """Replace the root by a folder in memory that shows the interpreter's files, read-only."""
    root = "/tmp"  # any folder that is there; the mount hides it from this process alone
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={limits['disk_bytes']},nr_inodes={limits['files']}")
    for path in paths:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(path, target, "", _MS_BIND | _MS_REC)
        locked_flags = os.statvfs(path).f_flag & _MOUNT_FLAGS  # the kernel lets none of them be taken away
        mount("none", target, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | locked_flags)
    os.mkdir(root + SCRATCH, 0o777)
    os.chmod(root + SCRATCH, 0o777)
    os.mkdir(root + "/.old")
    call = _PIVOT_ROOT[os.uname().machine]
    check(_libc.syscall(call, root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    check(_libc.umount2(b"/.old", _MNT_DETACH), "umount")
    os.rmdir("/.old")
    os.chdir(SCRATCH)


def limit(limits: dict[str, int]) -> None:
    """Give up all privileges, and bound what the program may take."""
    for name, key in (
        ("AS", "memory_bytes"),
        ("CPU", "cpu_s"),
        ("FSIZE", "disk_bytes"),
        ("NPROC", "processes"),
        ("NOFILE", "files"),
    ):
        value = limits[key]
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setsid()
    check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")  # another user would have undone it


def main() -> None:
    """Shut this process in, and become the program."""
    orders, program = map(int, sys.argv[1:])
    limits, paths = read_orders(os.read(orders, 1 << 20).decode())
    try:
        shut_in(orders)
        make_root(limits, paths)
        with open("program.py", "wb") as file:
            file.write(os.pread(program, os.fstat(program).st_size, 0))
        limit(limits)
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(FAILED)
    os.close(orders)
    os.close(program)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "program.py"], {"PATH": "/usr/bin:/bin", "HOME": SCRATCH})


if __name__ == "__main__":
    main()
