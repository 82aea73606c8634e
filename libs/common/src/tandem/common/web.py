"""Shared by all web servers: settings, event loop, limits of connections, a guard against other sites.

A site may resolve its own name to loopback (DNS rebinding), so that its pages in a browser could query a server
there: the Host header reveals that. A page may also have the browser post to loopback directly: the Origin header
reveals that, and so does a Content-Type that needs no preflight.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.common import descriptors
from tandem.common.network import is_loopback
from tandem.common.signals import defer_signals

HEADERS_S = 10.0
"""Timeout for the headers of a request, from their first byte; for the first request, from the connection."""
WRONG_KEY_S = 1.0
"""Time after which a wrong key or token is answered: each guess holds its connection for as long."""
_UNAUTHORISED = 401
_BACKLOG = 512
_SHARE_AT_ONCE = 16
"""Divisor of the descriptor limit: gives the connections that asyncio accepts at once, if that is less."""
_MOST_IDLE = 1024
_SHARE_IDLE = 4
"""Divisor of the descriptor limit: gives the idle connections from one address, if that is less."""
_JSON = "application/json"


def settings(app: ASGIApp, *, end_s: float, **overrides: Any) -> uvicorn.Config:
    """Return uvicorn's settings for `app`; unfinished answers have `end_s` seconds at the end.

    All servers bound idle connections and headers (`TimedHttpProtocol`), answer wrong keys late, say nothing of
    themselves, and log only what goes wrong.
    """
    shared = {
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "lifespan": "off",
        "http": TimedHttpProtocol,
        "backlog": read_backlog(),
        "ws": "none",
        "loop": "asyncio",
        "timeout_graceful_shutdown": int(end_s),
    }
    return uvicorn.Config(SlowRefusals(app), **{**shared, **overrides})


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.Runner]:
    """Yield an event loop of the main thread, made while no signal can interrupt: half a loop warns when collected."""
    with contextlib.ExitStack() as stack:
        with defer_signals():
            runner = stack.enter_context(asyncio.Runner())
        yield runner


class SignalledServer(uvicorn.Server):
    """A uvicorn server that ends on a signal without raising that signal again afterwards."""

    def __init__(
        self, config: uvicorn.Config, *, heeds_signals: bool = True, end: signal.Signals | None = None
    ) -> None:
        """Create the server; without `heeds_signals`, `end` is the only signal that ends it."""
        super().__init__(config)
        self._end = end
        self._heeds_signals = heeds_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs."""
        if not self._heeds_signals:
            if self._end is not None:
                signal.signal(self._end, self.handle_exit)
            yield
            return
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def read_backlog() -> int:
    """Return the number of pending connections, which asyncio accepts before it looks at any of them (``backlog=``)."""
    return max(1, min(_BACKLOG, descriptors.limit() // _SHARE_AT_ONCE))


class TimedHttpProtocol(H11Protocol):
    """An HTTP protocol for uvicorn (``http=``) with a timeout on headers and a limit on one address's idle
    connections."""

    _timer: asyncio.TimerHandle | None = None
    _began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        _send_at_once(transport)
        self._began = self.loop.time()
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Check what arrived meanwhile: it may be half a request."""
        super().on_response_complete()
        self._watch()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        has_begun = self.cycle is None or bool(self.conn.trailing_data[0])
        if self.conn.their_state is not h11.IDLE or not has_begun:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        """Close the oldest idle connections from this one's address if it has too many.

        Those on which something has come are not idle: many connections may be accepted before any is read.
        """
        max_idle = min(_MOST_IDLE, descriptors.limit() // _SHARE_IDLE)
        if self.limit_concurrency is not None:  # above it uvicorn refuses all requests
            max_idle = min(max_idle, self.limit_concurrency // 2)
        if len(self.connections) <= max_idle or self.client is None:
            return
        idle = [
            connection
            for connection in self.connections
            if isinstance(connection, TimedHttpProtocol)
            and connection.client is not None
            and connection.client[0] == self.client[0]
            and connection.is_idle
            and not connection.transport.is_closing()
        ]
        for connection in sorted(idle, key=lambda connection: connection._began)[: max(0, len(idle) - max_idle)]:
            if not _has_come(connection.transport):
                connection.transport.abort()


def _has_come(transport: asyncio.Transport) -> bool:
    """Tell whether something has come that is not read yet."""
    waiting = select.poll()
    waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _send_at_once(transport: asyncio.Transport) -> None:
    """Turn Nagle's algorithm off, which asyncio leaves on for connections to a socket of ``socket.create_server``.

    With it, an answer's body waits some 40 ms for the client's acknowledgement of its headers.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SlowRefusals:
    """Middleware that answers requests without the right key or token late, so that many of them take little time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_late(message: Message) -> None:
            if message.get("status") == _UNAUTHORISED:
                await asyncio.sleep(WRONG_KEY_S)
            await send(message)

        await self._app(scope, receive, send_late)


class RequestGuard:
    """Middleware that refuses requests which a foreign page may have sent; for servers without a token."""

    def __init__(self, app: ASGIApp, refuse: Callable[[int, str], ASGIApp]) -> None:
        """Wrap `app`; `refuse` returns the response with an HTTP status and a line with the reason."""
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        refused = foreign(scope) if scope["type"] == "http" else None
        answer = self._app if refused is None else self._refuse(*refused)
        await answer(scope, receive, send)


def foreign(scope: Scope) -> tuple[int, str] | None:
    """Return the HTTP status and reason for refusing a request that may come from another site; None to accept it."""
    headers = Headers(scope=scope)
    host = _host(f"//{headers.get('host', '')}")
    if not is_loopback(host):
        return 403, f"the Host is {host[:100]!r}, but this server answers on loopback alone, as localhost or 127.0.0.1"
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host(origin)):
        return 403, f"the Origin is {origin[:100]!r}, but this server answers only pages of this machine"
    kind = headers.get("content-type")
    if scope["method"] == "POST" and kind is not None and kind.partition(";")[0].strip().lower() != _JSON:
        return 415, f"Content-Type is {kind[:100]!r}, not {_JSON}"
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
