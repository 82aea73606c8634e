"""Futures: the answers of requests that take a while, kept for clients that come back for them.

A request has an id that follows from its model, or sampling session, and its number there. So a request that is sent
again, because its connection broke, is the same future, and is carried out once.

The samples of a client are a batch: it asks once for all that have finished since it asked before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from tandem.observe.run_folder.calls import CallRecord

_MOST_BYTES = 1 << 29
_MOST_FINISHED = 1 << 16


class FinishedRequest(msgspec.Struct, frozen=True):
    """A finished request."""

    body: bytes
    is_proto: bool = False
    why_failed: str = ""
    num_tokens: int | None = None
    """Tokens that it has had; None for those that were asked for."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a request, as far as limits and the journal need it."""

    kind: str = ""
    model: str = ""
    """Id of the model, or of the sampling session."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Most tokens that it can have; of samples with their prompts."""


class RequestFuture:
    """A request, finished or not."""

    def __init__(self, owner: str, about: RequestSummary, batch: str | None) -> None:
        self.owner = owner
        self.about = about
        self.batch = batch
        self.began_at = time.monotonic()
        self.result: FinishedRequest | None = None
        self.is_done = asyncio.Event()


class _Batch:
    """Requests whose ends a client asks for together."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self.num_waiting = 0
        """Clients that wait for an end."""
        self.finished: dict[str, int] = {}
        """Places of finished requests in the order of all, as far as the client is not known to have seen them."""
        self.has_more = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing has to be kept: the next request begins another."""
        return not (self.num_unfinished or self.num_waiting or self.finished)


def failure(reason: str, *, is_users: bool) -> FinishedRequest:
    """Return the result of a request that could not be carried out."""
    body = msgspec.json.encode({"error": reason, "category": "user" if is_users else "server"})
    return FinishedRequest(body, why_failed=reason or "it has failed")


class RequestFutures:
    """All futures. The oldest results are dropped when there are too many."""

    def __init__(self, record: Callable[[CallRecord], None]) -> None:
        """`record` is called at the end of each request."""
        self._record = record
        self._futures: dict[str, RequestFuture] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        self._dropped: OrderedDict[str, RequestFuture] = OrderedDict()
        self.num_unfinished: dict[str, int] = {}
        """Requests in progress, by owner."""
        self.num_tokens: dict[str, int] = {}
        """Tokens of those."""
        self._batches: dict[str, _Batch] = {}
        self._num_finished = 0

    def get(self, request_id: str, owner: str) -> RequestFuture | None:
        """Return a future of an owner; None if there is none."""
        future = self._futures.get(request_id)
        return future if future is not None and future.owner == owner else None

    def is_dropped(self, request_id: str, owner: str) -> bool:
        """Tell whether a result was there and is dropped."""
        future = self._dropped.get(request_id)
        return future is not None and future.owner == owner

    def begin(self, request_id: str, owner: str, about: RequestSummary, batch: str | None = None) -> RequestFuture:
        """Make a future; with `batch`, its end can be asked for together with those of others."""
        assert request_id not in self._futures, "asked first"
        self._futures[request_id] = future = RequestFuture(owner, about, batch)
        self.num_unfinished[owner] = self.num_unfinished.get(owner, 0) + 1
        self.num_tokens[owner] = self.num_tokens.get(owner, 0) + about.num_tokens
        if batch is not None:
            self._batches.setdefault(batch, _Batch()).num_unfinished += 1
        return future

    def tokens_of(self, request_ids: Iterable[str]) -> int:
        """Return the tokens of requests, as far as they are in progress."""
        futures = map(self._futures.get, request_ids)
        return sum(each.about.num_tokens for each in futures if each is not None and each.result is None)

    def finish(self, request_id: str, result: FinishedRequest) -> None:
        """Give a future its result, once."""
        future = self._futures.get(request_id)
        if future is None or future.result is not None:
            return
        future.result = result
        future.is_done.set()
        self.num_unfinished[future.owner] -= 1
        self.num_tokens[future.owner] -= future.about.num_tokens
        about = future.about
        self._record(
            CallRecord(
                ended_at=time.time(),
                kind=about.kind,
                model=about.model,
                key=future.owner,
                num_sequences=about.num_sequences,
                num_tokens=about.num_tokens if result.num_tokens is None else result.num_tokens,
                seconds=time.monotonic() - future.began_at,
                outcome=result.why_failed or "done",
            )
        )
        self._finished[request_id] = len(result.body)
        self._num_bytes += len(result.body)
        if future.batch is not None:
            batch = self._batches[future.batch]
            self._num_finished += 1
            batch.num_unfinished -= 1
            batch.finished[request_id] = self._num_finished
            batch.has_more.set()
        while len(self._finished) > 1 and (self._num_bytes > _MOST_BYTES or len(self._finished) > _MOST_FINISHED):
            self.drop(next(iter(self._finished)))

    def drop(self, request_id: str) -> None:
        """Drop the result of a finished request."""
        size = self._finished.pop(request_id, None)
        if size is None:
            return
        self._num_bytes -= size
        self._dropped[request_id] = future = self._futures.pop(request_id)
        future.result = None
        if len(self._dropped) > _MOST_FINISHED:
            # Until now its client was told that it had ended, and why there is no result.
            self._forget(*self._dropped.popitem(last=False))

    def drop_seen(self, request_id: str, name: str) -> None:
        """Drop the result of a request of a batch, whose client has it."""
        future = self._futures.get(request_id)
        if future is not None and future.batch == name:
            self.drop(request_id)
            self._forget(request_id, future)

    async def ends(self, name: str, seen: int, timeout_s: float) -> tuple[dict[str, FinishedRequest | None], int]:
        """Wait until a request of a batch ends that is not among the first `seen` ends.

        Return the results of those, None for each that is dropped, and the number of ends to give as `seen` then.
        """
        batch = self._batches.setdefault(name, _Batch())
        batch.num_waiting += 1
        batch.finished = {each: place for each, place in batch.finished.items() if place > seen}
        try:
            if not batch.finished:
                batch.has_more.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await batch.has_more.wait()
        finally:
            batch.num_waiting -= 1
        last = max(batch.finished.values(), default=seen)
        futures = {each: self._futures.get(each) for each in batch.finished}
        if batch.is_over:
            del self._batches[name]
        return {each: None if future is None else future.result for each, future in futures.items()}, last

    def _forget(self, request_id: str, future: RequestFuture) -> None:
        """Tell no client any more that a request has ended."""
        batch = self._batches.get(future.batch or "")
        if batch is not None:
            batch.finished.pop(request_id, None)
            if batch.is_over:
                del self._batches[future.batch or ""]
