"""HTTP requests to servers, with answers that are read as they arrive.

Connections are kept for the next request, since a new one costs both sides about as much as a short request. A server
may close a kept connection at any time: if it does so before it has begun to answer, the request is sent again on a new
one. Otherwise each request is sent once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from urllib.parse import urlsplit

import h11

from tandem.common.messages import EngineServer

_CONNECT_S = 5.0
_SILENT_S = 660.0
"""Longest silence of a server; longer than its own deadline."""
_KEPT_S = 30.0
"""Longest time for which a connection is kept idle; shorter than servers keep theirs."""
_MOST_KEPT = 64
"""Idle connections to a server."""

BROKEN = (OSError, EOFError, TimeoutError, h11.ProtocolError)
"""Errors of a server that cannot be asked, or does not finish its answer."""


class _Connection:
    """A connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.state = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nothing says that the other side has closed it."""
        return not self.reader.at_eof() and not self._writer.is_closing() and self.reader.exception() is None

    def prepare_next(self) -> bool:
        """Get ready for the next request; tell whether it can follow."""
        if not (self.state.our_state is h11.DONE and self.state.their_state is h11.DONE and self.is_open):
            return False
        self.state.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    async def ask(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request; return the beginning of the answer. Raises the errors in `BROKEN`."""
        parts = (request, h11.Data(data=body), h11.EndOfMessage())
        self._writer.write(b"".join([self.state.send(part) or b"" for part in parts]))
        await self._writer.drain()
        head = await self.next()
        if not isinstance(head, h11.Response):
            raise EOFError("the server has closed the connection")
        return head

    async def next(self) -> object:
        """Return the next event of the final answer, skipping interim ones."""
        while True:
            event = self.state.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(_SILENT_S):
                    self.state.receive_data(await self.reader.read(1 << 16))
            elif not isinstance(event, h11.InformationalResponse):
                return event

    def close(self) -> None:
        """Close it, without waiting."""
        self._writer.close()


class UpstreamResponse:
    """An answer with its body still to come."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self.status = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self._connection = connection

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the body. Raises the errors in `BROKEN`."""
        while True:
            event = await self._connection.next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                return


class UpstreamServers:
    """Servers, and the connections to them that are kept; all in one event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[_Connection]] = {}
        """Idle connections by the server's address, the longest idle first."""

    @contextlib.asynccontextmanager
    async def request(
        self, server: EngineServer, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[UpstreamResponse]:
        """Ask, and yield the answer once it begins; leaving before its end closes the connection.

        Raises the errors in `BROKEN`.
        """
        all_headers = {**headers, "host": urlsplit(server.url).netloc, "content-length": str(len(body))}
        if server.token:
            all_headers["authorization"] = f"Bearer {server.token}"
        request = h11.Request(method=method, target=target, headers=[*all_headers.items()])
        connection, head = await self._begin(server.url, request, body)
        try:
            yield UpstreamResponse(connection, head)
        finally:
            if connection.prepare_next():
                self._keep(server.url, connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are kept."""
        connections_by_url, self._kept = self._kept, {}
        for connections in connections_by_url.values():
            for connection in connections:
                connection.close()

    async def _begin(self, url: str, request: h11.Request, body: bytes) -> tuple[_Connection, h11.Response]:
        while True:
            connection = self._take(url)
            is_new = connection is None
            connection = connection or await _connect(url)
            try:
                return connection, await connection.ask(request, body)
            except BROKEN as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise
            except BaseException:
                connection.close()
                raise

    def _take(self, url: str) -> _Connection | None:
        """Return a connection that is kept: the one that was used last."""
        idle = self._kept.get(url)
        while idle:
            connection = idle.pop()
            if connection.is_open and time.monotonic() < connection.idle_since + _KEPT_S:
                return connection
            connection.close()
        return None

    def _keep(self, url: str, connection: _Connection) -> None:
        """Keep a connection, and close those that are idle for too long, of all servers: some may be gone."""
        self._kept.setdefault(url, deque()).append(connection)
        for server_url, idle in [*self._kept.items()]:
            while idle and (len(idle) > _MOST_KEPT or connection.idle_since > idle[0].idle_since + _KEPT_S):
                idle.popleft().close()
            if not idle:
                del self._kept[server_url]


async def _connect(url: str) -> _Connection:
    parts = urlsplit(url)
    async with asyncio.timeout(_CONNECT_S):
        return _Connection(*await asyncio.open_connection(parts.hostname, parts.port))
