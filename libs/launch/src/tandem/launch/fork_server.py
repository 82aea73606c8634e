"""The fork server: a process that has imported the services' modules, and forks the services.

Importing torch and transformers takes each process seconds of a core. The fork server imports them once, ahead of the
first service, and all services share the imported memory. Each service then starts in milliseconds, replacements
included.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NoReturn

import msgspec
from setproctitle import setproctitle

from tandem.common import gc_tuning, signals
from tandem.common.descriptors import wait_to_read
from tandem.common.errors import DeadlineExceeded, ServiceLost
from tandem.common.process_lifetime import count_processor_seconds, die_with, is_stopped, reaper
from tandem.launch.child import KILLED_S, ForkedChild

_NAME = "the process that forks services"
_ATTEMPTS = 2
_FORK_S = 30.0
"""Longest time of a fork once all is imported; a fork server that takes longer hangs, and is replaced. A fork takes
milliseconds, but on a machine with much else to do its three processes may each wait seconds for a core."""
_POLL_S = 0.1
_BUSY_TIMES = 10
"""How many times as long an import may take on a machine that is busy with much else."""
_LEAST_WORK_S = 1.0
"""Time in which a process that works gets a hundredth of a second of some processor, however busy all are."""
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""Environment of compute threads, read when torch is imported: they sleep when idle. Training and generation take turns
on the same cores, and spinning threads would take those from the one at work.

They spin for some 100 microseconds first, 3,000 times, since an operator takes less than to wake a thread: with none at
all two threads generate no faster than one. With 20,000 a step gains little, and takes twice as long again as soon as
another program wants a core: then one spins whose partner has none (`benchmarks/test_step.py` has both)."""
_WHILE_IMPORTING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment while importing: otherwise a question to torch about GPUs would start using one, and forks could not."""
_GPU_MEMORY = "/dev/nvidia-uvm"
"""Device file that CUDA opens when a process starts to use a GPU."""


class SpawnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spawn spec of a forked process, as if it were started by a command."""

    module: str
    """Name of the module; its ``main`` gets the arguments, and returns the exit code."""
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    parent: int
    """Process id of its parent: the owner of the fork server, or a process above that, which adopts orphans."""
    heeds_signals: bool
    """Whether SIGTERM or Ctrl-C ends it, from the start."""


