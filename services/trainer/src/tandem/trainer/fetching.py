"""Fetching of a rank's sequences of a batch from the rollouts that made them.

`SampleFetcher.fetch` consumes the batch's table and produces the sequences that it assigns to this rank. It asks all
rollouts at once, each for a bounded number of tokens at a time, and waits for their answers until one deadline. It
gives up earlier on a rollout without a connection for `_PATIENCE_S`. Connections stay open while the rollouts are the
same. Fetched samples are kept until `clear`, so that a repeated step fetches only what it lacks. All samples must match
the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter, methodcaller

import msgspec
import numpy as np

from tandem.common import messages
from tandem.common.errors import DataError, WireError
from tandem.common.keys import KeyPair
from tandem.common.wire import Arrays, CallerConnections, Frames, MessageCodec, encode
from tandem.config import Config
from tandem.config.models.families import is_text_only
from tandem.config.models.model_sizes import vocabulary_size
from tandem.launch.service import ServiceContext
from tandem.samples import batch_sharding, routed_experts, sampling_masks
from tandem.samples.batch import MASKS, SAMPLES, TOKENS, Int32s, Int64s, SampleBatch
from tandem.samples.media import make_media_fetcher
from tandem.trainer.micro_batches import MediaFormat

_PATIENCE_S = 5.0
"""How long a rollout may be without a connection."""
_POLL_S = 0.5
_MAX_REPLY_BYTES = 1 << 28
"""The largest size of one array. A reply has at most `MAX_TOKENS_FETCHED`, or a single sample."""

Rows = list[int]
"""Rows of a batch's table."""


