"""Standard output and error that outlast their readers: a run continues without a terminal or a pipe."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from tandem.common.errors import is_shortage

STANDARD = (1, 2)
"""The descriptors of standard output and error."""


@contextlib.contextmanager
def outlast_readers() -> Iterator[None]:
    """Have output within the block go nowhere once it has no reader, instead of raising an error.

    That is a pipe whose reader has ended (``| head``) and a terminal that has closed. What finds no room in a file
    waits for the next output. Within another such block it changes nothing.
    """
    if isinstance(sys.stdout, _LastingStream):
        yield
        return
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _LastingStream(stream)) for stream in streams)
    try:
        yield
    finally:
        for stream in streams:
            with contextlib.suppress(ValueError):  # it is closed
                try:
                    stream.flush()
                except OSError:
                    discard(_descriptors_of(stream))  # or the interpreter's end would raise the error
        sys.stdout, sys.stderr = streams


def discard(descriptors: Sequence[int]) -> None:
    """Have what is written to these descriptors from now on go nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def terminals() -> list[int]:
    """Return which of standard output and error are terminals."""
    return [descriptor for descriptor in STANDARD if os.isatty(descriptor)]


class _LastingStream:
    """A stream whose errors of writing do not end its writer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._pass_over(error)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        try:
            self._stream.flush()
        except OSError as error:
            self._pass_over(error)

    def _pass_over(self, error: OSError) -> None:
        if error.errno == errno.EPIPE or (error.errno == errno.EIO and self._is_terminal):
            discard(_descriptors_of(self._stream))
        elif not is_shortage(error):
            raise error


def _descriptors_of(stream: TextIO) -> list[int]:
    """Return the descriptor of a stream, if it has one."""
    try:
        return [stream.fileno()]
    except (OSError, AttributeError):  # one in memory
        return []
