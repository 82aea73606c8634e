"""The web server of the front end: the SDK's paths, each with a key, within limits.

It waits for a request's body, at most `_BODY_S`, and for a future's result, at most `_WAIT_S`; then the client asks
again. On loopback it answers no request of another site's page.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.common import web
from tandem.common.network import is_loopback
from tandem.common.web import settings
from tandem.serving.tinker import access, proto, requests, states
from tandem.serving.tinker.requests import TinkerRefused
from tandem.serving.tinker.service import TinkerService

_PREFIX = "/api/v1"
_MOST_BODY_BYTES = 1 << 26
_BODY_S = 60.0
_WAIT_S = 25.0
_END_S = 5.0
_IDLE_S = 75
_MOST_AT_ONCE = 1024
"""Requests whose bodies are being read, of all clients."""
_FEW_ENGINES = 8
"""Engines whose samples are few enough at a time that a client waits for each by itself."""
_PROTO = "application/x-protobuf"
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
_CHECKPOINT = "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"
_LINK = f"{states.LINKS}/{{model_id}}/{{name}}/{{file:path}}"
_NOT_FOUND = 404

Handler = Callable[[TinkerService, str, Request, bytes], Awaitable[Response]]


def make_app(service: TinkerService, keys: access.ApiKeys, *, is_on_loopback: bool) -> ASGIApp:
    """Return the application."""
    paths = _Paths(service, keys)
    app: ASGIApp = Starlette(
        routes=paths.routes(), exception_handlers={HTTPException: _refuse_unknown, Exception: _report_error}
    )
    return _Guard(app) if is_on_loopback else app


class _Guard:
    """Middleware that refuses what a foreign page may have sent (`tandem.common.web`), but takes protobuf."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        refused = web.foreign(scope) if scope["type"] == "http" else None
        if refused is not None:
            kind = Request(scope).headers.get("content-type", "")
            # The key is in a header of its own, which no page can send without being asked first.
            refused = None if refused[0] == 415 and kind == _PROTO else refused
        answer = self._app if refused is None else _refusal(*refused)
        await answer(scope, receive, send)


