"""A proxy through which a live run answers OpenAI's API: it forwards requests to rollouts.

It waits for a request's body, for a rollout, and for the client to take what was sent. If a rollout goes away before it
starts to answer, the request goes to another. Between requests it keeps only the number of requests of each rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.common import web
from tandem.common.messages import EngineServer
from tandem.common.web import SignalledServer, event_loop, settings
from tandem.observe.run_folder.live import read_engine_servers
from tandem.serving.upstream import BROKEN, UpstreamResponse, UpstreamServers

ROLLOUT_HEADER = "x-tandem-rollout"
"""Header of an answer that names its rollout."""
_MAX_BODY_BYTES = 1 << 24
_BODY_S = 60.0
_LOOK_S = 0.5
"""Interval between checks whether the run is live."""
_END_S = 5
_FORWARDED = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
_STREAM = "text/event-stream"
_UNAVAILABLE = 503


def serve_run(run: Path, listening: socket.socket, token: str | None) -> bool:
    """Serve until this process is asked to end, or the run ends; return whether the run has ended."""
    with event_loop() as runner:
        return runner.run(_serve(run, listening, token))


async def _serve(run: Path, listening: socket.socket, token: str | None) -> bool:
    proxy = RolloutProxy(run, token)
    paths = Route("/{path:path}", proxy.answer, methods=["GET", "POST"])
    app: ASGIApp = Starlette(routes=[paths])
    guarded = app if token is not None else web.RequestGuard(app, _refusal)
    config = settings(guarded, end_s=_END_S)
    server = SignalledServer(config, heeds_signals=True)

    async def end_with_the_run() -> None:
        while read_engine_servers(run) is not None:
            await asyncio.sleep(_LOOK_S)
        server.should_exit = True

    watching = asyncio.create_task(end_with_the_run())
    await server.serve(sockets=[listening])
    proxy.close()
    has_ended = watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return has_ended


class RolloutProxy:
    """A forwarder of requests to the rollouts of a run."""

    def __init__(self, run: Path, token: str | None) -> None:
        self._run = run
        self._token = token
        self._upstream = UpstreamServers()
        self._num_asked: Counter[str] = Counter()
        """Current number of requests of each rollout."""
        self._num_ever: Counter[str] = Counter()

    def close(self) -> None:
        """Close the connections to rollouts that are kept."""
        self._upstream.close()

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        if self._token is not None:
            token = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return _refusal(401, "the header Authorization: Bearer TOKEN is missing or wrong", "invalid_api_key")
        try:
            async with asyncio.timeout(_BODY_S):
                body = await _body(request)
        except TimeoutError:
            return _refusal(408, f"the body has not arrived within {_BODY_S:g} s")
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return _refusal(413, f"the body has more than {_MAX_BODY_BYTES} bytes", "request_too_large")
        return _Passed(self, request, body)

    async def ask(self, request: Request, body: bytes, send: Send) -> None:
        """Ask one rollout after another until one answers, and forward its answer."""
        refused = None
        for name, server in self._sort_by_load():
            self._num_asked[name] += 1
            self._num_ever[name] += 1
            try:
                exchange = self._upstream.request(server, request.method, _target(request), _headers(request), body)
                async with exchange as answer:
                    if answer.status != _UNAVAILABLE:
                        await _pass_on(answer, name, send)
                        return
                    parts = [part async for part in answer.body()]
                    refused = Response(b"".join(parts), answer.status, _select_headers(answer, name))
            except BROKEN:  # the rollout is gone; another may answer
                continue
            finally:
                self._num_asked[name] -= 1
        await (refused or self._none()).__call__(request.scope, request.receive, send)

    def _sort_by_load(self) -> list[tuple[str, EngineServer]]:
        servers = read_engine_servers(self._run) or {}
        return sorted(servers.items(), key=lambda item: (self._num_asked[item[0]], self._num_ever[item[0]]))

    def _none(self) -> Response:
        if read_engine_servers(self._run) is None:
            return _refusal(_UNAVAILABLE, f"the run in {self._run} has ended", "run_ended")
        return _refusal(_UNAVAILABLE, "no rollout of the run answers now: ask again later", "unavailable")


class _Passed(Response):
    """A forwarded answer, which ends when the client disconnects."""

    def __init__(self, proxy: RolloutProxy, request: Request, body: bytes) -> None:
        super().__init__()
        self._proxy = proxy
        self._request = request
        self._asked = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the answer."""
        working = asyncio.create_task(self._proxy.ask(self._request, self._asked, send))
        gone = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.gather(working, gone, return_exceptions=True)


async def _pass_on(answer: UpstreamResponse, name: str, send: Send) -> None:
    """Forward a complete answer, or a stream; if a stream breaks, its last event says so."""
    is_stream = answer.headers.get("content-type", "").startswith(_STREAM)
    body = answer.body()
    if not is_stream:  # all or nothing, so that until then another rollout may answer
        parts = [part async for part in body]
        await _begin(answer, name, send)
        await send({"type": "http.response.body", "body": b"".join(parts)})
        return
    await _begin(answer, name, send)
    async for part in _forward_until_lost(body, name):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _begin(answer: UpstreamResponse, name: str, send: Send) -> None:
    headers = [(key.encode(), value.encode("latin-1")) for key, value in _select_headers(answer, name).items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


async def _forward_until_lost(body: AsyncGenerator[bytes, None], name: str) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(body):
            async for part in body:
                yield part
    except BROKEN:
        error_body = _error(f"{name} is gone, and with it the rest of this answer: ask again", "rollout_lost")
        yield b"\n\ndata: " + error_body + b"\n\n"


async def _body(request: Request) -> bytes | None:
    """Return a request's body; None if it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(request: Request) -> str:
    query = request.scope["query_string"]
    raw: bytes = request.scope["raw_path"]
    return (raw + (b"?" + query if query else b"")).decode("ascii", "replace")


def _headers(request: Request) -> dict[str, str]:
    return {"content-type": request.headers.get("content-type", "application/json"), "accept": "*/*"}


def _select_headers(answer: UpstreamResponse, name: str) -> dict[str, str]:
    headers = {key: value for key, value in answer.headers.items() if key in _FORWARDED}
    return {**headers, ROLLOUT_HEADER: name}


def _error(message: str, code: str | None) -> bytes:
    """Return an error in the format of OpenAI's API."""
    body: dict[str, Any] = {"message": message, "type": "server_error", "param": None, "code": code}
    return msgspec.json.encode({"error": body})


def _refusal(status: int, message: str, code: str | None = None) -> Response:
    headers = {"retry-after": "2"} if status == _UNAVAILABLE and code != "run_ended" else None
    return Response(_error(message, code), status, headers, "application/json")
