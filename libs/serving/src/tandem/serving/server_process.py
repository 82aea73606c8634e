"""The process that serves one model, launched or become here, and its settings, by an open file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, Literal, NoReturn

import msgspec

from tandem.common.descriptors import wait_to_read
from tandem.common.errors import ServiceError
from tandem.config.engine_kinds import EngineName
from tandem.config.schema.base import ConfigSection, NonEmptyStr, PositiveFloat, PositiveInt
from tandem.config.schema.generation import ToolCallParser, VllmCfg

_LOAD_S = 1800.0
"""Longest time to load a model."""
_END_S = 15.0
_PROCESS, _LOADING = "the server", "loading the model"
MODULE = "tandem.rollout.serving"
"""Module that such a server runs."""


class ServingHandover(ConfigSection, frozen=True, kw_only=True):
    """A model, and how to serve it."""

    model_folder: NonEmptyStr
    """Folder of a Hugging Face model."""
    name: NonEmptyStr
    """Name in requests."""
    aliases: tuple[str, ...] = ()
    """Other names in requests."""
    engine: EngineName
    max_length: PositiveInt
    """Longest sequence, prompt included."""
    vocabulary: PositiveInt
    """Number of tokens that the model can read."""
    max_batch_size: PositiveInt
    """Most responses generated at the same time."""
    precision: Literal["float32", "bfloat16"]
    num_threads: PositiveInt
    deadline_s: PositiveFloat
    """Deadline of one request."""
    token: str | None = None
    """Token that requests must carry."""
    vllm_cfg: VllmCfg
    vllm_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    tool_call_parser: ToolCallParser | None = None
    """Format of the model's tool calls; without it they stay text."""
    example: str = "Hello"
    """A text that the model can read."""
    greeting: str = "ready"
    """Line that the server prints once it answers."""
    listening: int = -1
    """Descriptor of a listening socket."""
    launched_by: int = 0
    """Process with which this one ends; zero for none."""


def pass_on(serving: ServingHandover) -> int:
    """Return a descriptor from which another process reads the settings; they appear in no process list."""
    descriptor = os.memfd_create("serving", 0)
    os.write(descriptor, msgspec.json.encode(serving))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take(descriptor: int) -> ServingHandover:
    """Return the settings that were passed on."""
    with os.fdopen(descriptor, "rb") as file:
        return msgspec.json.decode(file.read(), type=ServingHandover)


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
