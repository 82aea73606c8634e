"""What every web server here has: a bound on idle connections, and a guard against web sites.

A site that a browser shows may have a name of its own point to loopback (DNS rebinding), and would ask a server there
as if it were its own: the Host header tells. It may also have the browser post to loopback as it is: Origin tells, and
so does a Content-Type that needs no permission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.common import descriptors
from tandem.common.network import is_loopback

HEADERS_S = 10.0
"""For the headers of a request to arrive, counted from their first byte; for a first one, from the connection on."""
_BACKLOG = 512
_SHARE_AT_ONCE = 16
"""One in so many of the process's descriptors, where that is less: the connections that asyncio accepts at once."""
_MOST_IDLE = 1024
_SHARE_IDLE = 4
"""One in so many of the process's descriptors, where that is less: what one address may hold without a request."""
_JSON = "application/json"


def backlog() -> int:
    """Return how many connections may wait, which asyncio accepts before it looks at any of them (``backlog=``)."""
    return max(1, min(_BACKLOG, descriptors.limit() // _SHARE_AT_ONCE))


class Protocol(H11Protocol):
    """HTTP for uvicorn (``http=``): slow headers end a connection, and one address holds so many idle ones at most."""

    _timer: asyncio.TimerHandle | None = None
    _began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._began = self.loop.time()
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Look at what came meanwhile: it may be half a request."""
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
        """End the oldest idle connection of this one's address if it has too many."""
        most = min(_MOST_IDLE, descriptors.limit() // _SHARE_IDLE)
        if len(self.connections) <= most or self.client is None:
            return
        idle = [
            each
            for each in self.connections
            if isinstance(each, Protocol)
            and each.client is not None
            and each.client[0] == self.client[0]
            and each.is_idle
            and not each.transport.is_closing()
        ]
        if len(idle) > most:
            min(idle, key=lambda each: each._began).transport.abort()


class Guard:
    """Answers what another site's page may have had a browser ask with a refusal; for servers that ask for no token."""

    def __init__(self, app: ASGIApp, refuse: Callable[[int, str], ASGIApp]) -> None:
        """`refuse` returns the answer with an HTTP status and a line that says why."""
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        refused = foreign(scope) if scope["type"] == "http" else None
        answer = self._app if refused is None else self._refuse(*refused)
        await answer(scope, receive, send)


def foreign(scope: Scope) -> tuple[int, str] | None:
    """Return the HTTP status and the reason for refusing a request that another site may be behind; None for others."""
    headers = Headers(scope=scope)
    host = _host(f"//{headers.get('host', '')}")
    if not is_loopback(host):
        return 403, f"asked as {host[:100]!r}, but this is read on loopback alone, as localhost or 127.0.0.1"
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host(origin)):
        return 403, f"asked by a page of {origin[:100]!r}, but pages of this machine alone may"
    kind = headers.get("content-type")
    if scope["method"] == "POST" and kind is not None and kind.partition(";")[0].strip().lower() != _JSON:
        return 415, f"Content-Type is {kind[:100]!r}, not {_JSON}"
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