class ServiceForkServer:
    """The process that services are forked from; it ends with this one. Forked services are children of this process.

    Or they are children of a process above, if that adopts orphans. Create the server before this process has threads
    and much memory, because all forked services inherit both.
    """

    def __init__(self, preload: Callable[[], None], deadline_s: float) -> None:
        """Fork it and have it call `preload`; an exception there is left to the process that needs the missing module.

        Args:
            preload: imports modules; must not start threads or touch a device.
            deadline_s: longest time of a start, which for the first one includes importing.

        """
        self._preload = preload
        self._deadline_s = deadline_s
        self._meanwhile: Callable[[], object] = lambda: None
        self._has_answered = False
        """Whether the current server has answered before, and so has imported all."""
        self._process, self._orders = self._begin()

    def __enter__(self) -> ServiceForkServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextlib.contextmanager
    def call_meanwhile(self, do: Callable[[], object]) -> Iterator[None]:
        """Call `do` again and again within the block while waiting for a start, which may have to import first."""
        self._meanwhile = do
        try:
            yield
        finally:
            self._meanwhile = lambda: None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        out: IO[bytes],
        errors: IO[bytes] | None = None,
        *,
        heeds_signals: bool = True,
        keys: bytes = b"",
        parent: int = 0,
    ) -> ForkedChild:
        """Run the ``main`` of a module in a new process, with this one's folder and environment.

        It is a child of this process, or of `parent`, a process above this one that adopts orphans.

        Without `heeds_signals`, signals do not end it unless `main` handles them. If there are `keys`, it gets them in
        a private descriptor; its number follows the arguments: ``--key-fd N``.

        Raises:
            ServiceLost: the fork server has ended.
            DeadlineExceeded: the fork server did not answer in time.

        """
        spawn_spec = SpawnSpec(
            module=module,
            arguments=tuple(arguments),
            folder=os.getcwd(),
            environment=dict(os.environ),
            parent=parent or os.getpid(),
            heeds_signals=heeds_signals,
        )
        code = 0
        for _ in range(_ATTEMPTS):
            pid = self._ask_for(spawn_spec, out, errors or out, keys)
            if not self._has_answered:
                code = self._end()  # a user may have killed or stopped it, which must not prevent starts
                self._process, self._orders = self._begin()
            if pid is not None:
                return ForkedChild(pid)
        raise ServiceLost(_NAME, f"starting {module}", f"it ended repeatedly, last with code {code}")

    def close(self) -> None:
        """End it; forked services live on."""
        self._end()

    def _ask_for(self, spawn_spec: SpawnSpec, out: IO[bytes], errors: IO[bytes], keys: bytes) -> int | None:
        """Return the id of the new process; None if there is none, because the fork server is gone or hangs.

        A server that is to be replaced has not answered.
        """
        was_there, self._has_answered = self._has_answered, False
        with (
            contextlib.suppress(OSError),
            reaper() if spawn_spec.parent == os.getpid() else contextlib.nullcontext(),
            _write_in_memory("birth", msgspec.json.encode(spawn_spec)) as order,
            _write_in_memory("keys", keys) as keys_file,
        ):
            descriptors = [file.fileno() for file in (order, out, errors, keys_file)]
            socket.send_fds(self._orders, [b"."], descriptors if keys else descriptors[:-1])
            if was_there:
                is_in_time = self._answers_within(min(_FORK_S, self._deadline_s))
            else:
                is_in_time = self._answers_within(self._deadline_s, is_importing=True)
            if not is_in_time and not was_there and not is_stopped(self._process.pid):
                problem = f"it did not fork {spawn_spec.module} within {self._deadline_s:g} s"
                raise DeadlineExceeded(_NAME, "importing modules", problem)
            if not is_in_time:
                # A process that cannot answer any more ends; one that has just answered must not be started twice.
                self._orders.shutdown(socket.SHUT_RD)
            if answer := self._orders.recv(32):
                self._has_answered = is_in_time
                return int(answer)
        return None

    def _answers_within(self, patience_s: float, *, is_importing: bool = False) -> bool:
        """Wait for an answer; return whether there is one, or the end of the fork server.

        A server that is importing has longer while processors work for it: others may take most of their time.
        """
        began = time.monotonic()
        deadline, worked_s = began + patience_s, count_processor_seconds(self._process.pid)
        while not wait_to_read(self._orders, min(_POLL_S, patience_s)):
            self._meanwhile()
            now = time.monotonic()
            if now > deadline:
                before_s, worked_s = worked_s, count_processor_seconds(self._process.pid)
                if not is_importing or worked_s <= before_s or now > began + _BUSY_TIMES * patience_s:
                    return False
                deadline = now + max(_LEAST_WORK_S, patience_s / _BUSY_TIMES)
        return True

    def _end(self) -> int:
        self._orders.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a machine has much else to do: it ends all the same
            return self._process.wait(KILLED_S)
        return -signal.SIGKILL

    def _begin(self) -> tuple[ForkedChild | subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        for stream in (sys.stdout, sys.stderr):  # unwritten output would be written twice
            stream.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return ForkedChild(pid), ours
        try:
            serve(theirs.fileno(), owner, self._preload)
        finally:
            os._exit(1)


def _write_in_memory(name: str, text: bytes) -> IO[bytes]:
    """Return a file that only processes with its descriptor can read."""
    file = os.fdopen(os.memfd_create(name), "w+b")
    file.write(text)
    file.seek(0)
    return file


def serve(orders_fd: int, owner: int, preload: Callable[[], None]) -> NoReturn:
    """Fork processes on the owner's command, until it ends or closes its socket."""
    gc.freeze()  # leave the owner's garbage alone: collecting it here would close files, for example
    die_with(owner)
    _forget_owner(orders_fd)
    setproctitle("coordinator: forks services")
    os.environ.update({**_ENVIRONMENT, **_WHILE_IMPORTING, **os.environ})
    with gc_tuning.pause_collection(), contextlib.suppress(Exception):
        preload()
    # A library used a GPU during import, or the owner did before: start again without, and let each service import.
    if _uses_a_gpu() or not _may_forks_use_a_gpu():
        os.set_inheritable(orders_fd, True)
        os.execv(sys.executable, [sys.executable, "-m", "tandem.launch.fork_server", str(orders_fd), str(owner)])
    _release_nothing_imported()
    gc.freeze()  # otherwise garbage collection would make each child copy the imported memory
    orders = socket.socket(fileno=orders_fd)
    while True:
        word, descriptors, *_ = socket.recv_fds(orders, 1, 4)
        if not word:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() == 0:
                _become(orders, between, *descriptors)
            os._exit(0)  # then its child becomes that of the process that adopts orphans
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _release_nothing_imported() -> None:
    """Have no fork release, when it ends, what was imported here: its memory goes with it.

    torch takes each operator back that a library has defined, which takes a process a tenth of a second.
    """
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _uses_a_gpu() -> bool:
    return any(os.path.realpath(entry.path) == _GPU_MEMORY for entry in os.scandir("/proc/self/fd"))


def _may_forks_use_a_gpu() -> bool:
    """Ask torch, in a fork, whether it refuses to use a GPU there.

    It does if any process above has used one, whose open files are no longer here, or has only counted them.
    """
    torch = sys.modules.get("torch")
    is_refused = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    if is_refused is None:  # torch is not imported, or not one for GPUs
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(bool(is_refused())))
    return os.waitpid(pid, 0)[1] == 0


