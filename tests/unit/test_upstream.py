"""Requests to a server over connections that are kept, and what becomes of them when the server closes one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tandem.common.messages import EngineServer
from tandem.serving.upstream import BROKEN, UpstreamServers

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
_HANG_UP, _HALF = b"hang up", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"


class _Server:
    """A server that answers the requests of each connection as it is told, and then closes it."""

    def __init__(self, *connections: list[bytes]) -> None:
        self._connections = [*connections]
        self.bodies: list[list[str]] = []
        """Bodies of the requests of each connection."""
        self.at = EngineServer(url="", token="")
        self._tasks: set[asyncio.Task[None] | None] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[UpstreamServers]:
        """Listen, and yield what asks."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.at = EngineServer(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="secret")
        upstream = UpstreamServers()
        async with server:
            yield upstream
        upstream.close()
        await asyncio.gather(*filter(None, self._tasks))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            await self._answer_all(reader, writer)

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = self._connections.pop(0)
        bodies: list[str] = []
        self.bodies.append(bodies)
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"authorization: Bearer secret" in head
            bodies.append((await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))).decode())
            if answer != _HANG_UP:
                writer.write(answer)


async def _ask(upstream: UpstreamServers, server: _Server, body: str) -> bytes:
    async with upstream.request(server.at, "POST", "/", {}, body.encode()) as answer:
        return b"".join([part async for part in answer.body()])


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def main() -> None:
        server = _Server([_ANSWER] * 4)
        async with server.listening() as upstream:
            for body in "abc":
                assert await _ask(upstream, server, body) == b"hi"
        assert server.bodies == [["a", "b", "c"]]

    asyncio.run(main())


def test_requests_at_once_have_connections_of_their_own() -> None:
    async def main() -> None:
        server = _Server([_ANSWER] * 2, [_ANSWER] * 2)
        async with server.listening() as upstream:
            assert await asyncio.gather(*(_ask(upstream, server, body) for body in "ab")) == [b"hi", b"hi"]
        assert sorted(server.bodies) == [["a"], ["b"]]

    asyncio.run(main())


def test_a_request_is_sent_again_if_its_kept_connection_is_closed_before_an_answer() -> None:
    async def main() -> None:
        server = _Server([_ANSWER, _HANG_UP], [_ANSWER] * 2)
        async with server.listening() as upstream:
            for body in "ab":
                assert await _ask(upstream, server, body) == b"hi"
        assert server.bodies == [["a", "b"], ["b"]]

    asyncio.run(main())


@pytest.mark.parametrize("broken", [_HANG_UP, _HALF])
def test_a_request_that_may_have_been_carried_out_is_not_sent_again(broken: bytes) -> None:
    async def main() -> None:
        server = _Server([broken])
        async with server.listening() as upstream:
            with pytest.raises(BROKEN):
                await _ask(upstream, server, "a")
        assert server.bodies == [["a"]]

    asyncio.run(main())


def test_a_connection_whose_answer_is_left_is_not_used_again() -> None:
    async def main() -> None:
        server = _Server([_HALF, _ANSWER], [_ANSWER] * 2)
        async with server.listening() as upstream:
            async with upstream.request(server.at, "POST", "/", {}, b"a") as answer:
                assert answer.status == 200
            assert await _ask(upstream, server, "b") == b"hi"
        assert server.bodies == [["a"], ["b"]]

    asyncio.run(main())
