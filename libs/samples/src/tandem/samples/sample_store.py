"""The store of samples that trainers have yet to fetch, and the thread that gives them out.

Who has samples puts them in and takes them out when they are released: a rollout those that it makes, and the
coordinator those of a record that is trained on again. Trainer ranks ask for them over a ROUTER socket of the store's
own. Its thread consumes `FetchSamples` and produces `SamplesFetched`, or `SamplesGone` for what is not here; it waits
for nothing but the next request, a moment at a time, and ends when the store is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from tandem.common.curve import Admitted, new_key_pair
from tandem.common.errors import SamplesError, WireError
from tandem.common.messages import (
    MAX_TOKENS_FETCHED,
    FetchSamples,
    SampleKey,
    SamplesFetched,
    SamplesGone,
    SequenceKey,
)
from tandem.common.wire import Codec, Frames, Hub, encode
from tandem.samples.batch import Batch

_MAX_REQUEST_BYTES = 2**24
_POLL_S = 0.2


class SampleStore:
    """The finished samples of one process. Its threads put and release; any number of processes fetch."""

    def __init__(self, host: str, run_id: str, max_tokens: int, trainers: Admitted) -> None:
        """Listen on a port of `host`, for these trainers of this run; keep at most `max_tokens`."""
        self._run_id = run_id
        self._max_tokens = max_tokens
        self._samples: dict[int, dict[tuple[int, int], Batch]] = {}
        """By the order to generate, then by group and place in it."""
        self._num_tokens = 0
        self._lock = threading.Lock()
        self._await_record: Callable[[], object] = lambda: None
        self._codec: Codec[FetchSamples] = Codec(FetchSamples)
        self._hub = Hub(f"tcp://{host}:*", new_key_pair(), trainers, max_bytes=_MAX_REQUEST_BYTES)
        self.at = self._hub.at
        """Where trainers fetch."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="samples", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples that are here."""
        return self._num_tokens

    def give_after(self, await_record: Callable[[], object]) -> None:
        """Call `await_record` before any samples are given out: it returns when those that are here are on disk."""
        self._await_record = await_record

    def put(self, key: SampleKey, arrays: Batch) -> None:
        """Keep one sample; one that is here already, because its order was repeated, stays.

        Raises `SamplesError` if there is no room for it.
        """
        command_id, group, sample = key
        with self._lock:
            samples = self._samples.setdefault(command_id, {})
            if (group, sample) in samples:
                return
            num_tokens = len(arrays.token_ids_T)
            if self._num_tokens + num_tokens > self._max_tokens:
                raise SamplesError(
                    f"no room for a sample of {num_tokens} tokens: samples that were not trained on yet have "
                    f"{self._num_tokens}, policy.generation.max_stored_tokens is {self._max_tokens}"
                )
            samples[group, sample] = arrays
            self._num_tokens += num_tokens

    def release(self, command_ids: Collection[int]) -> None:
        """Forget the samples made for these orders."""
        with self._lock:
            for command_id in command_ids:
                for arrays in self._samples.pop(command_id, {}).values():
                    self._num_tokens -= len(arrays.token_ids_T)

    def release_all(self) -> None:
        """Forget all samples."""
        with self._lock:
            self._samples.clear()
            self._num_tokens = 0

    def release_groups(self, command_id: int, groups: Collection[int]) -> None:
        """Forget the samples of some groups of an order."""
        with self._lock:
            samples = self._samples.get(command_id, {})
            for place in [place for place in samples if place[0] in groups]:
                self._num_tokens -= len(samples.pop(place).token_ids_T)

    def close(self) -> None:
        """Give out no more, and forget all."""
        self._is_closed.set()
        self._thread.join()
        self._samples.clear()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for peer, frames in self._hub.receive(_POLL_S):
                try:
                    request = self._codec.decode(frames).message
                except WireError:
                    continue  # no trainer's; who asks in earnest has a deadline
                self._hub.send(peer, self._answer(request))
        self._hub.close()

    def _answer(self, request: FetchSamples) -> Frames:
        try:
            arrays = self._found(request)
        except SamplesError as error:
            return encode(SamplesGone(request_id=request.request_id, why=str(error)))
        return encode(SamplesFetched(request_id=request.request_id), arrays.columns)

    def _found(self, request: FetchSamples) -> Batch:
        if request.run_id != self._run_id:
            raise SamplesError(f"it belongs to run {self._run_id}, and was asked by one of run {request.run_id[:100]}")
        if not request.keys:
            raise SamplesError("it was asked for nothing")
        samples = self._taken(request.keys)
        self._await_record()
        num_tokens = sum(len(arrays.token_ids_T) for arrays in samples)
        if len(samples) > 1 and num_tokens > MAX_TOKENS_FETCHED:
            raise SamplesError(f"it was asked for {num_tokens} tokens at once, {MAX_TOKENS_FETCHED} are the most")
        return Batch.concatenate(samples)

    def _taken(self, keys: Sequence[SequenceKey]) -> list[Batch]:
        with self._lock:
            found = [self._samples.get(command_id, {}).get((group, sample)) for command_id, group, sample, _ in keys]
        taken = []
        for (command_id, group, sample, branch), arrays in zip(keys, found, strict=True):
            what = f"sample {sample} of group {group} of order {command_id}"
            if arrays is None:
                raise SamplesError(f"it does not have {what}")
            if branch >= len(arrays.lengths_S):
                raise SamplesError(f"it does not have branch {branch} of {what}")
            taken.append(arrays if len(arrays.lengths_S) == 1 else arrays.take([branch]))
        return taken
