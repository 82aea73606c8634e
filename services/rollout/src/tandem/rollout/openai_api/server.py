"""Serve an HTTP application from a thread, beside the process's other work."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from tandem.common import web
from tandem.common.network import is_loopback, url_of
from tandem.common.web import settings
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response

_IDLE_S = 75
"""Seconds before an idle connection is closed. Most clients close theirs earlier, so that they rarely see ours
close."""
_MOST_UNREAD_BYTES = 1 << 14
"""Bytes of what a client does not read that the system keeps, and as many that the process does.

By itself the system would keep megabytes of each stream. The client's end has some 64 KiB, whatever is set here.
"""
_END_S = 5.0
"""Seconds for answers that are on their way when the server ends."""


class _Protocol(web.TimedHttpProtocol):
    """An HTTP protocol that keeps little of what its client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit what is kept, and start to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_MOST_UNREAD_BYTES)


class HttpServer:
    """An application on a listening socket, which is closed at the end."""

    def __init__(self, app: ASGIApp, listening: socket.socket, *, asks_for_token: bool = False) -> None:
        """Begin to serve; connections that arrived earlier are answered too.

        On loopback, requests from web sites through a browser are refused, unless `asks_for_token`: no web site has the
        token.
        """
        if not asks_for_token and is_loopback(listening.getsockname()[0]):
            app = web.RequestGuard(app, _refusal)
        self._socket = listening
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_UNREAD_BYTES)  # its connections inherit it
        self._server = uvicorn.Server(settings(app, end_s=_END_S, timeout_keep_alive=_IDLE_S, http=_Protocol))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_loop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return url_of(self._socket)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that answers, for other coroutines to run in."""
        self._has_loop.wait()
        assert self._loop is not None, "set before the event is"
        return self._loop

    def close(self) -> None:
        """Accept nothing more, give answers in progress a moment, then cut them off."""
        self._server.should_exit = True
        self._thread.join(_END_S + 1.0)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_END_S)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._answer())

    async def _answer(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_loop.set()
        await self._server.serve(sockets=[self._socket])


def _refusal(status: int, reason: str) -> ASGIApp:
    return as_response(OpenAIRefused(reason, status=status, kind="permission_error"))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