class _Paths:
    """The handlers of the paths."""

    def __init__(self, service: TinkerService, keys: access.ApiKeys) -> None:
        self._service = service
        self._keys = keys
        self._reading = asyncio.Semaphore(_MOST_AT_ONCE)

    def routes(self) -> list[Route]:
        """Return all paths."""
        service = self._service
        posts: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
            "client/config": (requests.ClientConfig, lambda owner, body: _configured(service, body)),
            "client/dynamic_config": (requests.ClientConfig, lambda owner, body: {"refresh_interval_sec": 300}),
            "create_session": (requests.CreateSession, service.create_session),
            "session_heartbeat": (requests.OfSession, lambda owner, body: service.beat(owner, body.session_id)),
            "create_model": (requests.CreateModel, service.create_model),
            "get_info": (requests.OfModel, lambda owner, body: service.info(owner, body.model_id)),
            "optim_step": (requests.OptimStep, service.step),
            "save_weights": (requests.SaveWeights, service.save),
            "save_weights_external": (requests.SaveExternal, service.save),
            "save_weights_for_sampler": (requests.SaveForSampler, service.save_for_sampler),
            "load_weights": (requests.LoadWeights, service.load_weights),
            "create_sampling_session": (requests.CreateSamplingSession, service.create_sampler),
            "asample": (requests.SampleRequest, service.samplers.sample),
            "weights_info": (
                requests.WeightsInfo,
                lambda owner, body: service.weights_info(owner, body.tinker_path),
            ),
        }
        routes = [self._post(path, kind, carry_out) for path, (kind, carry_out) in posts.items()]
        routes += [
            self._route("forward_backward", _gradient, "POST"),
            self._route("retrieve_future", _retrieve, "POST"),
            self._route("retrieve_futures", _retrieve_many, "POST"),
            self._route("telemetry", _telemetry, "POST"),
            self._route("sessions/{session_id}/finish", _finish, "POST"),
            self._route("healthz", _healthy, "GET"),
            self._route("get_server_capabilities", _capabilities, "GET"),
            self._route("samplers/{sampler_id}", _sampler, "GET"),
            self._route("training_runs", _runs, "GET"),
            self._route("training_runs/{model_id}", _run, "GET"),
            self._route("training_runs/{model_id}/checkpoints", _checkpoints, "GET"),
            *(self._route(*each) for each in _CHECKPOINT_PATHS),  # before the path that all of them match
            Route(f"{_PREFIX}/{_LINK}", self._link),
            self._route("training_runs/{model_id}/checkpoints/{checkpoint_id:path}", _delete, "DELETE"),
            self._route("checkpoints", _all_checkpoints, "GET"),
        ]
        return routes

    def _post(self, path: str, kind: Any, carry_out: Callable[[str, Any], Any]) -> Route:
        async def handle(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
            return _json(carry_out(owner, requests.read(body, kind)))

        return self._route(path, handle, "POST")

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        async def handle(request: Request) -> Response:
            try:
                owner = self._owner(request)
                async with self._reading:
                    body = await _body(request) if method in ("POST", "PUT") else b""
                return await handler(self._service, owner, request, body)
            except TinkerRefused as error:
                return _refusal(error.status, str(error))
            except ClientDisconnect:
                return Response(status_code=499)

        return Route(f"{_PREFIX}/{path}", handle, methods=[method])

    async def _link(self, request: Request) -> Response:
        try:
            return _send_linked_file(self._service, request)
        except TinkerRefused as error:
            return _refusal(error.status, str(error))

    def _owner(self, request: Request) -> str:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        owner = self._keys.owner_of(request.headers.get("x-api-key") or bearer)
        if owner is None:
            raise TinkerRefused(
                "the header X-API-Key is missing or wrong: coordinator tinker keys NAME makes a key", 401
            )
        return owner


async def _gradient(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    if request.headers.get("content-type") != _PROTO or request.headers.get("content-encoding"):
        raise TinkerRefused(f"the body must be {_PROTO}, without an encoding", 415)
    try:
        # Large: other requests are answered meanwhile.
        read = await asyncio.to_thread(proto.read_gradient_request, body)
    except proto.MalformedMessage as error:
        raise TinkerRefused(f"the body is no ForwardBackwardRequest that is served: {error}", 422) from error
    return _json(service.gradient(owner, read))


async def _retrieve(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    request_id = requests.read(body, requests.RetrieveFuture).request_id
    result = await service.result(owner, request_id, _WAIT_S)
    if result is None:
        return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    return Response(result.body, media_type=_PROTO if result.is_proto else "application/json")


async def _retrieve_many(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json(await service.samplers.wait_until_ended(owner, requests.read(body, requests.RetrieveMany), _WAIT_S))


async def _telemetry(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json({"status": "accepted"})  # and not kept


async def _finish(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    service.finish_session(owner, request.path_params["session_id"])
    return Response(status_code=204)


async def _healthy(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json({"status": "ok"})


async def _capabilities(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json(service.capabilities())


async def _sampler(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json(service.sampler(owner, request.path_params["sampler_id"]))


async def _runs(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    runs, cursor = _page(request, service.training_runs(owner), 20)
    return _json({"training_runs": runs, "cursor": cursor})


async def _run(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json(service.training_run(owner, request.path_params["model_id"]))


async def _checkpoints(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    return _json({"checkpoints": service.checkpoints(owner, request.path_params["model_id"])})


async def _all_checkpoints(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    checkpoints, cursor = _page(request, service.checkpoints(owner), 100)
    return _json({"checkpoints": checkpoints, "cursor": cursor})


async def _delete(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    service.delete_checkpoint(owner, request.path_params["model_id"], request.path_params["checkpoint_id"])
    return Response(status_code=204)


async def _publish(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    service.saved.publish(owner, **request.path_params, is_public=True)
    return Response(status_code=204)


async def _unpublish(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    service.saved.publish(owner, **request.path_params, is_public=False)
    return Response(status_code=204)


async def _set_ttl(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    service.saved.set_ttl(owner, **request.path_params, body=requests.read(body, requests.SetTtl))
    return Response(status_code=204)


async def _links(service: TinkerService, owner: str, request: Request, body: bytes) -> Response:
    before, _, _ = str(request.url).partition("/training_runs/")
    if request.headers.get("x-forwarded-proto") == "https":  # a proxy has ended TLS
        before = f"https://{before.partition('://')[2]}"
    links = service.saved.links(owner, **request.path_params, base_url=f"{before}/")
    return Response(msgspec.json.encode(links), media_type="application/json")


def _send_linked_file(service: TinkerService, request: Request) -> Response:
    """Send the file of a link, which needs no key. Raises `Refused`."""
    parameters = {name: request.query_params.get(name, "") for name in ("expires", "signature")}
    return FileResponse(
        service.saved.find_linked(**request.path_params, **parameters), media_type="application/octet-stream"
    )


_CHECKPOINT_PATHS = (
    (f"{_CHECKPOINT}/publish", _publish, "POST"),
    (f"{_CHECKPOINT}/publish", _unpublish, "DELETE"),
    (f"{_CHECKPOINT}/ttl", _set_ttl, "PUT"),
    (f"{_CHECKPOINT}/external_weights_urls", _links, "GET"),
)
"""Paths of saved states, with their handlers and methods."""


def _configured(service: TinkerService, body: requests.ClientConfig) -> dict[str, Any]:
    requests.check_version(body.sdk_version)
    # To ask once for all samples that have ended saves connections, and costs each sample a request more.
    is_large = service.num_engines > _FEW_ENGINES
    limits = {"sample_use_retrieve_futures": is_large, "sample_max_concurrent_requests": _MOST_AT_ONCE // 2}
    return _CLIENT_CONFIG | limits


def _page(request: Request, entries: list[Any], default: int) -> tuple[list[Any], dict[str, int]]:
    """Return the part of a list that a client asks for, and where it is."""
    try:
        offset, limit = (int(request.query_params.get(name, value)) for name, value in _page_of(default).items())
    except ValueError:
        raise TinkerRefused("offset and limit must be whole numbers") from None
    if offset < 0 or limit < 0:
        raise TinkerRefused("offset and limit must be at least 0")
    return entries[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(entries)}


def _page_of(default: int) -> dict[str, int]:
    return {"offset": 0, "limit": default}


async def _body(request: Request) -> bytes:
    """Return a request's body. Raises `TinkerRefused` if it is too long or does not arrive."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > _MOST_BODY_BYTES:
                    raise TinkerRefused(f"the body has more than {_MOST_BODY_BYTES} bytes", 413)
                parts.append(part)
    except TimeoutError:
        raise TinkerRefused(f"the body has not arrived within {_BODY_S:g} s", 400) from None
    return b"".join(parts)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _refusal(status: int, reason: str) -> Response:
    return _json({"error": reason, "detail": reason, "category": "user"}, status)


async def _refuse_unknown(request: Request, error: Exception) -> Response:
    """Refuse a path, or a method, that is not served, by its name."""
    assert isinstance(error, HTTPException)
    return _refusal(_NOT_FOUND, f"{request.method} {request.url.path} is not served (docs/tinker.md says what is)")


async def _report_error(request: Request, error: Exception) -> Response:
    """Report an error of ours; the traceback is in the log."""
    return _refusal(500, f"{type(error).__name__} while answering; the server's log has more")


class TinkerServer:
    """The web server, in a thread beside the loop of the run."""

    def __init__(
        self, make: Callable[[], ASGIApp], listening: socket.socket, tls: access.TlsCertificate | None
    ) -> None:
        """Begin to serve what `make` returns, which is called in the server's thread."""
        self._make = make
        self._socket = listening
        self._tls = {} if tls is None else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        self._server: uvicorn.Server | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="tinker", daemon=True)
        self._thread.start()
        self._has_begun.wait()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        if self._tls:  # uvicorn has no setting for it, and asyncio gives strangers a minute
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=web.HEADERS_S)  # type: ignore[method-assign]
        try:
            self._server = uvicorn.Server(settings(self._make(), end_s=_END_S, timeout_keep_alive=_IDLE_S, **self._tls))
        finally:
            self._has_begun.set()
        await self._server.serve(sockets=[self._socket])

    def close(self) -> None:
        """Accept nothing more, give answers in progress a moment, then cut them off."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(_END_S + 1.0)
            if self._thread.is_alive():
                self._server.force_exit = True
                self._thread.join(_END_S)
        self._socket.close()


def reaches_loopback_only(listening: socket.socket) -> bool:
    """Return whether only this machine reaches a socket."""
    return is_loopback(listening.getsockname()[0])
