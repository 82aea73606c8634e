"""Commands and files in a sandbox that `enclose` makes, as the program that starts it gives them."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import enclose

_MOST_OUTPUT = 16 << 20
"""Bytes of a command's output, and of its errors, that are returned; the rest is read and dropped."""
_START_S = 120.0
_END_S = 30.0
_BLOCK = 1 << 16


class SandboxRefused(Exception):
    """The error of a machine that makes no sandboxes, in one line."""


class SandboxLost(Exception):
    """The error of waiting for a sandbox that was ended from outside."""


class EndedCommand(NamedTuple):
    """A command that has ended."""

    code: int
    output: str
    errors: str


class _Stream:
    """One of a command's streams. It is read until no process holds its end, which may be long after the command."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._is_open = self._is_wanted = True
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self) -> None:
        """Read what there is."""
        while self._is_open:
            try:
                block = os.read(self._reader, _BLOCK)
            except BlockingIOError:
                return
            if not block:
                self.close()
            if self._is_wanted:
                self._content += block[: max(0, _MOST_OUTPUT - len(self._content))]
            elif block:
                return  # a program that writes without end waits its turn

    def finish(self) -> str:
        """Return what the command wrote; what it wrote before its end is there."""
        self._read()
        text = self._content.decode(errors="replace")
        self._content.clear()
        self._is_wanted = False
        return text

    def close(self) -> None:
        """Close this end."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)


class EnclosedSandbox:
    """A sandbox. Ending this process ends it, with all that runs there."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start it; `begin` waits until it is there."""
        self._settings = settings
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: list[_Stream] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self.is_lost = False
        """Whether it has ended before it was to."""

    async def begin(self) -> None:
        """Make it. Raises `SandboxRefused` if the machine cannot."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            python = os.path.realpath(sys.executable)
            command = [python, "-I", "-S", enclose.__file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env={}, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._take)
        answer = self._send(self._settings, number=0)
        try:
            ready = await asyncio.wait_for(answer, _START_S)
        except (SandboxLost, TimeoutError):
            ready = {"code": enclose.FAILED, "error": "its first process did not get that far"}
        if ready["code"] != 0:
            await self.end()
            raise SandboxRefused(f"this machine makes no sandbox: {ready['error']}")

    async def run(self, command: list[str], env: dict[str, str], cwd: str, timeout_s: float | None) -> EndedCommand:
        """Run a command to its end. Raises `TimeoutError` if that takes longer; it is killed, and if this is given up.

        Raises `SandboxLost` as all that is asked of a sandbox.
        """
        output, errors = _Stream(), _Stream()
        self._streams += [output, errors]
        order = {"kind": "run", "argv": command, "env": env, "cwd": cwd}
        number = next(self._numbers)
        try:
            answer = self._send(order, output.writer, errors.writer, number=number)
        finally:
            os.close(output.writer)
            os.close(errors.writer)
        try:
            ended = await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(SandboxLost):
                self._send({"kind": "kill", "of": number}, number=None)
            raise
        if "error" in ended:
            raise OSError(ended["error"])
        return EndedCommand(ended["code"], output.finish(), errors.finish())

    async def upload(self, folder: str, fill: Callable[[tarfile.TarFile], None]) -> None:
        """Write files below a folder, those that `fill` adds to an archive."""
        with _memory_file() as file:
            with tarfile.open(fileobj=file, mode="w:") as files:
                fill(files)
            file.flush()
            file.seek(0)
            await self._transfer("unpack", folder, file)

    @contextlib.asynccontextmanager
    async def download(self, path: str) -> Any:
        """Open an archive of a file or folder; the path itself is ``.``."""
        with _memory_file() as file:
            await self._transfer("pack", path, file)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as files:
                yield files

    async def end(self) -> None:
        """End it."""
        self._close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, _END_S)
            self._process = None

    async def _transfer(self, kind: str, path: str, file: IO[bytes]) -> None:
        errors = _Stream()
        try:
            answer = self._send({"kind": kind, "path": path}, file.fileno(), errors.writer, number=next(self._numbers))
        finally:
            os.close(errors.writer)
        ended = await answer
        text = (errors.finish() or ended.get("error", "")).strip()
        errors.close()
        if ended["code"] != 0:
            missing = ended["code"] == 127
            raise (FileNotFoundError if missing else OSError)(f"{path}: {text or 'not possible in the sandbox'}")

    def _send(self, order: dict[str, Any], *descriptors: int, number: int | None) -> asyncio.Future[dict[str, Any]]:
        """Send an order; return its answer to come."""
        answer = asyncio.get_running_loop().create_future()
        if self._link is None:
            raise SandboxLost("the sandbox has ended")
        with _memory_file() as file:
            file.write(json.dumps({**order, "id": number}).encode())
            file.flush()
            file.seek(0)
            content = array.array("i", [file.fileno(), *descriptors])
            try:
                self._link.sendmsg([b"order"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, content)])
            except OSError:
                self._lose()
                raise SandboxLost("the sandbox has ended") from None
        if number is not None:
            self._answers[number] = answer
        return answer

    def _take(self) -> None:
        """Take the answers that have come."""
        while self._link is not None:
            try:
                message = self._link.recv(_BLOCK)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lose()
                return
            content = json.loads(message)
            answer = self._answers.pop(content["id"], None)
            if answer is not None and not answer.done():
                answer.set_result(content)

    def _lose(self) -> None:
        """Note that it has ended by itself."""
        self.is_lost = True
        self._close()

    def _close(self) -> None:
        """Close all that belongs to it."""
        if self._link is not None:
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._link.close()
            self._link = None
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxLost("the sandbox has ended"))
        self._answers.clear()


def add_to(files: tarfile.TarFile, source: Path, name: str, mode: int | None = None) -> None:
    """Add a file or folder to an archive, as root's own."""

    def set_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if mode is not None and not member.issym():
            member.mode = mode
        return None if member.isdev() else member

    files.add(source, name, filter=set_owner)


@contextlib.contextmanager
def _memory_file() -> Iterator[IO[bytes]]:
    """Yield an unnamed file in memory."""
    with os.fdopen(os.memfd_create("tandem"), "w+b") as file:
        yield file
