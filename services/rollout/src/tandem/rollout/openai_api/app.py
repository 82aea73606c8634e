"""The HTTP application: read a request, have it generated, answer whole or as a stream.

Streams are server-sent events. The application waits for a request's body, for the generator, and for the client to
take what was sent, all under one deadline. When a client goes away, its generation ends.

Clients that count or compare tokens ask for them (`/tokenize`, `/detokenize`): evaluations without a tokenizer of their
own, and agents.
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
from tandem.rollout.openai_api import choices, protocol
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response, read_body, too_late, unauthorised

Find = Callable[[Request], ServedModel]
"""Function that returns the model of a request, whatever name it gives; raises `OpenAIRefused` for a wrong token."""
_JSON = "application/json"
T = TypeVar("T")
Begin = Callable[
    [ServedModel, bytes],
    tuple[protocol.ChatRequest | protocol.CompletionRequest, choices.GenerationJob, choices.ResponseView],
]
"""Function that reads a request's body."""
_ONLY_OF_TEXTS = {"add_special_tokens": (False,)}
"""Fields of texts that chats do not have, with the values that change nothing."""
_OF_TOKENIZING = ("add_generation_prompt", "return_token_strs")


class TextTokenization(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize`` of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    """False omits what the tokenizer adds to a text, such as the beginning of a sequence."""
    return_token_strs: bool | None = None


class ChatTokenization(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /tokenize`` of a chat that chats themselves do not have."""

    add_generation_prompt: bool | None = None
    """False leaves out the beginning of the answer."""
    return_token_strs: bool | None = None


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as the vocabulary writes them, if asked for."""


class TokensToDecode(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[protocol.TokenId]
    model: str | None = None


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, special ones included."""

    prompt: str


class TokenizerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer, by the names of ``tokenizer_config.json``."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: Any
    """A text, texts by name, or null."""


def tokenize(model: ServedModel, body: bytes) -> TokenizedPrompt:
    """Return the tokens of a text, or of the prompt that a chat would have. Raises `OpenAIRefused` and `DataError`."""
    fields = protocol.read_fields(body)
    if "messages" in fields:
        token_ids, shows_texts = _tokenize_chat(model, fields)
    else:
        text = protocol.convert_fields(fields, TextTokenization)
        model.check_name(text.model)
        special = text.add_special_tokens is not False
        token_ids = model.tokenizer.encode(text.prompt, add_special_tokens=special) if text.prompt else []
        shows_texts = bool(text.return_token_strs)
    texts = model.tokenizer.hugging_face.convert_ids_to_tokens(token_ids) if shows_texts else None
    return TokenizedPrompt(count=len(token_ids), max_model_len=model.max_length, tokens=token_ids, token_strs=texts)


def _tokenize_chat(model: ServedModel, fields: dict[str, Any]) -> tuple[list[int], bool]:
    settings = protocol.convert_fields(fields, ChatTokenization)
    protocol.refuse_effects(fields, _ONLY_OF_TEXTS)
    request = protocol.convert_request(
        {name: value for name, value in fields.items() if name not in (*_OF_TOKENIZING, *_ONLY_OF_TEXTS)},
        protocol.ChatRequest,
    )
    model.check_name(request.model)
    messages = model.messages_of(request)
    if settings.add_generation_prompt is False:
        variables = model.variables_of(request)
        token_ids = model.tokenizer.encode_chat(messages, add_generation_prompt=False, variables=variables)
    else:
        token_ids = model.chat_ids(request, messages)
    return token_ids, bool(settings.return_token_strs)


def detokenize(model: ServedModel, body: bytes) -> DetokenizedText:
    """Return the text of tokens. Raises `OpenAIRefused`."""
    request = protocol.convert_fields(protocol.read_fields(body), TokensToDecode)
    model.check_name(request.model)
    highest = max(request.tokens, default=0)
    if highest >= model.vocabulary:
        raise OpenAIRefused(f"the token id {highest} must be less than {model.vocabulary}", param="tokens")
    return DetokenizedText(prompt=model.tokenizer.decode(request.tokens, skip_special_tokens=False))


def describe_tokenizer(model: ServedModel, _: bytes) -> TokenizerDescription:
    """Return what the tokenizer is."""
    hugging_face = model.tokenizer.hugging_face
    return TokenizerDescription(
        tokenizer_class=type(hugging_face).__name__,
        model_max_length=model.max_length,
        bos_token=hugging_face.bos_token,
        eos_token=hugging_face.eos_token,
        pad_token=hugging_face.pad_token,
        unk_token=hugging_face.unk_token,
        chat_template=hugging_face.chat_template,
    )


Answer = Callable[[ServedModel, bytes], msgspec.Struct]


class TokenizerPath:
    """The handler of one path."""

    def __init__(self, find: Callable[[Request], ServedModel], answer: Answer) -> None:
        """`find` returns the model of a request, or raises `OpenAIRefused`; `answer` takes it and the body."""
        self._find = find
        self._answer = answer

    async def respond(self, request: Request) -> Response:
        """Answer a request."""
        try:
            model = self._find(request)
            answer = self._answer(model, await read_body(request))
        except (ConfigError, DataError) as error:  # from a chat template, or a text without tokens
            return as_response(OpenAIRefused(str(error)))
        except OpenAIRefused as error:
            return as_response(error)
        return Response(msgspec.json.encode(answer), media_type="application/json")


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

        def begin(
            model: ServedModel, body: bytes
        ) -> tuple[protocol.ChatRequest, choices.GenerationJob, choices.ResponseView]:
            chat_request = protocol.read_request(body, protocol.ChatRequest)
            model.check_name(chat_request.model)
            job = choices.chat_job(model, chat_request)
            return chat_request, job, choices.ChatView(model, chat_request, job)

        return await self._carry_out(request, begin)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in the form of the Responses API."""
        from tandem.rollout.openai_api.responses_request import chat_fields_renamed, read_responses_request
        from tandem.rollout.openai_api.responses_view import ResponsesView

        def begin(
            model: ServedModel, body: bytes
        ) -> tuple[protocol.ChatRequest, choices.GenerationJob, choices.ResponseView]:
            responses_request, chat_request = read_responses_request(body)
            model.check_name(chat_request.model)
            with chat_fields_renamed():
                job = choices.chat_job(model, chat_request)
            return chat_request, job, ResponsesView(model, responses_request, chat_request, job)

        return await self._carry_out(request, begin)

    async def completions(self, request: Request) -> Response:
        """Continue texts."""

        def begin(
            model: ServedModel, body: bytes
        ) -> tuple[protocol.CompletionRequest, choices.GenerationJob, choices.ResponseView]:
            completion_request = protocol.read_request(body, protocol.CompletionRequest)
            model.check_name(completion_request.model)
            job = choices.completion_job(model, completion_request)
            return completion_request, job, choices.CompletionView(model, completion_request, job)

        return await self._carry_out(request, begin)

    async def models(self, request: Request) -> Response:
        """List the models that are served."""
        try:
            model = self._find(request)
        except OpenAIRefused as error:
            return as_response(error)
        names = (model.name, *model.aliases)
        return _json(protocol.ModelList(data=[_card(model, name) for name in names]))

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
                pieces = await _while_there(request.receive, choices.collect(model, generation_request, job))
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
    model: ServedModel,
    request: protocol.ChatRequest | protocol.CompletionRequest,
    job: choices.GenerationJob,
    view: choices.ResponseView,
) -> AsyncGenerator[bytes, None]:
    """Yield a stream; an error after its beginning becomes one of its events."""
    shows_tokens = request.return_token_ids or request.wants_logprobs
    num_tokens = 0
    try:
        for first in view.begin():
            yield view.encode(first)
        async with contextlib.aclosing(choices.grow(model, request, job)) as growing:
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


def _card(model: ServedModel, name: str) -> protocol.ModelCard:
    return protocol.ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_length)


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