def _forget_owner(keep_fd: int) -> None:
    """Release what came with the fork: files, sockets, the terminal, and signal handlers."""
    os.closerange(3, keep_fd)
    os.closerange(keep_fd + 1, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    signals.leave_to_coordinator()  # Ctrl-C in a terminal reaches all processes started there
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _become(
    orders: socket.socket, between: int, order: int, out: int, errors: int, keys: int | None = None
) -> NoReturn:
    """Run the requested process to its end."""
    code = 1
    try:
        with os.fdopen(order, "rb") as file:
            spawn_spec = msgspec.json.decode(file.read(), type=SpawnSpec)
        while (parent := os.getppid()) == between:
            time.sleep(0.0005)
        if parent != spawn_spec.parent:  # the parent has ended
            os._exit(1)
        if keys is not None:
            spawn_spec = msgspec.structs.replace(spawn_spec, arguments=(*spawn_spec.arguments, "--key-fd", str(keys)))
        os.dup2(out, 1)
        os.dup2(errors, 2)
        orders.send(str(os.getpid()).encode())
        for descriptor in (orders.detach(), out, errors):
            os.close(descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
        code = _run(spawn_spec)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _run(spawn_spec: SpawnSpec) -> int:
    os.chdir(spawn_spec.folder)
    os.environ.clear()
    os.environ.update({**_ENVIRONMENT, **spawn_spec.environment})
    paths = spawn_spec.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]  # before installed packages, as usual
    command = spawn_spec.module.split(".")[1]
    sys.argv = [command, *spawn_spec.arguments]
    setproctitle(" ".join(sys.argv))
    if spawn_spec.heeds_signals:
        signals.restore()
    main: Callable[[Sequence[str]], int] = importlib.import_module(spawn_spec.module).main
    return main(spawn_spec.arguments)


def _end(code: int) -> NoReturn:
    """End like an interpreter, except for its teardown: the stack below is the owner's."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), lambda: None)
