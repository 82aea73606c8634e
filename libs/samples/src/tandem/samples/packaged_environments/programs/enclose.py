"""The first process of a sandbox for tasks of Harbor: namespaces, a root of its own, and its commands.

``python -I -S enclose.py SOCKET`` reads its settings from the socket, shuts itself in, and then runs what it is sent.
Each message has the descriptor of an order in JSON and, after that, those that the order is about. It answers with
``{"id": ..., "code": ...}``. Once the socket's other end is closed, or this process ends, the kernel ends all others.

The mounts are made in one namespace of users, and everything runs in a second one, where none of them can be changed.
Nothing there has a capability on the machine: root is the user that runs this, or 65534 where that is root itself.
It imports nothing beyond Python's own library, and nothing once it is shut in.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tarfile
import time  # noqa: F401  # tarfile looks it up where there are no files any more
from typing import Any

FAILED = 120
"""Exit code of a sandbox that could not be made; its answer says why."""
NOBODY = 65534
"""Root of a sandbox that root has started, as the machine knows it."""
_STAGE = "/tmp"  # any folder that is there; the mount hides it from this process alone
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "localtime", "mime.types")
"""Parts of ``/etc`` that a sandbox above the machine's own programs sees; with the network it sees those below, too."""
_NETWORK_SETTINGS = ("resolv.conf", "hosts", "nsswitch.conf", "ca-certificates", "services", "protocols")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_FOLDERS = (
    "/etc",
    "/tmp",
    "/var/tmp",
    "/root",
    "/home",
    "/run",
    "/opt",
    "/srv",
    "/mnt",
    "/var/log",
    "/var/lib",
    "/dev/shm",
)
_OPEN_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_ACCOUNTS = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)
"""To own, read and write all files there (chown, dac_override, fowner, fsetid, chroot), to end processes, and ports."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_MOST_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
    """Raise `OSError` if a call of the C library failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system."""
    words = [word.encode() for word in (source, target, kind)]
    check(_libc.mount(*words, flags, options.encode() or None), f"mount {kind} {target}".replace("  ", " "))


def show(source: int, root: str, name: str, owner: int) -> None:
    """Show a file or folder, given by its descriptor, with all that is mounted there, read-only."""
    path, target = f"/proc/self/fd/{source}", root + name
    make_place(root, name, owner, is_folder=os.path.isdir(path))
    mount(path, target, "", _MS_BIND | _MS_REC)
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    check(result, f"mount_setattr {name}")


def make_place(root: str, name: str, owner: int, *, is_folder: bool = True) -> None:
    """Make what a mount needs to stand on; the folders above are the sandbox's own."""
    *folders, last = name.strip("/").split("/")
    for folder in (*folders, last) if is_folder else folders:
        root = f"{root}/{folder}"
        if not os.path.isdir(root):
            os.mkdir(root, 0o755)
            os.chown(root, owner, owner)
    if not is_folder and not os.path.lexists(f"{root}/{last}"):
        os.close(os.open(f"{root}/{last}", os.O_CREAT | os.O_WRONLY))


