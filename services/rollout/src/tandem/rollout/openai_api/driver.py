"""Generate for HTTP requests, which join and leave at any time, with an engine of one thread.

Two threads meet here. The one that drives the engine calls `EngineDriver.work` again and again: that takes the requests
which have come, has the engine make a token for each that runs, and sends what was made to where it is awaited. The
event loop that answers HTTP calls `generate`, which waits for these chunks; leaving it early takes the request out of
the engine at the next token. Neither thread waits for the other but in `wait`, where there is nothing to generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from tandem.common.errors import DataError
from tandem.common.messages import SamplingParameters
from tandem.rollout.engine import Completion, Engine, Request, Tokens
from tandem.rollout.openai_api.generator import Chunk
from tandem.rollout.openai_api.refusals import Refused

_MAX_UNFINISHED = 4096
"""Responses that run or wait, of all requests together."""


class _Stream:
    """Where the chunks of one response go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.chunks: asyncio.Queue[Chunk | Refused] = asyncio.Queue()
        self.num_sent = 0
        """Tokens."""


class EngineDriver:
    """Generates with an engine; the events above say which thread does what."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Request, _Stream]] = deque()
        self._left: set[int] = set()
        self._closed: Refused | None = None
        self._streams: dict[int, _Stream] = {}
        """Of the requests that the engine has."""
        self._num_unfinished = 0

    @property
    def num_unfinished(self) -> int:
        """Responses that are awaited."""
        return self._num_unfinished

    # --- called by the event loop ------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParameters, seed: int
    ) -> AsyncGenerator[Chunk, None]:
        """Yield a response as it is made; see `tandem.rollout.openai_api.generator.Generator`."""
        stream = _Stream(asyncio.get_running_loop())
        number = next(self._numbers)
        request = Request(request_id=number, prompt_ids=tuple(prompt_ids), sampling=sampling, seed=seed)
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if self._num_unfinished >= _MAX_UNFINISHED:
                what = f"{self._num_unfinished} responses are being made or wait: ask again later"
                raise Refused(what, status=429, kind="rate_limit_error", code="overloaded")
            self._num_unfinished += 1
            self._arrived.append((request, stream))
            self._changed.notify()
        is_finished = False
        try:
            while not is_finished:
                chunk = await stream.chunks.get()
                is_finished = isinstance(chunk, Refused) or chunk.finish_reason is not None
                if isinstance(chunk, Refused):
                    raise chunk
                yield chunk
        finally:
            with self._changed:
                self._num_unfinished -= 1
                if not is_finished:
                    self._left.add(number)
                    self._changed.notify()

    # --- called by the thread that drives the engine -----------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to do, after `timeout_s` in any case."""
        with self._changed:
            if not (self._arrived or self._left or self._streams):
                self._changed.wait(timeout_s)

    def work(self) -> None:
        """Make one token for every response. Raises what the engine raises, which nobody gets a response after."""
        with self._changed:
            arrived, left = [*self._arrived], {*self._left}
            self._arrived.clear()
            self._left.clear()
        sent: list[tuple[_Stream, Chunk | Refused]] = []
        for request, stream in arrived:
            if request.request_id in left:
                continue
            try:
                self._engine.add_request(request)
                self._streams[request.request_id] = stream
            except DataError as error:
                sent.append((stream, Refused(str(error))))
        for number in left:
            if self._streams.pop(number, None) is not None:
                self._engine.abort(number)
        if self._streams:
            sent += self._step()
        _send(sent)

    def drop(self, why: str) -> None:
        """Take all requests out of the engine, and tell who waits for them; others may follow."""
        for number in self._streams:
            self._engine.abort(number)
        self._refuse_all(Refused(why, status=503, kind="server_error", code="unavailable"))

    def close(self, why: str) -> None:
        """Tell all who wait, and all who will ask, that nothing more is generated."""
        refused = Refused(why, status=503, kind="server_error", code="unavailable")
        with self._changed:
            self._closed = refused
        self._refuse_all(refused)

    def _refuse_all(self, refused: Refused) -> None:
        with self._changed:
            streams = [*self._streams.values(), *(stream for _, stream in self._arrived)]
            self._streams.clear()
            self._arrived.clear()
        _send([(stream, refused) for stream in streams])

    def _step(self) -> list[tuple[_Stream, Chunk | Refused]]:
        sent: list[tuple[_Stream, Chunk | Refused]] = []
        for completion in self._engine.step():
            stream = self._streams.pop(completion.request_id, None)
            if stream is not None:
                sent.append((stream, _last_chunk(completion, stream.num_sent)))
        starts = {number: stream.num_sent for number, stream in self._streams.items()}
        for number, tokens in self._engine.made(starts).items():
            if len(tokens.token_ids_T):
                self._streams[number].num_sent += len(tokens.token_ids_T)
                sent.append((self._streams[number], _chunk(tokens)))
        return sent


def _chunk(tokens: Tokens) -> Chunk:
    return Chunk(
        token_ids=tokens.token_ids_T.tolist(),
        logprobs=tokens.logprobs_T.tolist(),
        versions=tokens.versions_T.tolist(),
    )


def _last_chunk(completion: Completion, start: int) -> Chunk:
    assert completion.finish_reason != "abort", "whoever aborts a request no longer waits for it"
    return Chunk(
        token_ids=completion.token_ids_T[start:].tolist(),
        logprobs=completion.logprobs_T[start:].tolist(),
        versions=completion.versions_T[start:].tolist(),
        finish_reason=completion.finish_reason,
    )


def _send(sent: list[tuple[_Stream, Chunk | Refused]]) -> None:
    """Hand chunks to the event loops that wait for them, each of which is woken once."""
    for loop in {stream.loop for stream, _ in sent}:
        its = [(stream, chunk) for stream, chunk in sent if stream.loop is loop]
        with contextlib.suppress(RuntimeError):  # a loop that has been closed: nobody waits there any more
            loop.call_soon_threadsafe(_put, its)


def _put(sent: list[tuple[_Stream, Chunk | Refused]]) -> None:
    for stream, chunk in sent:
        stream.chunks.put_nowait(chunk)
