"""The process that serves: this one becomes it, or launches it beside itself."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, NoReturn

from tandem.common.errors import ServiceError
from tandem.serving.handover import MODULE, Serving, pass_on

_LOAD_S = 1800.0
"""For a model to load."""
_END_S = 15.0
_PROCESS, _LOADING = "the server", "loading the model"


def become(serving: Serving) -> NoReturn:
    """Serve in this process, whose program is replaced; it ends as the server does."""
    descriptor = pass_on(serving)
    os.set_inheritable(serving.listening, True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", MODULE, str(descriptor)])


@contextlib.contextmanager
def launched(serving: Serving) -> Iterator[None]:
    """Serve in another process for as long as the block lasts, which begins when the server answers.

    It has a session of its own: what is typed at this one's terminal is not meant for it. Raises `ServiceError` if it
    does not come to answer; it has then said why.
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
    deadline, said = time.monotonic() + _LOAD_S, b""
    while greeting.encode() not in said:
        if not select.select([output], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            raise ServiceError(_PROCESS, _LOADING, f"it does not answer after {_LOAD_S:g} s")
        read = os.read(output.fileno(), 1 << 16)
        if not read:
            raise ServiceError(_PROCESS, _LOADING, "it has ended")
        said += read
