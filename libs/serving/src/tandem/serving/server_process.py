"""The serving process: this process becomes it, or launches it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, NoReturn

from tandem.common.descriptors import wait_to_read
from tandem.common.errors import ServiceError
from tandem.serving.handover import MODULE, ServingHandover, pass_on

_LOAD_S = 1800.0
"""Longest time to load a model."""
_END_S = 15.0
_PROCESS, _LOADING = "the server", "loading the model"


def become(serving: ServingHandover) -> NoReturn:
    """Replace this process's program with the server, and end as the server does."""
    descriptor = pass_on(serving)
    os.set_inheritable(serving.listening, True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", MODULE, str(descriptor)])


@contextlib.contextmanager
def launch_server(serving: ServingHandover) -> Iterator[None]:
    """Serve in another process during the block, which begins once the server answers.

    The server has its own session, so that input at this process's terminal does not reach it. Raises `ServiceError` if
    it does not start to answer; it has then printed the reason.
    """
    descriptor = pass_on(serving)
    words = [sys.executable, "-m", MODULE, str(descriptor)]
    process = subprocess.Popen(
        words,
        pass_fds=[descriptor, serving.listening],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(descriptor)
    assert process.stdout is not None
    try:
        _await(process.stdout, serving.greeting)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)
        process.stdout.close()


def _await(output: IO[bytes], greeting: str) -> None:
    deadline, received = time.monotonic() + _LOAD_S, b""
    while greeting.encode() not in received:
        if not wait_to_read(output, deadline - time.monotonic()):
            raise ServiceError(_PROCESS, _LOADING, f"it does not answer after {_LOAD_S:g} s")
        read = os.read(output.fileno(), 1 << 16)
        if not read:
            raise ServiceError(_PROCESS, _LOADING, "it has ended")
        received += read
