"""The bodies of requests: read within limits of their length and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from tandem.rollout.openai_api.refusals import OpenAIRefused, gone

MAX_BODY_BYTES = 1 << 24
"""Size limit of one request."""
_BODY_S = 60.0
"""Seconds for a request's body to arrive."""


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
