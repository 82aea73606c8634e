"""The HTTP application: read a request, have it generated, answer whole or as a stream.

Streams are server-sent events. The application waits for a request's body, for the generator, and for the client to
take what was sent, all under one deadline. When a client goes away, its generation ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.common.errors import ConfigError, DataError
from tandem.rollout.openai_api.bodies import read_body
from tandem.rollout.openai_api.choices import (
    ChatView,
    CompletionView,
    GenerationJob,
    ResponseView,
    chat_job,
    collect,
    completion_job,
    grow,
)
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.protocol import (
    ChatRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    read_request,
)
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response, too_late, unauthorised
from tandem.rollout.openai_api.tokenizing import TokenizerPath, describe_tokenizer, detokenize, tokenize

Find = Callable[[Request], ServedModel]
"""Function that returns the model of a request, whatever name it gives; raises `OpenAIRefused` for a wrong token."""
_JSON = "application/json"
T = TypeVar("T")
Begin = Callable[[ServedModel, bytes], tuple[ChatRequest | CompletionRequest, GenerationJob, ResponseView]]
"""Function that reads a request's body."""


def make_app(find: Find, *, deadline_s: float, prefix: str = "") -> Starlette:
    """Return an application with OpenAI's paths below `prefix`, which may have parameters for `find`."""
    handlers = {HTTPException: _as_openai, Exception: _broken}
    return Starlette(routes=api_routes(find, deadline_s=deadline_s, prefix=prefix), exception_handlers=handlers)


def api_routes(find: Find, *, deadline_s: float, prefix: str = "") -> list[Route]:
    """Return OpenAI's paths, for an application that also has others."""
    paths = OpenaiPaths(find, deadline_s)
    return [
        Route(f"{prefix}/v1/chat/completions", paths.chat, methods=["POST"]),
        Route(f"{prefix}/v1/responses", paths.responses, methods=["POST"]),
        Route(f"{prefix}/v1/completions", paths.completions, methods=["POST"]),
        Route(f"{prefix}/v1/models", paths.models, methods=["GET"]),
        Route(f"{prefix}/v1/models/{{name:path}}", paths.model, methods=["GET"]),
        Route(f"{prefix}/tokenize", TokenizerPath(find, tokenize).respond, methods=["POST"]),
        Route(f"{prefix}/detokenize", TokenizerPath(find, detokenize).respond, methods=["POST"]),
        Route(f"{prefix}/tokenizer_info", TokenizerPath(find, describe_tokenizer).respond, methods=["GET"]),
    ]


def only_with(token: str | None, model: ServedModel) -> Find:
    """Return a function that finds this model for requests with the token, or for all if there is none."""

    def find(request: Request) -> ServedModel:
        if token is not None:
            sent_token = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(sent_token.encode(), token.encode()):
                raise unauthorised()
        return model

    return find


class OpenaiPaths:
    """The handlers of the paths."""

    def __init__(self, find: Find, deadline_s: float) -> None:
        self._find = find
        self._deadline_s = deadline_s

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""

        def begin(model: ServedModel, body: bytes) -> tuple[ChatRequest, GenerationJob, ResponseView]:
            chat_request = read_request(body, ChatRequest)
            model.check_name(chat_request.model)
            job = chat_job(model, chat_request)
            return chat_request, job, ChatView(model, chat_request, job)

        return await self._carry_out(request, begin)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in the form of the Responses API."""
        from tandem.rollout.openai_api.responses_request import chat_fields_renamed, read_responses_request
        from tandem.rollout.openai_api.responses_view import ResponsesView

        def begin(model: ServedModel, body: bytes) -> tuple[ChatRequest, GenerationJob, ResponseView]:
            responses_request, chat_request = read_responses_request(body)
            model.check_name(chat_request.model)
            with chat_fields_renamed():
                job = chat_job(model, chat_request)
            return chat_request, job, ResponsesView(model, responses_request, chat_request, job)

        return await self._carry_out(request, begin)

    async def completions(self, request: Request) -> Response:
        """Continue texts."""

        def begin(model: ServedModel, body: bytes) -> tuple[CompletionRequest, GenerationJob, ResponseView]:
            completion_request = read_request(body, CompletionRequest)
            model.check_name(completion_request.model)
            job = completion_job(model, completion_request)
            return completion_request, job, CompletionView(model, completion_request, job)

        return await self._carry_out(request, begin)

    async def models(self, request: Request) -> Response:
        """List the models that are served."""
        try:
            model = self._find(request)
        except OpenAIRefused as error:
            return as_response(error)
        names = (model.name, *model.aliases)
        return _json(ModelList(data=[_card(model, name) for name in names]))

    async def model(self, request: Request) -> Response:
        """Describe one of them."""
        try:
            model, name = self._find(request), request.path_params["name"]
            model.check_name(name)
        except OpenAIRefused as error:
            return as_response(error)
        return _json(_card(model, name))

    async def _carry_out(self, request: Request, begin: Begin) -> Response:
        """Answer before the deadline, or not at all if the client has gone."""
        try:
            async with asyncio.timeout(self._deadline_s):
                model = self._find(request)
                generation_request, job, view = begin(model, await read_body(request))
                if generation_request.stream:
                    events = _events(model, generation_request, job, view)
                    return EventStream(events, self._deadline_s, view.encode_error)
                pieces = await _while_there(request.receive, collect(model, generation_request, job))
        except TimeoutError:
            return as_response(too_late(self._deadline_s))
        except (ConfigError, DataError) as error:  # from a chat template, or a text without tokens
            return as_response(OpenAIRefused(str(error)))
        except OpenAIRefused as error:
            return as_response(error)
        # A client that has gone reads no answer, whatever it is.
        return Response(status_code=499) if pieces is None else _json(view.answer(pieces))


class EventStream(Response):
    """Server-sent events, until the client closes its connection or the deadline passes."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], deadline_s: float, encode_error: Callable[[OpenAIRefused], bytes]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events = events
        self._deadline_s = deadline_s
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await _while_there(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._deadline_s):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            await send({"type": "http.response.body", "body": self._encode_error(too_late(self._deadline_s))})
            return
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})


async def _events(
    model: ServedModel, request: ChatRequest | CompletionRequest, job: GenerationJob, view: ResponseView
) -> AsyncGenerator[bytes, None]:
    """Yield a stream; an error after its beginning becomes one of its events."""
    shows_tokens = request.return_token_ids or request.wants_logprobs
    num_tokens = 0
    try:
        for first in view.begin():
            yield view.encode(first)
        async with contextlib.aclosing(grow(model, request, job)) as growing:
            async for number, piece in growing:
                num_tokens += len(piece.token_ids)
                if piece.text or piece.reasoning or piece.tool_calls or piece.finish_reason or shows_tokens:
                    for chunk in view.chunks(number, piece):
                        yield view.encode(chunk)
        for last in view.end(num_tokens):
            yield view.encode(last)
        yield view.closing
    except OpenAIRefused as error:
        yield view.encode_error(error)


async def _while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what the work returns; if the client goes away, cancel the work and return None."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_length)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=_JSON)


async def _as_openai(request: Request, error: Exception) -> Response:
    """Refuse an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return as_response(OpenAIRefused(message, status=error.status_code, kind="not_found_error"))


async def _broken(request: Request, error: Exception) -> Response:
    """Report an error of ours; details and traceback are in the log."""
    message = f"{type(error).__name__} while answering; the server's log has more"
    return as_response(OpenAIRefused(message, status=500, kind="server_error"))
