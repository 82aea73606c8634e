"""Access to the page: on loopback, no web site (`web.foreign`); elsewhere, only holders of a token.

The token is given once in the address, and then kept as a cookie.
"""

from __future__ import annotations

import secrets
from urllib.parse import quote, urlencode

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.common import web

COOKIE = "tandem_page"
_METHODS = ("GET", "HEAD")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def error(status: int, text: str) -> Response:
    """Return an answer that states the problem on one line."""
    body = msgspec.json.encode({"error": " ".join(text.split())})
    return Response(body, status, media_type="application/json")


class PageGuard:
    """Middleware that passes permitted requests on, and adds headers that restrict browsers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Guard `app`; `token` is None on loopback."""
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":  # there are no web sockets
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """Return the answer to a request that is not permitted, or None."""
        if scope["method"] not in _METHODS:
            return error(405, "the page is read-only: GET and HEAD are all it answers")
        if self._token is None:
            refused = web.foreign(scope)
            return None if refused is None else error(*refused)
        request = HTTPConnection(scope)
        token = request.query_params.get("token")
        if token is not None and _are_equal(token, self._token):
            parameters = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            # A path that begins with two slashes would be a host name.
            path = "/" + quote(scope["path"].lstrip("/\\"))
            response = RedirectResponse(path + (f"?{urlencode(parameters)}" if parameters else ""), 303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return response
        if _are_equal(request.cookies.get(COOKIE, ""), self._token):
            return None
        return error(401, "open the page once with the address that it printed at its start, which has ?token=")


def new_token() -> str:
    """Return an unguessable token."""
    return secrets.token_urlsafe(24)


def _are_equal(text: str, token: str) -> bool:
    return secrets.compare_digest(text.encode(), token.encode())
