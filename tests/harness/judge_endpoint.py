"""An OpenAI-compatible endpoint that grades by a rule, and can be busy, slow, broken or beside the point."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.rollout.openai_api.server import HttpServer, listen

RESPONSE = re.compile(r"Response to grade:\n(.*?)\n\nHow good", re.DOTALL)


class JudgeEndpoint:
    """Gives five points for each digit in a response, ten at most; `trouble` is what comes before, one a request."""

    def __init__(self) -> None:
        self.trouble: collections.deque[Any] = collections.deque()
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def answer(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        self.keys.add(request.headers.get("authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            trouble = self.trouble.popleft() if self.trouble else 0.01
            if isinstance(trouble, int):
                again = {"retry-after-ms": "10"}
                return JSONResponse({"error": {"message": "later"}}, status_code=trouble, headers=again)
            if isinstance(trouble, str):
                return JSONResponse(completion(trouble))
            await asyncio.sleep(trouble)
        finally:
            self.at_once -= 1
        return JSONResponse(completion(f"It may be better.\nScore: {grade_of(graded(asked))}"))


def graded(request: dict[str, Any]) -> str:
    """Return the response that a request shows."""
    found = RESPONSE.search(request["messages"][-1]["content"])
    assert found is not None, request
    return found[1]


def grade_of(response: str) -> int:
    """Return the grade, from 0 to 10."""
    return min(10, 5 * sum(character.isdigit() for character in response))


def completion(said: str) -> dict[str, Any]:
    """Return what the endpoint sends."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "grader"}
    return head | {"choices": [choice], "usage": usage}


@contextlib.contextmanager
def judge_endpoint() -> Iterator[JudgeEndpoint]:
    """Serve one on loopback."""
    endpoint = JudgeEndpoint()
    app = Starlette(routes=[Route("/v1/chat/completions", endpoint.answer, methods=["POST"])])
    with HttpServer(app, listen("127.0.0.1", 0)) as server:
        endpoint.url = f"{server.url}/v1"
        yield endpoint