class SampleFormat(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The arrays of samples as a run's engines send them."""

    vocabulary: int
    """Number of tokens."""
    experts: routed_experts.RoutedExperts | None = None
    """Format of the experts that samples have for each token, if any."""
    masks: sampling_masks.MaskFormat | None = None
    """Format of the sampling masks that samples have, if any."""
    media: MediaFormat | None = None
    """Format of what samples have besides tokens, none perhaps; None for text alone."""

    @classmethod
    def of(cls, config: Config) -> SampleFormat:
        """Return the format of a run's samples."""
        return cls(
            vocabulary=vocabulary_size(config.policy),
            experts=routed_experts.replayed_experts(config),
            masks=sampling_masks.masks_of_run(config),
            media=find_media_format(config),
        )

    @cached_property
    def max_tokens(self) -> int:
        """Most tokens of one request."""
        max_tokens = messages.MAX_TOKENS_FETCHED
        if self.masks is not None:
            max_tokens = min(max_tokens, _MAX_REPLY_BYTES // (4 * self.masks.bitmap_words))
        return max_tokens if self.experts is None else min(max_tokens, _MAX_REPLY_BYTES // self.experts.num_bytes)

    def read_tokens(self, frames: Arrays, num_valid_S: Int32s) -> SampleBatch:
        """Return sequences that were not generated. Raises `WireError` unless they are possible."""
        names = TOKENS if self.media is None else (*TOKENS, *self.media.names)
        samples = SampleBatch.parse_frames(frames, names, may_be_empty=True)
        samples.check_tokens(self.vocabulary, num_valid_S)
        if self.media is not None:
            self.media.check(samples)
        return samples

    def nothing(self) -> SampleBatch:
        """Return no sample."""
        nothing = np.zeros(0, dtype=np.int32)
        return SampleBatch(
            lengths_S=nothing,
            token_ids_T=nothing,
            loss_mask_T=nothing.astype(np.bool_),
            generation_logprobs_T=nothing.astype(np.float32),
            versions_T=nothing,
            **({} if self.media is None else self.media.make_empty()),
            **(dict.fromkeys(() if self.masks is None else MASKS, nothing)),
        )

    def read(self, frames: Arrays, table: SampleBatch) -> SampleBatch:
        """Return received samples. Raises `WireError` unless they are possible, and match these rows of a table."""
        names = (*SAMPLES, *(() if self.media is None else self.media.names), *(() if self.masks is None else MASKS))
        arrays = SampleBatch.parse_frames(frames, names, {} if self.experts is None else routed_experts.DTYPES)
        arrays.check_samples(self.vocabulary)
        if self.experts is not None:
            self.experts.check(arrays.columns[routed_experts.COLUMN])
        if self.masks is not None:
            self.masks.check(arrays)
        if self.media is not None:
            self.media.check(arrays)
        if arrays.lengths_S.tolist() != table.lengths_S.tolist():
            raise WireError("lengths_S: not the lengths that were announced")
        starts, made_T = arrays.offsets()[:-1], arrays.loss_mask_T
        num_made = np.concatenate([[0], np.cumsum(made_T, dtype=np.int64)])
        ends_of_prompts = starts + table.prompt_lengths_S
        is_made_S = made_T[np.minimum(ends_of_prompts, len(made_T) - 1)] & (table.prompt_lengths_S < table.lengths_S)
        is_made_S |= table.num_valid_S == 0  # an agent that failed may have asked for none
        if not is_made_S.all() or (num_made[ends_of_prompts] != num_made[starts]).any():
            raise WireError("loss_mask_T: not the prompts that were announced")
        if ((table.num_valid_S > 0) & (arrays.num_valid() != table.num_valid_S)).any():
            raise WireError("loss_mask_T: not the numbers of tokens that were announced")
        return arrays


def find_media_format(config: Config) -> MediaFormat | None:
    """Return the format of what a run's samples have besides tokens; None for text alone. Raises `ModelError`."""
    if is_text_only(config.policy):
        return None
    from tandem.trainer.batching.images import ImageFormat  # text runs need none of it

    return ImageFormat.of(config)


class SampleFetcher:
    """Fetches a rank's training samples, and keeps them until they are trained on."""

    def __init__(self, run_id: str, sample_format: SampleFormat, key_pair: KeyPair) -> None:
        """Take the run's id, and the format of its samples; `key_pair` are this trainer's keys in the run."""
        self._format = sample_format
        self._run_id = run_id
        self._key_pair = key_pair
        self._codec: MessageCodec[messages.SamplesFetched | messages.SamplesGone] = MessageCodec(
            messages.SamplesFetched | messages.SamplesGone
        )
        self._listeners: Mapping[str, messages.Listener] = {}
        self._callers: CallerConnections | None = None
        """Connections to these rollouts; None before the first fetch, and after one that failed."""
        self._num_requests = 0
        self._step: int | None = None
        self._kept: list[SampleBatch] = []
        """The answers so far."""
        self._places: dict[tuple[str, int, int, int, int], int] = {}
        """Place of each sequence in these answers, by rollout and key."""

    def fetch(
        self, step: int, table: SampleBatch, rows: Int64s, sources: Mapping[str, messages.Listener], timeout_s: float
    ) -> tuple[SampleBatch | None, dict[str, str]]:
        """Return these rows of the table, or None with the reason, by rollout, why some are missing.

        Args:
            step: step that they are for. Samples of other steps are dropped.
            table: table of the whole batch.
            rows: rows of this rank.
            sources: addresses of the rollouts, by name.
            timeout_s: seconds until the deadline.

        """
        if step != self._step:
            self.clear()
            self._step = step
        names = sorted(sources)
        keys: dict[int, tuple[str, int, int, int, int]] = {}
        rows_to_fetch: dict[str, Rows] = {}
        for row, key in zip(rows.tolist(), _keys_of(table.take(rows)), strict=True):
            keys[row] = (names[table.source_S[row]], *key)
            if keys[row] not in self._places:
                rows_to_fetch.setdefault(keys[row][0], []).append(row)
        missing: dict[str, str] = {}
        if rows_to_fetch:
            inquiries: dict[str, _Inquiry] = {}
            for name, its_rows in rows_to_fetch.items():
                inquiry = inquiries[name] = _Inquiry(self._run_id, table, its_rows, self._format, self._num_requests)
                self._num_requests += inquiry.num_requests
            missing = self._ask(sources, inquiries, timeout_s)
            for inquiry in inquiries.values():
                for row in inquiry.rows:
                    self._places[keys[row]] = len(self._places)
                self._kept += inquiry.answers
        if missing:
            return None, missing
        places = [*map(self._places.__getitem__, keys.values())]
        samples = join_samples(table.take(rows), self._kept or [self._format.nothing()], places)
        if differing := _differing_prompts(samples):
            return None, {keys[int(rows[place])][0]: reason for place, reason in differing.items()}
        return samples, {}

    def begin(self, media_at: messages.Listener | None, coordinator: str) -> None:
        """Take the coordinator's listener for media, which text has not."""

    def complete(self, samples: SampleBatch, timeout_s: float) -> None:
        """Have in the run's folder what samples that came with a command refer to: nothing. Raises `DataError`."""

    def clear(self) -> None:
        """Forget the fetched samples."""
        self._kept.clear()
        self._places.clear()
        self._step = None

    def close(self) -> None:
        """Close the connections."""
        if self._callers is not None:
            self._callers.close()
            self._callers = None

    def _ask(
        self, sources: Mapping[str, messages.Listener], inquiries: Mapping[str, _Inquiry], timeout_s: float
    ) -> dict[str, str]:
        """Make all inquiries until they are done or the time is up; return why some failed."""
        deadline = time.monotonic() + timeout_s
        listeners = {name: sources[name] for name in inquiries}
        if self._callers is None or listeners != self._listeners:  # otherwise the connections of the last fetch serve
            self.close()
            self._listeners = listeners
            try:
                self._callers = CallerConnections(listeners, self._key_pair, max_bytes=_MAX_REPLY_BYTES)
            except WireError as error:
                return dict.fromkeys(inquiries, str(error))
        callers = self._callers
        for name, inquiry in inquiries.items():
            if not callers.down_for(name):
                callers.send(name, inquiry.request())
        try:
            while not all(map(_IS_DONE, inquiries.values())):
                for name, frames in callers.receive(_POLL_S):
                    if name in inquiries:
                        self._hear(inquiries[name], frames, name)
                is_late = time.monotonic() > deadline
                for name, inquiry in inquiries.items():
                    if is_late and not inquiry.is_done:
                        inquiry.why_missing = f"it has not sent them within {timeout_s:g} s"
                    elif callers.down_for(name) > _PATIENCE_S and not inquiry.is_done:
                        inquiry.why_missing = f"nobody answers at {sources[name].address}"
        except BaseException:
            self.close()
            raise
        if any(map(_WHY_MISSING, inquiries.values())):
            self.close()
            return {name: inquiry.why_missing for name, inquiry in inquiries.items() if inquiry.why_missing}
        return {}

    def _hear(self, inquiry: _Inquiry, frames: Frames | None, name: str) -> None:
        """Take an answer, or None for a new connection. Send the next request, or the same one again."""
        num_taken = inquiry.num_taken
        if frames is not None:
            try:
                received = self._codec.decode(frames)
                inquiry.take(received.message, received.arrays)
            except WireError as error:
                inquiry.why_missing = f"it sent what is not asked for: {error}"
        if not inquiry.is_done and (frames is None or inquiry.num_taken > num_taken):
            assert self._callers is not None, "it was heard over them"
            self._callers.send(name, inquiry.request())


class MediaSampleFetcher(SampleFetcher):
    """Fetches a rank's training samples, and the media that the run's folder lacks here."""

    def __init__(self, context: ServiceContext, sample_format: SampleFormat) -> None:
        """Take the process and the format of its samples."""
        super().__init__(context.run_id, sample_format, context.keys)
        self._media = make_media_fetcher(context.config, context.name, context.run_id, context.keys)

    def fetch(
        self, step: int, table: SampleBatch, rows: Int64s, sources: Mapping[str, messages.Listener], timeout_s: float
    ) -> tuple[SampleBatch | None, dict[str, str]]:
        """Return these rows of the table as `SampleFetcher` does, or why their media are missing."""
        samples, missing = super().fetch(step, table, rows, sources, timeout_s)
        if samples is not None:
            missing = self._media.fetch_batch(samples, sources, timeout_s)
        return None if missing else samples, missing

    def begin(self, media_at: messages.Listener | None, coordinator: str) -> None:
        """Take the coordinator's listener for media; its host is that of `coordinator`, its own address."""
        self._media.begin(media_at, coordinator)

    def complete(self, samples: SampleBatch, timeout_s: float) -> None:
        """Have the media of samples in the run's folder. Raises `DataError`."""
        for reason in self._media.fetch_batch(samples, {}, timeout_s).values():
            raise DataError(reason)


def make_fetcher(context: ServiceContext, sample_format: SampleFormat) -> SampleFetcher:
    """Return the fetcher of a rank's samples, by what its model takes."""
    if sample_format.media is None:
        return SampleFetcher(context.run_id, sample_format, context.keys)
    return MediaSampleFetcher(context, sample_format)


class _Inquiry:
    """The requests to one rollout, one at a time."""

    def __init__(self, run_id: str, table: SampleBatch, rows: Rows, sample_format: SampleFormat, first: int) -> None:
        """Take the rows to ask for, and the first number for the requests, which no earlier request had."""
        self._run_id = run_id
        self._table = table
        self._format = sample_format
        self._requests = list(_cut(rows, table.lengths_S, sample_format.max_tokens))
        self._first = first
        self.num_requests = len(self._requests)
        self.num_taken = 0
        """Requests that have been answered."""
        self.answers: list[SampleBatch] = []
        self.rows: Rows = []
        """Rows of the table that the answers hold, in their order."""
        self.why_missing = ""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to ask for, or asking is pointless."""
        return bool(self.why_missing) or self.num_taken == self.num_requests

    def request(self) -> Frames:
        """Return the next request."""
        keys = _keys_of(self._table.take(np.array(self._requests[self.num_taken])))
        return encode(
            messages.FetchSamples(run_id=self._run_id, request_id=self._first + self.num_taken, keys=tuple(keys))
        )

    def take(self, reply: messages.SamplesFetched | messages.SamplesGone, frames: Arrays) -> None:
        """Take an answer, unless its request was already answered over another connection."""
        if reply.request_id != self._first + self.num_taken or self.is_done:
            return
        if isinstance(reply, messages.SamplesGone):
            self.why_missing = reply.why
            return
        rows = self._requests[self.num_taken]
        self.answers.append(self._format.read(frames, self._table.take(np.array(rows))))
        self.rows += rows
        self.num_taken += 1


_IS_DONE, _WHY_MISSING = attrgetter("is_done"), attrgetter("why_missing")
_TOLIST = methodcaller("tolist")


def _keys_of(table: SampleBatch) -> list[messages.SequenceKey]:
    """Return the keys of a table's sequences, each at its source."""
    columns = (table.command_S, table.group_S, table.sample_S, table.branch_S)
    return [*zip(*map(_TOLIST, columns), strict=True)]


def _cut(rows: Rows, lengths_S: Int32s, max_tokens: int) -> Iterator[Rows]:
    """Divide rows into requests with a bounded number of tokens."""
    request: Rows = []
    num_tokens = 0
    for row in rows:
        length = int(lengths_S[row])
        if request and num_tokens + length > max_tokens:
            yield request
            request, num_tokens = [], 0
        request.append(row)
        num_tokens += length
    yield request


def join_samples(table: SampleBatch, samples: Sequence[SampleBatch], places: Sequence[int]) -> SampleBatch:
    """Return the sequences of a table with their tokens. A sequence without valid tokens is masked whole.

    `places` are those of the table's sequences among the samples.
    """
    arrays = SampleBatch.concatenate(samples)
    if [*places] != [*range(len(arrays))]:
        arrays = arrays.take(places)
    loss_mask_T = arrays.loss_mask_T & np.repeat(table.num_valid_S > 0, arrays.lengths_S)
    return table.replace(**{**arrays.columns, "loss_mask_T": loss_mask_T})


def _differing_prompts(samples: SampleBatch) -> dict[int, str]:
    """Return the sequences with another prompt than the one that they should share, by place, with the reason."""
    starts = samples.offsets()
    prompts: dict[int, bytes] = {}
    differing = {}
    numbers_lengths = zip(samples.prompt_S.tolist(), samples.prompt_lengths_S.tolist(), strict=True)
    for place, (prompt, length) in enumerate(numbers_lengths):
        token_ids = samples.token_ids_T[starts[place] : starts[place] + length].tobytes()
        if prompt != batch_sharding.NO_PROMPT and prompts.setdefault(prompt, token_ids) != token_ids:
            differing[place] = "the prompt of a sample is not that of its group"
    return differing
