"""The web server's paths for saved states: published, with another time to live, downloaded."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tandem.serving.tinker import requests
from tandem.serving.tinker.checkpoints import LINKS
from tandem.serving.tinker.service import TinkerService

_CHECKPOINT = "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"


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


PATHS = (
    (f"{_CHECKPOINT}/publish", _publish, "POST"),
    (f"{_CHECKPOINT}/publish", _unpublish, "DELETE"),
    (f"{_CHECKPOINT}/ttl", _set_ttl, "PUT"),
    (f"{_CHECKPOINT}/external_weights_urls", _links, "GET"),
)
"""Paths with their handlers and methods."""
LINK = f"{LINKS}/{{model_id}}/{{name}}/{{file:path}}"


def linked(service: TinkerService, request: Request) -> Response:
    """Send the file of a link, which needs no key. Raises `Refused`."""
    parameters = {name: request.query_params.get(name, "") for name in ("expires", "signature")}
    return FileResponse(
        service.saved.linked(**request.path_params, **parameters), media_type="application/octet-stream"
    )
