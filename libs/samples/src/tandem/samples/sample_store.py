"""The store of samples for trainers to fetch, and the thread that serves them.

The owner puts samples in, and takes them out when they are released: a rollout its own, the coordinator those of a
rollout log that is trained on again. Trainer ranks request them over the store's own ROUTER socket. Its thread consumes
`FetchSamples` and produces `SamplesFetched`, or `SamplesGone` for missing samples. Where the policy sees, it also
answers `FetchImages`. It waits for the next request, for short intervals, and where there is a rollout log until
samples are on disk. It ends when the store is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from operator import attrgetter

from tandem.common import messages
from tandem.common.curve import AdmittedKeys
from tandem.common.errors import SamplesError
from tandem.common.wire import AnsweringThread, Frames, encode
from tandem.samples.batch import SampleBatch

_MAX_REQUEST_BYTES = 2**24
_TOKENS = attrgetter("token_ids_T")


class SampleStore:
    """The finished samples of one process. Its threads put and release; any number of processes fetch."""

    def __init__(self, host: str, run_id: str, max_tokens: int, trainers: AdmittedKeys) -> None:
        """Listen on a port of `host`, for these trainers of this run; keep at most `max_tokens`."""
        self._run_id = run_id
        self._max_tokens = max_tokens
        self._samples: dict[int, dict[tuple[int, int], SampleBatch]] = {}
        """By the command to generate, then by group and place in it."""
        self._num_tokens = 0
        self._lock = threading.Lock()
        self._await_record: Callable[[], object] = lambda: None
        self._answer_media: Callable[[messages.FetchMedia], Frames] | None = None
        self._answering = AnsweringThread(
            host, trainers, messages.ToSampleStore, self._reply, name="samples", max_bytes=_MAX_REQUEST_BYTES
        )
        self.at = self._answering.at
        """Listener for trainers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples in the store."""
        return self._num_tokens

    def give_after(self, await_record: Callable[[], object]) -> None:
        """Call `await_record`, which returns once all samples here are on disk, before any samples are served."""
        self._await_record = await_record

    def give_media(self, answer: Callable[[messages.FetchMedia], Frames]) -> None:
        """Have requests for media answered by this function, in its thread; without it, they have no answer."""
        self._answer_media = answer

    def put(self, key: messages.SampleKey, arrays: SampleBatch) -> None:
        """Keep one sample; one that is here already, because its command was repeated, stays.

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
        """Forget the samples made for these commands."""
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
        """Forget the samples of some groups of a command."""
        with self._lock:
            samples = self._samples.get(command_id, {})
            for place in [place for place in samples if place[0] in groups]:
                self._num_tokens -= len(samples.pop(place).token_ids_T)

    def close(self) -> None:
        """Stop serving, and forget all samples."""
        self._answering.close()
        self._samples.clear()

    def _reply(self, request: messages.ToSampleStore) -> Frames | None:
        if not isinstance(request, messages.FetchSamples):
            return None if self._answer_media is None else self._answer_media(request)
        try:
            arrays = self._find_samples(request)
        except SamplesError as error:
            return encode(messages.SamplesGone(request_id=request.request_id, why=str(error)))
        return encode(messages.SamplesFetched(request_id=request.request_id), arrays.columns)

    def _find_samples(self, request: messages.FetchSamples) -> SampleBatch:
        if request.run_id != self._run_id:
            raise SamplesError(f"it belongs to run {self._run_id}, but the request is from run {request.run_id[:100]}")
        if not request.keys:
            raise SamplesError("the request has no keys")
        samples: list[SampleBatch] = []
        with self._lock:
            for command_id, group, sample, branch in request.keys:
                arrays = self._samples.get(command_id, {}).get((group, sample))
                if arrays is None or branch >= len(arrays.lengths_S):
                    sample_name = f"sample {sample} of group {group} of command {command_id}"
                    raise SamplesError(
                        f"it does not have {sample_name if arrays is None else f'branch {branch} of {sample_name}'}"
                    )
                samples.append(arrays if len(arrays.lengths_S) == 1 else arrays.take([branch]))
        self._await_record()
        num_tokens = sum(map(len, map(_TOKENS, samples)))
        if len(samples) > 1 and num_tokens > messages.MAX_TOKENS_FETCHED:
            raise SamplesError(
                f"it was asked for {num_tokens} tokens at once, {messages.MAX_TOKENS_FETCHED} are the most"
            )
        return SampleBatch.concatenate(samples)
