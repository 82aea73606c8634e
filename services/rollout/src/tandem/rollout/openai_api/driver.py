"""Generation for HTTP requests, which join and leave at any time, with a single-threaded engine.

Two threads meet here. The engine's thread calls `EngineDriver.work` again and again. Each call admits new requests, has
the engine make a token for every running one, and sends the results to their consumers. The event loop that answers
HTTP calls `generate`, which waits for these chunks; leaving it early takes the request out of the engine at the next
token. So does not to read: a stream with much that is not read waits outside the engine until its client reads again.
Neither thread waits for the other, except in `wait`, while there is nothing to generate.

While all places are taken, responses take turns: one that has made little, or nothing yet, gets the place of one that
has made much, which continues once a place is free. So a short answer comes soon, whatever others have asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Media, SamplingParameters
from tandem.rollout.engine import Engine, EngineCompletion, NewTokens, SequenceRequest, VersionNotHeld
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.openai_api.generator import ResponseChunk
from tandem.rollout.openai_api.refusals import OpenAIRefused, unavailable

_MAX_UNFINISHED = 4096
"""Responses that run or wait, of all requests together."""
_MOST_UNREAD = 64
"""Chunks of a stream that wait for its client while the engine makes more."""
_MIN_TURN = 8
"""Tokens of a turn, unless the prompt has more: a response that returns has its prompt computed again, with what it has
made, so that turns of that length at most double what is computed."""
_TURN_RATIO = 8
"""Ratio of what one response has made to what another has that gives the other its place."""


class _Stream:
    """The destination of one response's chunks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request: SequenceRequest, is_streamed: bool) -> None:
        self.loop = loop
        self.is_streamed = is_streamed
        """Whether its consumer wants each token at once, and not all at the end."""
        self.request = request
        """The rest for the engine to do, under a number that is never reused."""
        self.chunks: asyncio.Queue[ResponseChunk | OpenAIRefused] = asyncio.Queue()
        self.num_sent = 0
        """Tokens sent of what the engine has made since it got the request."""
        self.num_steps_before = 0
        """Steps of the engine before it got the request."""