def map_root(user: int, group: int) -> None:
    """Be root in a namespace of users that has just begun."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def shut_in(settings: dict[str, Any]) -> None:
    """Begin all namespaces, and become their first process; the process that was here waits for it and ends alike."""
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0
    if not is_root:
        check(_libc.unshare(_CLONE_NEWUSER), "unshare users")
        map_root(user, group)
    check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID), "unshare mounts and processes")
    child = os.fork()
    if child:
        check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    owner = NOBODY if is_root else 0
    make_root(settings, owner)
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else the maps are not its own to write
    spaces = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWUTS
    check(_libc.unshare(spaces | (0 if settings["network"] else _CLONE_NEWNET)), "unshare users, network and names")
    map_root(owner, owner)
    furnish(settings)
    give_up()


def make_root(settings: dict[str, Any], owner: int) -> None:
    """Replace the root by one in memory, above the machine's own programs or a folder with a root file system."""
    is_host = settings["root"] is None
    sources: dict[str, int] = {}
    names = [*settings["paths"]]
    if is_host:
        names_in_etc = _SETTINGS + (_NETWORK_SETTINGS if settings["network"] else ())
        names = [
            *(name for name in _SYSTEM if not os.path.islink(name)),
            *(f"/etc/{name}" for name in names_in_etc),
            *names,
        ]
    links = {name: os.readlink(name) for name in _SYSTEM if os.path.islink(name)} if is_host else {}
    for name in names:
        if os.path.exists(name):
            sources[name] = os.open(os.path.realpath(name), os.O_PATH)
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    lower = None if is_host else os.open(settings["root"], os.O_PATH)
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    size = f"size={settings['storage_bytes']},nr_inodes={settings['storage_files']},mode=755"
    mount("tmpfs", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, f"{size},uid={owner},gid={owner}")
    root = _STAGE
    if lower is not None:
        root = f"{_STAGE}/root"
        for name in ("root", "upper", "work"):
            os.mkdir(f"{_STAGE}/{name}", 0o755)
            os.chown(f"{_STAGE}/{name}", owner, owner)
        options = f"lowerdir=/proc/self/fd/{lower},upperdir={_STAGE}/upper,workdir={_STAGE}/work"
        mount("overlay", root, "overlay", _MS_NOSUID | _MS_NODEV, f"{options},userxattr")
    for name, target in links.items():
        os.symlink(target, root + name)
    for name, source in sources.items():
        show(source, root, name, owner)
    make_devices(root, devices, owner)
    make_place(root, "/proc", owner)
    mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for descriptor in (*sources.values(), *devices.values(), *(() if lower is None else (lower,))):
        os.close(descriptor)
    enter(root)


