"""Bodies of requests, read within limits, and refusals in the shape that OpenAI's clients know."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tandem.common.errors import TandemError

_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
"""Headers of refusals; times in seconds."""
MAX_BODY_BYTES = 1 << 24
"""Size limit of one request."""
_BODY_S = 60.0
"""Seconds for a request's body to arrive."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The details of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an error answer."""

    error: ErrorBody


class OpenAIRefused(TandemError):
    """A request that is refused, with the HTTP status of the refusal."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        self.status = status
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)
        super().__init__(message)

    def encode(self) -> bytes:
        """Return the body of the answer."""
        return msgspec.json.encode(ErrorAnswer(error=self.body))


def as_response(error: OpenAIRefused) -> Response:
    """Return the refusal as a response."""
    return Response(error.encode(), error.status, _HEADERS.get(error.status), "application/json")


def unauthorised() -> OpenAIRefused:
    """Return the refusal of a request without the right token."""
    return OpenAIRefused(
        "the header Authorization: Bearer TOKEN is missing or wrong",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def unavailable(reason: str) -> OpenAIRefused:
    """Return the refusal of something that is not possible now."""
    return OpenAIRefused(reason, status=503, kind="server_error", code="unavailable")


def gone() -> OpenAIRefused:
    """Return the answer to a client that went away before its request was complete; nothing reads it."""
    return OpenAIRefused("the client has gone", status=499, kind="client_error", code="client_gone")


def too_late(deadline_s: float) -> OpenAIRefused:
    """Return the refusal after a deadline."""
    return OpenAIRefused(
        f"not done within {deadline_s:g} s", status=504, kind="timeout_error", code="deadline_exceeded"
    )


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return a request's body. Raises `OpenAIRefused` if it is too long or does not arrive."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise OpenAIRefused(
                        f"the body has more than {max_bytes} bytes", status=413, code="request_too_large"
                    )
                parts.append(part)
    except TimeoutError:
        raise OpenAIRefused(f"the body has not arrived within {_BODY_S:g} s", status=408) from None
    except ClientDisconnect:
        raise gone() from None
    return b"".join(parts)