class EngineDriver:
    """Generation with an engine; the module's docstring says which thread does what."""

    def __init__(
        self,
        engine: Engine,
        *,
        step: Callable[[], list[EngineCompletion]] | None = None,
        notify: Callable[[], None] | None = None,
        most_at_once: int = _MAX_UNFINISHED,
        for_external_requests: bool = False,
    ) -> None:
        """Own the engine, or share it.

        Args:
            engine: makes the tokens.
            step: makes the next tokens if others share the engine: calls `Engine.step`, and `hand_out` of each.
            notify: called by the event loop when there is something to do.
            most_at_once: responses that the engine has at the same time; others wait here.
            for_external_requests: whether requests are external. Their numbers are negative, and no others are.

        """
        self._engine = engine
        self._step = step or (lambda: engine.step())
        self._notify = notify or (lambda: None)
        self._most_at_once = most_at_once
        self._for_external_requests = for_external_requests
        self._numbers = itertools.count(-1, -1) if for_external_requests else itertools.count()
        self._changed = threading.Condition()
        self._arrived: deque[_Stream] = deque()
        self._left: set[_Stream] = set()
        self._unread: set[_Stream] = set()
        """Streams that wait outside the engine until their clients have read what there is."""
        self._closed: OpenAIRefused | None = None
        self._streams: dict[int, _Stream] = {}
        """Streams of the requests that the engine has."""
        self._num_unfinished = 0
        self._num_steps = 0
        self._telling: asyncio.AbstractEventLoop | None = None
        """The event loop that is about to tell the engine's thread that there is something to do."""

    @property
    def num_unfinished(self) -> int:
        """Responses not finished yet."""
        return self._num_unfinished

    @property
    def num_running(self) -> int:
        """Responses that the engine has."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether the engine's thread has something to do; what it has made may still be on its way to clients."""
        return bool(self._streams or self._arrived or self._left)

    # --- called by the event loop ------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        seed: int,
        media: Media = (),
        *,
        is_streamed: bool = True,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield a response as it is made; see `tandem.rollout.openai_api.generator.ResponseGenerator`."""
        request = SequenceRequest(
            request_id=next(self._numbers),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            seed=seed,
            media=media,
            is_external=self._for_external_requests,
        )
        stream = _Stream(asyncio.get_running_loop(), request, is_streamed)
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if self._num_unfinished >= _MAX_UNFINISHED:
                message = f"{self._num_unfinished} responses are being made or wait: ask again later"
                raise OpenAIRefused(message, status=429, kind="rate_limit_error", code="overloaded")
            self._num_unfinished += 1
            self._arrived.append(stream)
        self._tell(stream.loop)
        is_finished = False
        try:
            while not is_finished:
                chunk = await stream.chunks.get()
                self._go_on_if_read(stream)
                is_finished = isinstance(chunk, OpenAIRefused) or chunk.finish_reason is not None
                if isinstance(chunk, OpenAIRefused):
                    raise chunk
                yield chunk
        finally:
            with self._changed:
                self._num_unfinished -= 1
                if not is_finished:
                    self._left.add(stream)
            if not is_finished:
                self._tell(stream.loop)

    def _go_on_if_read(self, stream: _Stream) -> None:
        """Let a stream return to the engine that was taken out because it was not read."""
        if not stream.chunks.empty():
            return
        with self._changed:  # before the look: the engine's thread looks at the chunks within it
            is_out = stream in self._unread
            if is_out:
                self._unread.remove(stream)
                self._arrived.append(stream)
        if is_out:
            self._tell(stream.loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the engine's thread that there is something to do, once for all that happens in this turn of the loop.

        Responses that are asked for together begin together then, and the threads do not pass each other the
        interpreter for each.
        """
        if self._telling is not loop:
            self._telling = loop
            loop.call_soon(self._tell_now)

    def _tell_now(self) -> None:
        self._telling = None
        with self._changed:
            self._changed.notify()
        self._notify()

    # --- called by the thread that drives the engine -----------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to do, or after `timeout_s`."""
        with self._changed:
            if not self.has_work:
                self._changed.wait(timeout_s)

    def work(self) -> None:
        """Make one token for every response. Raises what the engine raises; no response follows after that."""
        self._take_out_unread()
        self.admit()
        if self._streams:
            self.hand_out(self._step())

    def admit(self) -> None:
        """Give the engine the new requests, and take out those that were abandoned."""
        with self._changed:
            abandoned, self._left = self._left, set()
            self._unread -= abandoned
            waiting = [stream for stream in self._arrived if stream not in abandoned]
            gone = [number for number, stream in self._streams.items() if stream in abandoned]
            num_joining = max(0, self._most_at_once - len(self._streams) + len(gone))
            if 0 < num_joining < len(waiting):
                running = Counter(_version_of(each) for each in self._streams.values() if each not in abandoned)
                waiting = _take_turns(waiting, running)
            self._arrived = deque(waiting[num_joining:])
        for number in gone:
            del self._streams[number]
            self._engine.abort(number)
        sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]] = []
        joining = waiting[:num_joining]
        if len(waiting) > num_joining:
            joining += self._exchange(sent)
        for stream in joining:
            try:
                self._engine.add_request(stream.request)
                self._streams[stream.request.request_id] = stream
                stream.num_steps_before = self._num_steps
            except VersionNotHeld as error:
                sent.append((stream, OpenAIRefused(str(error), status=409, code="version_not_held")))
            except DataError as error:
                sent.append((stream, OpenAIRefused(str(error))))
        _send(sent)

    def hand_out(self, completions: Sequence[EngineCompletion]) -> list[EngineCompletion]:
        """Send the engine's results to their streams; return the finished requests of others."""
        self._num_steps += 1
        sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]] = []
        other_completions = []
        for completion in completions:
            stream = self._streams.pop(completion.request_id, None)
            if stream is None:
                other_completions.append(completion)
            elif completion.finish_reason == "abort":
                sent.append((stream, OpenAIRefused("its weights give probabilities that are not numbers")))
            else:
                sent.append((stream, _last_chunk(completion, stream.num_sent)))
        starts = {number: stream.num_sent for number, stream in self._streams.items() if stream.is_streamed}
        for number, tokens in (self._engine.made(starts) if starts else {}).items():
            if len(tokens.token_ids_T):
                self._streams[number].num_sent += len(tokens.token_ids_T)
                sent.append((self._streams[number], _chunk(tokens)))
        _send(sent)
        return other_completions

    def suspend(self) -> None:
        """Take all requests out of the engine, which does something else now; `admit` has them go on."""
        waiting = []
        sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]] = []
        for number, stream in self._streams.items():
            sent += self._take_out(number, stream)
            waiting.append(stream)
        self._streams.clear()
        _send(sent)
        with self._changed:
            self._arrived.extendleft(reversed(waiting))

    def _take_out(self, number: int, stream: _Stream) -> list[tuple[_Stream, ResponseChunk | OpenAIRefused]]:
        """Take a request out of the engine, so that its stream can go on with the rest; return what is to be sent."""
        completion = self._engine.abort(number)
        if completion is None or not len(completion.token_ids_T):
            return []
        chunks = [_chunk(completion, stream.num_sent)] if len(completion.token_ids_T) > stream.num_sent else []
        stream.request = self._continue_request(stream.request, completion)
        stream.num_sent = 0
        return [(stream, chunk) for chunk in chunks]

    def _exchange(self, sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]]) -> list[_Stream]:
        """Take responses out of the engine whose turn is over; return those that join in their places.

        Responses of a given weight version stay, since the engine may have dropped it when they return.
        """
        leaving = [
            stream
            for stream in self._streams.values()
            if self._num_steps - stream.num_steps_before >= max(_MIN_TURN, len(stream.request.prompt_ids))
            and _version_of(stream) is None
        ]
        if not leaving:
            return []
        leaving.sort(key=self._num_made, reverse=True)
        with self._changed:
            joining = heapq.nsmallest(len(leaving), self._arrived, key=lambda stream: stream.request.num_made)
            pairs = [*zip(leaving, joining, strict=False)]
            pairs = [pair for pair in pairs if pair[1].request.num_made * _TURN_RATIO <= self._num_made(pair[0])]
            joining = [stream for _, stream in pairs]
            newcomers = {*joining}
            self._arrived = deque(stream for stream in self._arrived if stream not in newcomers)
        for stream, _ in pairs:
            number = stream.request.request_id
            sent += self._take_out(number, stream)
            del self._streams[number]
        with self._changed:
            self._arrived.extend(stream for stream, _ in pairs)
        return joining

    def _num_made(self, stream: _Stream) -> int:
        """Return the number of tokens of a response in the engine, or more: its prompt may take several steps."""
        return stream.request.num_made + self._num_steps - stream.num_steps_before

    def _take_out_unread(self) -> None:
        """Take streams out of the engine whose clients do not read: others need the room."""
        sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]] = []
        for number, stream in [*self._streams.items()]:
            if stream.chunks.qsize() > _MOST_UNREAD:
                sent += self._take_out(number, stream)
                del self._streams[number]
                with self._changed:  # its client may just have read all there was
                    if stream.chunks.empty():
                        self._arrived.append(stream)
                    else:
                        self._unread.add(stream)
        _send(sent)

    def drop(self, reason: str) -> None:
        """Take all requests out of the engine and fail their streams; new ones may follow."""
        for number in self._streams:
            self._engine.abort(number)
        self._refuse_all(unavailable(reason))

    def close(self, reason: str) -> None:
        """Fail all current and future requests: nothing more is generated."""
        refused = unavailable(reason)
        with self._changed:
            self._closed = refused
        self._refuse_all(refused)

    def _refuse_all(self, refused: OpenAIRefused) -> None:
        with self._changed:
            streams = [*self._streams.values(), *self._arrived, *self._unread]
            self._streams.clear()
            self._arrived.clear()
            self._unread.clear()
        _send([(stream, refused) for stream in streams])

    def _continue_request(self, request: SequenceRequest, completion: EngineCompletion) -> SequenceRequest:
        """Return what is left of a request."""
        num_tokens = len(completion.token_ids_T)
        sampling = msgspec.structs.replace(
            request.sampling, max_new_tokens=request.sampling.max_new_tokens - num_tokens
        )
        if isinstance(sampling, ServedSampling) and sampling.scores_prompt:  # its scores came with the first token
            sampling = msgspec.structs.replace(sampling, scores_prompt=False)
        return msgspec.structs.replace(
            request,
            request_id=next(self._numbers),
            prompt_ids=(*request.prompt_ids, *completion.token_ids_T.tolist()),
            sampling=sampling,
            num_made=request.num_made + num_tokens,
        )