def make_devices(root: str, devices: dict[str, int], owner: int) -> None:
    """Make ``/dev``, with terminals of its own."""
    make_place(root, "/dev", owner)
    mount("tmpfs", f"{root}/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, f"size=64m,mode=755,uid={owner},gid={owner}")
    for name, source in devices.items():
        make_place(root, f"/dev/{name}", owner, is_folder=False)
        mount(f"/proc/self/fd/{source}", f"{root}/dev/{name}", "", _MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    make_place(root, "/dev/pts", owner)
    mount("devpts", f"{root}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def enter(root: str) -> None:
    """Make a folder the root, and take the old one away."""
    os.mkdir(f"{root}/.old", 0o755)
    call = _PIVOT_ROOT[os.uname().machine]
    check(_libc.syscall(call, root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    check(_libc.umount2(b"/.old", _MNT_DETACH), "umount")
    os.rmdir("/.old")


def furnish(settings: dict[str, Any]) -> None:
    """Make the folders that programs expect, bring up the loopback, and forbid further namespaces."""
    os.umask(0o022)
    for folder in (*_FOLDERS, *settings["folders"]):
        os.makedirs(folder, exist_ok=True)
    for folder in (*_OPEN_FOLDERS, *settings["folders"]):
        os.chmod(folder, 0o1777 if folder in _OPEN_FOLDERS else 0o777)
    for name, text in _ACCOUNTS.items():
        if not os.path.lexists(name):
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
    socket.sethostname("sandbox")
    if not settings["network"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
            (flags,) = struct.unpack_from("H", answer, 16)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    for name, text in (("sys/user/max_user_namespaces", "0"), ("self/oom_score_adj", "500")):
        with open(f"/proc/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def give_up() -> None:
    """Give up what the programs have no need of, and hide this process from them."""
    for capability in range(64):
        if capability not in _KEPT_CAPABILITIES and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    low = sum(1 << capability for capability in _KEPT_CAPABILITIES)
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, 0, 0, 0, 0)
    check(_libc.capset(header, data), "capset")
    _libc.syscall(_KEYCTL[os.uname().machine], _KEYCTL_JOIN_SESSION_KEYRING, None)  # a new one, where there are any
    check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")  # another user would have undone it


class OrderServer:
    """Runs orders, and answers when each has ended."""

    def __init__(self, link: socket.socket, settings: dict[str, Any]) -> None:
        """Serve a socket."""
        self._link = link
        self._limits = settings["limits"]
        self._running: dict[int, int] = {}
        """The id of each order that runs, by its process."""

    def serve(self) -> None:
        """Run orders until the other end of the socket is closed."""
        tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]  # names would be looked up by the sandbox's own
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(reader, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(reader, _MOST_BYTES)
                    self._reap()
                elif not self._take():
                    return

    def answer(self, number: int, **more: Any) -> None:
        """Send an answer."""
        with contextlib.suppress(OSError):
            self._link.sendall(json.dumps({"id": number, **more}).encode())

    def _reap(self) -> None:
        """Answer for processes that have ended; others need no answer."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if (number := self._running.pop(process, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self.answer(number, code=code if code >= 0 else 128 - code)

    def _take(self) -> bool:
        """Take an order; return whether there was one."""
        order, descriptors = receive(self._link)
        if order is None:
            return False
        try:
            if order["kind"] == "kill":
                for process, number in self._running.items():
                    if number == order["of"]:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process, signal.SIGKILL)
                return True
            child = os.fork()
            if child == 0:
                self._become(order, descriptors)
            self._running[child] = order["id"]
        except OSError as error:
            self.answer(order["id"], code=FAILED, error=str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _become(self, order: dict[str, Any], descriptors: list[int]) -> None:
        """Do what the order says, in a process of its own. Never returns."""
        errors = descriptors[-1]
        code = 126
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for name in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(name, signal.SIG_DFL)
            for name, value in self._limits.items():
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
            if order["kind"] == "run":
                run(order, *descriptors)
            elif order["kind"] == "unpack":
                unpack(order["path"], descriptors[0])
            else:
                pack(order["path"], descriptors[0])
            code = 0
        except FileNotFoundError as error:
            code = 127
            os.write(errors, f"{error.filename}: {error.strerror}\n".encode(errors="replace"))
        except Exception as error:  # all of them are for the sender of the order
            os.write(errors, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(code)


def run(order: dict[str, Any], output: int, errors: int) -> None:
    """Become a program."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.chdir(order["cwd"])
    os.closerange(3, 1 << 16)
    os.execve(order["argv"][0], order["argv"], order["env"])


def unpack(path: str, archive: int) -> None:
    """Write the files of an archive below a folder."""
    os.makedirs(path, exist_ok=True)
    with os.fdopen(os.dup(archive), "rb") as file, tarfile.open(fileobj=file, mode="r:") as files:
        files.extractall(path, filter="fully_trusted")


def pack(path: str, archive: int) -> None:
    """Write a file, or a folder's, to an archive: its names are relative to the path, the path itself is ``.``."""
    with os.fdopen(os.dup(archive), "wb") as file, tarfile.open(fileobj=file, mode="w:") as files:
        files.add(os.path.realpath(path), ".")


def receive(link: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next order and its descriptors; None at the end."""
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    message, ancillary, _, _ = link.recvmsg(16, room)
    if not message:
        return None, []
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    first, *remaining = descriptors
    with os.fdopen(first, "rb") as file:
        file.seek(0)
        return json.load(io.TextIOWrapper(file, "utf-8")), remaining


def main() -> None:
    """Shut this process in, and run what it is sent."""
    link = socket.socket(fileno=int(sys.argv[1]))
    settings, _ = receive(link)
    if settings is None:
        return
    enclosure = OrderServer(link, settings)
    try:
        shut_in(settings)
        nothing = os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.close(nothing)
    except OSError as error:
        enclosure.answer(0, code=FAILED, error=str(error))
        os._exit(FAILED)
    enclosure.answer(0, code=0)
    enclosure.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
