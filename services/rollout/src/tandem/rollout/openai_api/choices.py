"""The responses to one request while they grow, and how chats and completions show them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tandem.common.messages import Media, SamplingParameters
from tandem.rollout.engine import Alternatives, PromptScores
from tandem.rollout.openai_api import protocol
from tandem.rollout.openai_api.generator import ResponseChunk, ServedModel
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.rollout.openai_api.text import ChatPart, ChatReader, StoppedText, TextStream
from tandem.samples.responses import chat_markers

Chosen = tuple[int, "ResponsePiece"]
_PROMPT_TAIL = 32
"""Tokens at the end of a prompt that tell whether a response begins within reasoning."""
_MOST_SCORES = 1 << 20
"""Log-probabilities of prompts in one answer, with their alternatives: some hundred bytes of memory each."""


class WantedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response to make."""

    prompt: int
    """Number of its prompt."""
    sampling: SamplingParameters
    seed: int


class GenerationJob(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what to generate."""

    prompts: list[list[int]]
    responses: list[WantedResponse]
    """Wanted responses, in the order of their choices."""
    media: Media = ()
    """Media of a chat's prompt."""


class ResponsePiece(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of a response."""

    text: str
    reasoning: str = ""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int] = []
    alternatives: list[Alternatives] | None = None
    prompt_scores: PromptScores | None = None
    """Probabilities of the prompt's tokens, in the first piece."""
    finish_reason: protocol.FinishReason | None
    tool_calls: list[protocol.ToolCall] = []


# --- what is asked for -----------------------------------------------------------------------------------------------


def chat_job(model: ServedModel, request: protocol.ChatRequest) -> GenerationJob:
    """Return a chat's job. Raises `OpenAIRefused` and what `ServedModel.chat_ids` raises."""
    messages = model.messages_of(request)
    job = _job(model, request, [model.chat_ids(request, messages)], request.max_response_tokens)
    return msgspec.structs.replace(job, media=model.tokenizer.media_in(messages) or ())


def completion_job(model: ServedModel, request: protocol.CompletionRequest) -> GenerationJob:
    """Return the job of a request for completions. Raises `OpenAIRefused` and what `Tokenizer.encode` raises."""
    special = request.add_special_tokens is not False
    prompts = [
        model.tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in request.prompts()
    ]
    if request.scores_prompt:
        num_scores = sum(map(len, prompts)) * (request.n or 1) * (request.num_alternatives + 1)
        if num_scores > _MOST_SCORES:
            message = f"logprobs: the prompts would have {num_scores} with their alternatives, at most {_MOST_SCORES}"
            raise OpenAIRefused(message, param="logprobs")
    return _job(model, request, prompts, request.max_response_tokens)


def _job(
    model: ServedModel, request: protocol.GenerationFields, prompts: list[list[int]], max_response_tokens: int | None
) -> GenerationJob:
    for prompt in prompts:
        if not prompt:
            raise OpenAIRefused("the prompt has no tokens", param="prompt")
        if max(prompt) >= model.vocabulary:
            raise OpenAIRefused(f"the token id {max(prompt)} must be less than {model.vocabulary}", param="prompt")
        if len(prompt) >= model.max_length:
            raise protocol.too_long(len(prompt), model.max_length)
    num_samples = request.n or 1
    if len(prompts) * num_samples > protocol.MAX_CHOICES:
        limit = protocol.MAX_CHOICES
        message = f"n: {num_samples} responses to {len(prompts)} prompts, but at most {limit} responses are allowed"
        raise OpenAIRefused(message, param="n")
    seed = secrets.randbits(64) if request.seed is None else request.seed % (1 << 64)
    ends = () if request.ignore_eos else model.stop_token_ids
    as_tokens = model.tokenizer.undivided_ids(request.stop_strings)
    schema = request.response_schema
    grammar = None if schema is None else model.grammar_of(schema)
    responses: list[WantedResponse] = []
    for number, prompt in enumerate(prompts):
        room = model.max_length - len(prompt)
        sampling = SamplingParameters(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=request.top_p or 1.0,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            max_new_tokens=min(max_response_tokens or room, room),
            stop_token_ids=tuple(dict.fromkeys([*ends, *(request.stop_token_ids or ()), *as_tokens])),
            stop_strings=request.stop_strings,
        )
        sampling = request.served(sampling, grammar)
        for _ in range(num_samples):
            responses.append(WantedResponse(prompt=number, sampling=sampling, seed=_seed(seed, len(responses))))
    return GenerationJob(prompts=prompts, responses=responses)


def _seed(seed: int, choice: int) -> int:
    """Return the seed of a response; the first one has the request's own."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/choice {choice}".encode(), digest_size=8).digest(), "little")


# --- what comes of it ------------------------------------------------------------------------------------------------


class ResponseBuilder:
    """A builder of pieces from the chunks of one response; equal responses give equal pieces."""

    def __init__(
        self, model: ServedModel, request: protocol.GenerationFields, prompt_ids: Sequence[int], seed: int
    ) -> None:
        self._reader: ChatReader | None = None
        marker_ids = frozenset[int]()
        if isinstance(request, protocol.ChatRequest):
            markers = chat_markers(model.response_markers, model.tool_call_parser, may_call=request.may_call)
            if markers.texts:
                marker_ids = model.tokenizer.marker_ids(markers.texts)
                prompt = model.tokenizer.decode(prompt_ids[-_PROMPT_TAIL:], skip_special_tokens=False)
                # A conversation grows, and its turns may be asked for with the same seed.
                key = f"{seed}/{len(prompt_ids)}"
                self._reader = ChatReader(
                    markers, key, prompt=prompt, tools=request.offered_tools, call_limit=request.call_limit
                )
        shows_special = request.skip_special_tokens is False
        self._stream = TextStream(
            model.tokenizer,
            skip_special_tokens=not shows_special,
            shown_ids=marker_ids,
            before_ids=prompt_ids[-_PROMPT_TAIL:],
        )
        self._stopped = StoppedText(request.stop_strings)

    def add(self, chunk: ResponseChunk) -> ResponsePiece:
        """Return what a chunk adds to the response; its text may belong to earlier tokens too."""
        is_last = chunk.finish_reason is not None
        text = self._stopped.push(self._stream.push(chunk.token_ids))
        if is_last:
            text += self._stopped.push(self._stream.finish()) + self._stopped.finish()
        if self._reader is None:
            return _piece(chunk, ChatPart(text, "", []), chunk.finish_reason)
        part = self._reader.push(text)
        if is_last:
            last_part = self._reader.finish()
            part = ChatPart(
                part.text + last_part.text,
                part.reasoning + last_part.reasoning,
                [*part.tool_calls, *last_part.tool_calls],
            )
        reason: protocol.FinishReason | None = chunk.finish_reason
        if reason == "stop" and self._reader.has_calls:
            reason = "tool_calls"
        return _piece(chunk, part, reason)


class WithoutText:
    """A builder of pieces for a request that wants no texts."""

    @staticmethod
    def add(chunk: ResponseChunk) -> ResponsePiece:
        """Return what a chunk adds to the response."""
        return _piece(chunk, ChatPart("", "", []), chunk.finish_reason)


class WithoutResponse:
    """A builder of pieces for a request that wants its prompt only."""

    @staticmethod
    def add(chunk: ResponseChunk) -> ResponsePiece:
        """Return what a chunk says of the prompt."""
        reason: protocol.FinishReason | None = None if chunk.finish_reason is None else "length"
        prompt = ResponseChunk(
            token_ids=[], logprobs=[], versions=chunk.versions, prompt_scores=chunk.prompt_scores, alternatives=[]
        )
        return _piece(prompt, ChatPart("", "", []), reason)


def _piece(chunk: ResponseChunk, part: ChatPart, reason: protocol.FinishReason | None) -> ResponsePiece:
    return ResponsePiece(
        text=part.text,
        reasoning=part.reasoning,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        versions=chunk.versions,
        alternatives=chunk.alternatives,
        prompt_scores=chunk.prompt_scores,
        finish_reason=reason,
        tool_calls=part.tool_calls,
    )


def _has_text(request: protocol.GenerationFields) -> bool:
    return not isinstance(request, protocol.CompletionRequest) or request.detokenize is not False


async def grow(
    model: ServedModel, request: protocol.GenerationFields, job: GenerationJob
) -> AsyncGenerator[Chosen, None]:
    """Yield the pieces of all responses as they come, with the numbers of their choices.

    If iteration ends early, generation stops.
    """
    pieces: asyncio.Queue[Chosen | Exception] = asyncio.Queue()
    is_streamed = bool(request.stream)

    async def follow(number: int, response: WantedResponse) -> None:
        try:
            prompt_ids = job.prompts[response.prompt]
            growing: ResponseBuilder | WithoutText | WithoutResponse
            if isinstance(request, protocol.CompletionRequest) and request.wants_prompt_only:
                growing = WithoutResponse()
            elif _has_text(request):
                growing = ResponseBuilder(model, request, prompt_ids, response.seed)
            else:
                growing = WithoutText()
            chunks = model.generator.generate(
                prompt_ids, response.sampling, response.seed, job.media, is_streamed=is_streamed
            )
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    pieces.put_nowait((number, growing.add(chunk)))
        except Exception as error:  # the consumer of the pieces must know of any error
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(follow(number, response)) for number, response in enumerate(job.responses)]
    try:
        num_left = len(tasks)
        while num_left:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            num_left -= piece[1].finish_reason is not None
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(model: ServedModel, request: protocol.GenerationFields, job: GenerationJob) -> list[ResponsePiece]:
    """Return all responses, each complete."""
    parts: list[list[ResponsePiece]] = [[] for _ in job.responses]
    async with contextlib.aclosing(grow(model, request, job)) as growing:
        async for number, piece in growing:
            parts[number].append(piece)
    return [joined(pieces) for pieces in parts]


def joined(pieces: Sequence[ResponsePiece]) -> ResponsePiece:
    """Join the pieces of a response into one."""
    if len(pieces) == 1:
        return pieces[0]
    return ResponsePiece(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        versions=[version for piece in pieces for version in piece.versions],
        alternatives=_joined_alternatives(pieces),
        prompt_scores=pieces[0].prompt_scores,
        finish_reason=pieces[-1].finish_reason,
        tool_calls=[call for piece in pieces for call in piece.tool_calls],
    )


def _joined_alternatives(pieces: Sequence[ResponsePiece]) -> list[Alternatives] | None:
    if all(piece.alternatives is None for piece in pieces):
        return None
    return [each for piece in pieces for each in piece.alternatives or []]


# --- how it is shown -------------------------------------------------------------------------------------------------


class ServerEvents:
    """Server-sent events without names, as chats and completions have them."""

    closing = b"data: [DONE]\n\n"
    """The end of a complete stream."""

    def encode(self, chunk: Any) -> bytes:
        """Return a part of a stream as an event."""
        return encode_event(msgspec.json.encode(chunk))

    def encode_error(self, error: OpenAIRefused) -> bytes:
        """Return an error after the beginning of a stream as an event."""
        return encode_event(error.encode())


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    header = b"" if name is None else b"event: " + name.encode() + b"\n"
    return header + b"data: " + data + b"\n\n"


class ResponseView(Protocol):
    """The form in which an endpoint shows responses."""

    closing: bytes

    def answer(self, pieces: Sequence[ResponsePiece]) -> Any:
        """Return the whole answer."""
        ...

    def begin(self) -> Iterator[Any]:
        """Yield the start of a stream."""
        ...

    def chunks(self, number: int, piece: ResponsePiece) -> Iterator[Any]:
        """Yield the parts of a stream that a piece of a response makes."""
        ...

    def end(self, num_tokens: int) -> Iterator[Any]:
        """Yield the end of a stream of so many tokens."""
        ...

    def encode(self, chunk: Any) -> bytes:
        """Return a part of a stream as an event."""
        ...

    def encode_error(self, error: OpenAIRefused) -> bytes:
        """Return an error after the beginning of a stream as an event."""
        ...


class ChatView(ServerEvents):
    """The form of a chat's responses."""

    def __init__(self, model: ServedModel, request: protocol.ChatRequest, job: GenerationJob) -> None:
        self._model = model
        self._request = request
        self._job = job
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._num_calls = [0] * len(job.responses)
        """Calls sent so far, by choice."""

    def answer(self, pieces: Sequence[ResponsePiece]) -> protocol.ChatAnswer:
        """Return the whole answer."""
        choices = [
            protocol.ChatChoice(
                index=number,
                message=self._message(number, piece),
                logprobs=self._logprobs(piece),
                finish_reason=_ended(piece),
                token_ids=_shown_ids(self._request, piece.token_ids),
            )
            for number, piece in enumerate(pieces)
        ]
        return protocol.ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=_usage(self._job, sum(len(piece.token_ids) for piece in pieces)),
            prompt_token_ids=_shown_ids(self._request, self._job.prompts[0]),
            weight_versions=versions_of(self._model, pieces),
        )

    def begin(self) -> Iterator[protocol.ChatChunk]:
        """Yield the start of a stream: the role of the messages that follow."""
        ids = _shown_ids(self._request, self._job.prompts[0])
        for number in range(len(self._job.responses)):
            choice = protocol.ChatChunkChoice(index=number, delta=protocol.MessageDelta(role="assistant", content=""))
            yield self._chunk([choice], prompt_token_ids=UNSET if number else ids)

    def chunks(self, number: int, piece: ResponsePiece) -> Iterator[protocol.ChatChunk]:
        """Yield a part of a stream: text and tokens, then calls, of which clients expect one delta a chunk."""
        calls = piece.tool_calls
        choice = protocol.ChatChunkChoice(
            index=number,
            delta=protocol.MessageDelta(content=piece.text or UNSET, reasoning_content=piece.reasoning or UNSET),
            logprobs=self._logprobs(piece),
            finish_reason=None if calls else piece.finish_reason,
            token_ids=_shown_ids(self._request, piece.token_ids),
        )
        yield self._chunk([choice], weight_versions=versions_of(self._model, [piece]))
        for call in calls:
            for delta in _deltas(self._num_calls[number], call):
                yield self._chunk(
                    [protocol.ChatChunkChoice(index=number, delta=protocol.MessageDelta(tool_calls=[delta]))]
                )
            self._num_calls[number] += 1
        if calls and piece.finish_reason:
            yield self._chunk(
                [
                    protocol.ChatChunkChoice(
                        index=number, delta=protocol.MessageDelta(), finish_reason=piece.finish_reason
                    )
                ]
            )

    def end(self, num_tokens: int) -> Iterator[protocol.ChatChunk]:
        """Yield the end of a stream."""
        if self._request.wants_usage:
            yield self._chunk([], usage=_usage(self._job, num_tokens))

    def _chunk(
        self,
        choices: list[protocol.ChatChunkChoice],
        *,
        usage: protocol.TokenUsage | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        weight_versions: list[int] | UnsetType = UNSET,
    ) -> protocol.ChatChunk:
        return protocol.ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=usage if self._request.wants_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
            weight_versions=weight_versions,
        )

    def _message(self, number: int, piece: ResponsePiece) -> protocol.AnswerMessage:
        message = _message(piece)
        if not self._request.shows_sampled_ids:
            return message
        return msgspec.structs.replace(
            message,
            prompt_token_ids=self._job.prompts[self._job.responses[number].prompt],
            generation_token_ids=piece.token_ids,
            generation_log_probs=piece.logprobs,
        )

    def _logprobs(self, piece: ResponsePiece) -> protocol.ChatLogprobs | None:
        if not self._request.wants_logprobs:
            return None
        return protocol.ChatLogprobs(content=describe_tokens(self._model, self._request, piece))


