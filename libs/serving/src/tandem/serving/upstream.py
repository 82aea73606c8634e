"""HTTP requests to a server, with answers that are read as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from urllib.parse import urlsplit

import h11

from tandem.common.messages import EngineServer

_CONNECT_S = 5.0
_SILENT_S = 660.0
"""Longest silence of a server; longer than its own deadline."""

BROKEN = (OSError, EOFError, TimeoutError, h11.ProtocolError)
"""Errors of a server that cannot be asked, or does not finish its answer."""


class Answer:
    """An answer with its body still to come."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader, head: h11.Response) -> None:
        self.status = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self._connection = connection
        self._reader = reader

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the body. Raises the errors in `BROKEN`."""
        while True:
            event = await _next(self._connection, self._reader)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                return


@contextlib.asynccontextmanager
async def asked(
    server: EngineServer, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> AsyncIterator[Answer]:
    """Ask, and yield the answer once it begins; leaving early ends the connection. Raises the errors in `BROKEN`."""
    parts = urlsplit(server.url)
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        connection = h11.Connection(h11.CLIENT)
        all_headers = {**headers, "host": parts.netloc, "connection": "close", "content-length": str(len(body))}
        if server.token:
            all_headers["authorization"] = f"Bearer {server.token}"
        request = h11.Request(method=method, target=target, headers=[*all_headers.items()])
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        await writer.drain()
        head = await _next(connection, reader)
        if not isinstance(head, h11.Response):
            raise EOFError(f"{server.url} has closed the connection")
        yield Answer(connection, reader, head)
    finally:
        writer.close()


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    """Return the next event of the final answer, skipping interim ones."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            async with asyncio.timeout(_SILENT_S):
                connection.receive_data(await reader.read(1 << 16))
        elif not isinstance(event, h11.InformationalResponse):
            return event
