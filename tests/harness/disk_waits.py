"""A wait of the kind in which a disk holds up a thread: the kernel's state D, in which it can do nothing else.

A parent is in it until its child has executed a program, or failed to: here the child first opens a pipe that nobody
writes to yet.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from pathlib import Path

from tandem.common.process_lifetime import is_waiting_for_disk

_libc = ctypes.CDLL(None, use_errno=True)


def wait_as_for_disk(seconds: float) -> None:
    """Keep the calling thread waiting for so long, and check that it did, as the kernel sees it."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        states: list[bool] = []
        opener = threading.Timer(seconds, _open, [pipe, threading.get_native_id(), states])
        opener.start()
        _start_program(pipe)
        opener.join()
    assert states == [True], "the thread was not held up by the kernel"


def _open(pipe: Path, thread_id: int, states: list[bool]) -> None:
    states.append(is_waiting_for_disk(thread_id))
    os.close(os.open(pipe, os.O_WRONLY))


def _start_program(standard_input: Path) -> None:
    actions = ctypes.create_string_buffer(256)
    _libc.posix_spawn_file_actions_init(actions)
    _libc.posix_spawn_file_actions_addopen(actions, 0, os.fsencode(standard_input), os.O_RDONLY, 0)
    pid = ctypes.c_int()
    words = (ctypes.c_char_p * 2)(b"true", None)
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ")
    error = _libc.posix_spawnp(ctypes.byref(pid), b"true", actions, None, words, environment)
    assert error == 0, os.strerror(error)
    os.waitpid(pid.value, 0)