class CompletionView(ServerEvents):
    """The form of completions."""

    def __init__(self, model: ServedModel, request: protocol.CompletionRequest, job: GenerationJob) -> None:
        self._model = model
        self._request = request
        self._job = job
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._num_characters = [0] * len(job.responses)
        """Characters of each choice's tokens so far."""
        self._prompt_texts = request.prompts() if request.echo else []
        self._echoed: set[int] = set()
        """Choices whose prompt has been shown."""

    def answer(self, pieces: Sequence[ResponsePiece]) -> protocol.CompletionAnswer:
        """Return the whole answer."""
        choices = [self._choice(number, piece, is_first=True) for number, piece in enumerate(pieces)]
        usage = _usage(self._job, sum(len(piece.token_ids) for piece in pieces))
        return self._answer(choices, usage, versions_of(self._model, pieces))

    def begin(self) -> Iterator[protocol.CompletionAnswer]:
        """Yield the start of a stream: nothing, unless token ids are asked for."""
        if self._request.return_token_ids:
            empty = ResponsePiece(text="", token_ids=[], logprobs=[], finish_reason=None)
            for number in range(len(self._job.responses)):
                yield self._part([self._choice(number, empty, is_first=True)])

    def chunks(self, number: int, piece: ResponsePiece) -> Iterator[protocol.CompletionAnswer]:
        """Yield a part of a stream."""
        yield self._part([self._choice(number, piece, is_first=False)], versions_of(self._model, [piece]))

    def end(self, num_tokens: int) -> Iterator[protocol.CompletionAnswer]:
        """Yield the end of a stream."""
        if self._request.wants_usage:
            yield self._answer([], _usage(self._job, num_tokens))

    def _part(
        self, choices: list[protocol.CompletionChoice], weight_versions: list[int] | UnsetType = UNSET
    ) -> protocol.CompletionAnswer:
        return self._answer(choices, None if self._request.wants_usage else UNSET, weight_versions)

    def _answer(
        self,
        choices: list[protocol.CompletionChoice],
        usage: protocol.TokenUsage | UnsetType | None,
        weight_versions: list[int] | UnsetType = UNSET,
    ) -> protocol.CompletionAnswer:
        return protocol.CompletionAnswer(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=usage,
            weight_versions=weight_versions,
        )

    def _choice(self, number: int, piece: ResponsePiece, *, is_first: bool) -> protocol.CompletionChoice:
        prompt_ids = self._job.prompts[self._job.responses[number].prompt]
        return protocol.CompletionChoice(
            index=number,
            text=self._echo(number, piece) + piece.text,
            logprobs=self._logprobs(number, piece),
            finish_reason=piece.finish_reason,
            token_ids=_shown_ids(self._request, piece.token_ids),
            prompt_token_ids=_shown_ids(self._request, prompt_ids) if is_first else UNSET,
        )

    def _echo(self, number: int, piece: ResponsePiece) -> str:
        """Return the text of a choice's prompt before what it generates, once."""
        if not self._prompt_texts or not _has_text(self._request) or number in self._echoed:
            return ""
        if not piece.versions and piece.finish_reason is None:  # the beginning of a stream, with token ids alone
            return ""
        self._echoed.add(number)
        prompt = self._prompt_texts[self._job.responses[number].prompt]
        if isinstance(prompt, str):
            return prompt
        shows_special = self._request.skip_special_tokens is False
        return self._model.tokenizer.decode(prompt, skip_special_tokens=not shows_special)

    def _logprobs(self, number: int, piece: ResponsePiece) -> protocol.CompletionLogprobs | None:
        if not self._request.wants_logprobs:
            return None
        token_ids, token_logprobs = piece.token_ids, list[float | None](piece.logprobs)
        alternatives = piece.alternatives or [[]] * len(token_ids)
        if piece.prompt_scores is not None:
            token_ids = [*self._job.prompts[self._job.responses[number].prompt], *token_ids]
            token_logprobs = [None, *piece.prompt_scores.logprobs_P.tolist(), *token_logprobs]
            alternatives = [[], *piece.prompt_scores.alternatives, *alternatives]
        if not _has_text(self._request) and not self._request.num_alternatives:
            return protocol.CompletionLogprobs(
                tokens=[], token_logprobs=token_logprobs, top_logprobs=[], text_offset=[]
            )
        tokens = [self._text_of(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters[number])
            self._num_characters[number] += len(token)
        return protocol.CompletionLogprobs(
            tokens=tokens,
            token_logprobs=token_logprobs,
            top_logprobs=[
                None if logprob is None else self._top_logprobs(token_id, logprob, token_alternatives)
                for token_id, logprob, token_alternatives in zip(token_ids, token_logprobs, alternatives, strict=True)
            ],
            text_offset=offsets,
        )

    def _top_logprobs(self, token_id: int, logprob: float, alternatives: Alternatives) -> dict[str, float]:
        """Return a token and its alternatives by their texts, the likeliest of those that have the same text.

        Parts of characters look alike: an alternative that looks like the token itself goes by its id, since clients
        compare the token with all that are here to learn whether it was the likeliest.
        """
        text = self._text_of(token_id)
        top: dict[str, float] = {}
        for alternative_id, alternative_logprob in reversed(alternatives):
            name = self._text_of(alternative_id)
            is_other = name == text and alternative_id != token_id
            top[f"token_id:{alternative_id}" if is_other else name] = alternative_logprob
        return {**top, text: logprob}

    def _text_of(self, token_id: int) -> str:
        return _named(self._model, self._request, token_id)


def describe_tokens(
    model: ServedModel, request: protocol.GenerationFields, piece: ResponsePiece
) -> list[protocol.TokenLogprob]:
    """Return the log-probability of each token of a piece, in the form of chats."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        text = _named(model, request, token_id)
        return {"token": text, "logprob": logprob, "bytes": list(model.tokenizer.token_bytes(token_id))}

    alternatives = piece.alternatives or [[]] * len(piece.token_ids)
    return [
        protocol.TokenLogprob(
            **describe(token_id, logprob),
            top_logprobs=[protocol.TopLogprob(**describe(*alternative)) for alternative in token_alternatives],
        )
        for token_id, logprob, token_alternatives in zip(piece.token_ids, piece.logprobs, alternatives, strict=True)
    ]


def _named(model: ServedModel, request: protocol.GenerationFields, token_id: int) -> str:
    """Return what log-probabilities call a token."""
    if request.return_tokens_as_token_ids:
        return f"token_id:{token_id}"
    return model.tokenizer.token_text(token_id)


def _ended(piece: ResponsePiece) -> protocol.FinishReason:
    assert piece.finish_reason is not None, "the last piece of a response says why it ended"
    return piece.finish_reason


def _deltas(index: int, call: protocol.ToolCall) -> Iterator[protocol.ToolCallDelta]:
    """Yield the name of a called function, then its arguments."""
    named = protocol.FunctionDelta(name=call.function.name, arguments="")
    yield protocol.ToolCallDelta(index=index, id=call.id, type="function", function=named)
    yield protocol.ToolCallDelta(index=index, function=protocol.FunctionDelta(arguments=call.function.arguments))


def _message(piece: ResponsePiece) -> protocol.AnswerMessage:
    has_only_calls = piece.tool_calls and not piece.text
    return protocol.AnswerMessage(
        content=None if has_only_calls else piece.text,
        reasoning_content=piece.reasoning or UNSET,
        tool_calls=piece.tool_calls or UNSET,
    )


def _shown_ids(request: protocol.GenerationFields, token_ids: list[int]) -> list[int] | UnsetType:
    return token_ids if request.return_token_ids else UNSET


def versions_of(model: ServedModel, pieces: Sequence[ResponsePiece]) -> list[int] | UnsetType:
    """Return the weight versions that made these tokens, in a run with refits."""
    return sorted({version for piece in pieces for version in piece.versions}) if model.shows_versions else UNSET


def _usage(job: GenerationJob, num_tokens: int) -> protocol.TokenUsage:
    num_prompt = sum(map(len, job.prompts))
    return protocol.TokenUsage(
        prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens
    )