def _version_of(stream: _Stream) -> int | None:
    sampling = stream.request.sampling
    return sampling.weight_version if isinstance(sampling, ServedSampling) else None


def _take_turns(waiting: Sequence[_Stream], running: Counter[int | None]) -> list[_Stream]:
    """Order streams so that versions have equally many responses at a time; those of a version stay in order."""
    queues: dict[int | None, deque[_Stream]] = {}
    for stream in waiting:
        queues.setdefault(_version_of(stream), deque()).append(stream)
    if len(queues) < 2:
        return [*waiting]
    fewest = [(running[version], turn, version) for turn, version in enumerate(queues)]
    heapq.heapify(fewest)
    ordered: list[_Stream] = []
    while fewest:
        count, turn, version = heapq.heappop(fewest)
        ordered.append(queues[version].popleft())
        if queues[version]:
            heapq.heappush(fewest, (count + 1, turn, version))
    return ordered


def _chunk(tokens: NewTokens | EngineCompletion, start: int = 0) -> ResponseChunk:
    return ResponseChunk(
        token_ids=tokens.token_ids_T[start:].tolist(),
        logprobs=tokens.logprobs_T[start:].tolist(),
        versions=tokens.versions_T[start:].tolist(),
        alternatives=None if tokens.alternatives is None else tokens.alternatives[start:],
        masks=None if tokens.masks is None else tokens.masks.slice_from(start),
        prompt_scores=None if start else tokens.prompt_scores,
    )


def _last_chunk(completion: EngineCompletion, start: int) -> ResponseChunk:
    assert completion.finish_reason != "abort", "an aborted request is no longer awaited"
    return ResponseChunk(
        token_ids=completion.token_ids_T[start:].tolist(),
        logprobs=completion.logprobs_T[start:].tolist(),
        versions=completion.versions_T[start:].tolist(),
        alternatives=None if completion.alternatives is None else completion.alternatives[start:],
        masks=None if completion.masks is None else completion.masks.slice_from(start),
        finish_reason=completion.finish_reason,
        routed_experts_TX=completion.routed_experts_TX,
        prompt_scores=None if start else completion.prompt_scores,
    )


def _send(sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]]) -> None:
    """Hand chunks to the event loops that wait for them, each of which is woken once."""
    for loop in {stream.loop for stream, _ in sent}:
        chunks_of_loop = [(stream, chunk) for stream, chunk in sent if stream.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits there any more
            loop.call_soon_threadsafe(_put, chunks_of_loop)


def _put(sent: list[tuple[_Stream, ResponseChunk | OpenAIRefused]]) -> None:
    for stream, chunk in sent:
        stream.chunks.put_nowait(chunk)
