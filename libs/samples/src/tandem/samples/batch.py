"""Samples as arrays: ragged, never padded, one raw frame an array.

Shapes: ``S`` sequences, ``T`` tokens of all sequences laid end to end. Sequence ``i`` owns the tokens from
``offsets[i]`` to ``offsets[i + 1]`` where ``offsets`` is the cumulative sum of ``lengths_S``.

What arrives is checked, not believed: `Bundle.from_frames` checks names, dtypes and shapes, which each field
declares by its annotation and the suffix of its name; `check` of a bundle checks what the numbers may be. Both raise
`WireError`, whose text begins with the field.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self, get_args, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import WireError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


_SHOWN = 100
"""Characters of a name that is shown to somebody who does not know it."""


@functools.cache
def _dtypes(kind: type[msgspec.Struct]) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each field, as its annotation says."""
    hints = get_type_hints(kind)
    names = [name for name in kind.__struct_fields__ if name != "columns"]
    return {name: np.dtype(get_args(get_args(hints[name])[1])[0]) for name in names}


def _axes(name: str) -> str:
    """Return the letters of an array's axes."""
    return name.rpartition("_")[2]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays that travel beside a message: each field is one frame.

    A bundle may also have a field ``columns`` of more arrays, by names that end with their axes as those of fields do:
    what a run's loss reads beside what is built in (`tandem.config.schema.columns`), and the experts that tokens
    went to (`tandem.samples.routed_experts`).
    """

    def to_frames(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by field name, uncopied."""
        return {name: getattr(self, name) for name in _dtypes(type(self))} | getattr(self, "columns", {})

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the bundle of these arrays, by name."""
        fields = {name: array for name, array in arrays.items() if name in _dtypes(cls)}
        columns = {name: array for name, array in arrays.items() if name not in fields}
        return cls(**fields, **({"columns": columns} if columns else {}))

    @classmethod
    def from_frames(cls, frames: Mapping[str, NDArray[Any]], columns: Mapping[str, str] | None = None) -> Self:
        """Rebuild from received frames; the arrays stay read-only views of them.

        Raises `WireError` unless there is one array for each field, and for each of `columns`, of its dtype and the
        dimensions of its name, and there are sequences, each of at least one token, and as many numbers of everything
        else as there must be.
        """
        cls._check_declared(frames, columns or {})
        lengths_S = frames["lengths_S"]
        if not len(lengths_S) or lengths_S.min() < 1:
            at = int(lengths_S.argmin()) if len(lengths_S) else 0
            what = f"{lengths_S[at]} for sequence {at}" if len(lengths_S) else "of no sequence"
            raise WireError(f"lengths_S: {what}, must be at least 1")
        cls._check_sizes(frames)
        return cls.of(frames)

    @classmethod
    def _check_declared(cls, frames: Mapping[str, NDArray[Any]], columns: Mapping[str, str]) -> None:
        dtypes = _dtypes(cls) | {name: np.dtype(dtype) for name, dtype in columns.items()}
        for name in [*dtypes, *frames]:
            if name not in frames:
                raise WireError(f"{name}: is missing")
            if name not in dtypes:
                raise WireError(f"{name[:_SHOWN]}: is no array of this message, which has {', '.join(dtypes)}")
            array = frames[name]
            num_axes = len(_axes(name))
            if array.dtype != dtypes[name] or array.ndim != num_axes:
                of = "one dimension" if num_axes == 1 else f"{num_axes} dimensions"
                raise WireError(f"{name}: is {array.dtype} {array.shape}, must be {dtypes[name]} of {of}")
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                raise WireError(f"{name}: holds bytes that are no booleans")

    @classmethod
    def _check_sizes(cls, frames: Mapping[str, NDArray[Any]]) -> None:
        lengths_S = frames["lengths_S"]
        sizes = {"S": len(lengths_S), "T": int(lengths_S.sum(dtype=np.int64))}
        for name in frames:
            axis = _axes(name)[0]
            if len(frames[name]) != sizes[axis]:
                of = f"the {sizes['S']} sequences" if axis == "S" else f"lengths_S, which add up to {sizes['T']}"
                raise WireError(f"{name}: {len(frames[name])} numbers, does not fit {of}")

    def refuse(self, field: str, wrong: Bools, must: str) -> None:
        """Raise `WireError` if any number of a field is wrong, naming the first."""
        if wrong.any():
            at = int(wrong.argmax())
            raise WireError(f"{field}: {self.to_frames()[field][at]} for {self._where(field, at)}, {must}")

    def _where(self, field: str, at: int) -> str:
        return f"sequence {at}"


class RaggedArrays(Bundle, frozen=True, kw_only=True):
    """Base of the bundles that have tokens."""

    lengths_S: Int32s
    """Tokens of each sequence, prompt included; at least one."""
    token_ids_T: Int32s
    loss_mask_T: Bools
    """True where the token counts in the loss: where the policy made it, or an answer is given."""

    def offsets(self) -> Int64s:
        """Return where each sequence begins, and the end of the last: ``S + 1`` numbers."""
        return np.concatenate([[0], np.cumsum(self.lengths_S, dtype=np.int64)])

    def sequence_of(self, token: int) -> int:
        """Return the sequence that owns a token."""
        return int(np.searchsorted(self.offsets(), token, side="right")) - 1

    def _where(self, field: str, at: int) -> str:
        return f"token {at}, of sequence {self.sequence_of(at)}" if field.endswith("_T") else f"sequence {at}"

    def check_tokens(self, vocabulary: int) -> None:
        """Token ids are of the vocabulary."""
        # As unsigned numbers, negative ones are the largest: one comparison.
        wrong_T = self.token_ids_T.view(np.uint32) >= np.uint32(vocabulary)
        self.refuse("token_ids_T", wrong_T, f"must be from 0 to {vocabulary - 1}")

    def take(self, rows: Sequence[int] | Int64s) -> Self:
        """Return the given sequences in the given order."""
        rows, offsets = np.asarray(rows, dtype=np.int64), self.offsets()
        tokens = np.concatenate([rows[:0], *(np.arange(offsets[row], offsets[row + 1]) for row in rows)])
        arrays = self.to_frames().items()
        return self.of({name: array[rows if name.endswith("_S") else tokens] for name, array in arrays})

    def counted(self) -> Bools:
        """Return the loss mask without the first token of each sequence, which nothing predicts."""
        mask_T = self.loss_mask_T.copy()
        firsts = np.cumsum(self.lengths_S, dtype=np.int64) - self.lengths_S
        mask_T[firsts[self.lengths_S > 0]] = False
        return mask_T

    def num_counted(self) -> Int64s:
        """Return the number of counted tokens of each sequence."""
        cumulative = np.concatenate([[0], np.cumsum(self.counted(), dtype=np.int64)])
        ends = np.cumsum(self.lengths_S, dtype=np.int64)
        return np.asarray(cumulative[ends] - cumulative[ends - self.lengths_S], dtype=np.int64)


def check_logprobs(bundle: RaggedArrays, field: str) -> None:
    """Log-probabilities are finite and not positive."""
    logprobs_T = getattr(bundle, field)
    # NaN compares false with everything, and so is wrong, too.
    bundle.refuse(field, ~((logprobs_T <= 0) & (logprobs_T > -np.inf)), "must be finite and at most 0")


class SampleArrays(RaggedArrays, frozen=True, kw_only=True):
    """The tokens of finished samples, prompt and response, as the engine saw them."""

    generation_logprobs_T: Float32s
    """Log-probability of each made token under the distribution it was drawn from; zero elsewhere."""
    versions_T: Int32s
    """Weight version that made each token; -1 where none did."""
    columns: Mapping[str, NDArray[Any]] = {}
    """What else the engine has said of each token, by name and axes."""

    def check(self, vocabulary: int) -> None:
        """Raise `WireError` unless the numbers can be what they are said to be.

        Token ids are of the vocabulary. Log-probabilities are finite, at most 0, and 0 where the policy made no token.
        Versions are -1 just there.
        """
        self.check_tokens(vocabulary)
        check_logprobs(self, "generation_logprobs_T")
        given_T = ~self.loss_mask_T
        wrong_T = (self.generation_logprobs_T != 0) & given_T
        self.refuse("generation_logprobs_T", wrong_T, "must be 0 where the policy made no token")
        self.refuse("versions_T", (self.versions_T != -1) & given_T, "must be -1 where the policy made no token")
        self.refuse("versions_T", (self.versions_T < 0) & self.loss_mask_T, "must be a version: the policy made it")

    @staticmethod
    def concatenate(parts: Sequence[SampleArrays]) -> SampleArrays:
        """Join bundles, keeping the order of their sequences."""
        frames = [part.to_frames() for part in parts]
        return SampleArrays.of({name: np.concatenate([each[name] for each in frames]) for name in frames[0]})


class TrainingBatch(RaggedArrays, frozen=True, kw_only=True):
    """What one rank trains on. For SFT the advantages are one and the generation log-probabilities zero."""

    generation_logprobs_T: Float32s
    advantages_S: Float32s
    rewards_S: Float32s
    """What advantages were made of; in a data set, what that says of them; else zeros."""
    columns: Mapping[str, NDArray[Any]] = {}
    """What else its samples and their table have, by name and axis."""

    def part(self, first: int, count: int) -> TrainingBatch:
        """Return `count` sequences from `first` on, uncopied."""
        start, size = (int(self.lengths_S[rows].sum()) for rows in (slice(first), slice(first, first + count)))
        rows, tokens = slice(first, first + count), slice(start, start + size)
        arrays = self.to_frames().items()
        return self.of({name: array[rows if name.endswith("_S") else tokens] for name, array in arrays})

    def of_tokens(self, name: str) -> NDArray[Any]:
        """Return a column's number of each token: its own, or that of its sequence."""
        arrays = self.to_frames()
        own = arrays.get(f"{name}_T")
        return np.repeat(arrays[f"{name}_S"], self.lengths_S) if own is None else own

    def table(self) -> BatchTable:
        """Return the table of a batch that nobody generated, as yet assigned to rank 0 alone.

        Sequences that have the same tokens before the first that counts share them as their prompt.
        """
        prompts: dict[bytes, int] = {}
        firsts, lengths = [], []
        start = 0
        for row, length in enumerate(self.lengths_S.tolist()):
            mask_T = self.loss_mask_T[start : start + length]
            # Nothing predicts the very first token, so it belongs to the prompt whatever the mask says.
            prompt = max(1, int(mask_T.argmax()) if mask_T.any() else length)
            firsts.append(prompts.setdefault(self.token_ids_T[start : start + prompt].tobytes(), row))
            lengths.append(prompt)
            start += length
        nothing_S = np.zeros(len(firsts), dtype=np.int32)
        return BatchTable(
            lengths_S=self.lengths_S,
            num_counted_S=self.num_counted().astype(np.int32),
            prompt_S=np.array(firsts, dtype=np.int32),
            prompt_lengths_S=np.array(lengths, dtype=np.int32),
            rank_S=nothing_S,
            advantages_S=self.advantages_S,
            rewards_S=self.rewards_S,
            source_S=nothing_S - 1,
            command_S=nothing_S.astype(np.int64),
            group_S=nothing_S,
            sample_S=nothing_S,
            branch_S=nothing_S,
        )


class GivenTokens(RaggedArrays, frozen=True, kw_only=True):
    """The tokens of one rank's share of a batch that nobody generated, in the order of the batch's table.

    The lengths do not travel: they are in the table.
    """

    @classmethod
    def beside(cls, lengths_S: Int32s, frames: Mapping[str, NDArray[Any]]) -> Self:
        """Rebuild from the lengths of a share, which may be empty, and received frames. Raises `WireError`."""
        whole = {"lengths_S": lengths_S, **frames}
        cls._check_declared(whole, {})
        cls._check_sizes(whole)
        return cls(**whole)

    def check(self, vocabulary: int, num_counted_S: Int32s) -> None:
        """Raise `WireError` unless the numbers can be what they are said to be.

        Token ids are of the vocabulary. As many tokens of each sequence count in the loss as the table says.
        """
        self.check_tokens(vocabulary)
        if self.num_counted().tolist() != num_counted_S.tolist():
            raise WireError("loss_mask_T: must have as many tokens of each sequence as num_counted_S")


class BatchTable(Bundle, frozen=True, kw_only=True):
    """A training batch without its tokens: what every rank must know of all ``S`` sequences, in the batch's order.

    All that the ranks have to agree on follows from it: the counts that means divide by, and how many micro-batches
    each of them has.
    """

    lengths_S: Int32s
    """Tokens of each sequence, prompt included; at least one."""
    num_counted_S: Int32s
    """Tokens that count in the loss; zero: the sequence is masked whole."""
    prompt_S: Int32s
    """Sequences with the same number share their prompt; -1: with no other."""
    prompt_lengths_S: Int32s
    rank_S: Int32s
    """Data-parallel rank that trains on it (`tandem.samples.assignment`)."""
    advantages_S: Float32s
    rewards_S: Float32s
    """What advantages were made of; zero where there are no rewards."""
    source_S: Int32s
    """Which of the order's sources, sorted by name, has its tokens; -1: they come with the order."""
    command_S: Int64s
    """With group and sample its key there (`tandem.common.messages.SampleKey`); zero where there is no source."""
    group_S: Int32s
    sample_S: Int32s
    branch_S: Int32s
    """Its place among the sequences of its sample, which follow one another; 0 where that has one alone."""
    columns: Mapping[str, NDArray[Any]] = {}
    """What else a loss of the user's reads of each sequence: a frame NAME_S for each of `loss_fn.columns` that comes
    from the environment, finite."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths_S)

    def check(self, *, num_ranks: int, num_sources: int, may_mask_all: bool = False) -> None:
        """Raise `WireError` unless the numbers can be what they are said to be.

        Prompts and what counts are no longer than their sequences, advantages and rewards are finite. Every sequence
        has a data-parallel rank, and a source if the order has any. Some token counts in the loss, unless
        `may_mask_all`.
        """
        for field in ("num_counted_S", "prompt_lengths_S"):
            values_S = getattr(self, field)
            self.refuse(field, (values_S < 0) | (values_S > self.lengths_S), "must be from 0 to the sequence's length")
        self.refuse("rank_S", (self.rank_S < 0) | (self.rank_S >= num_ranks), f"must be from 0 to {num_ranks - 1}")
        for field in ("advantages_S", "rewards_S", *self.columns):
            self.refuse(field, ~np.isfinite(self.to_frames()[field]), "must be finite")
        first, last = (0, num_sources - 1) if num_sources else (-1, -1)
        self.refuse("source_S", (self.source_S < first) | (self.source_S > last), f"must be from {first} to {last}")
        for field in ("command_S", "group_S", "sample_S"):
            self.refuse(field, getattr(self, field) < 0, "must be at least 0")
        follows_S = self.branch_S == np.concatenate([[-1], self.branch_S[:-1]]) + 1
        self.refuse("branch_S", (self.branch_S != 0) & ~follows_S, "must be 0, or follow the one before it")
        if not (may_mask_all or self.num_counted_S.any()):
            raise WireError("num_counted_S: no token counts in the loss")

    def take(self, rows: slice | Int64s) -> Self:
        """Return these sequences, in this order."""
        return self.of({name: array[rows] for name, array in self.to_frames().items()})

    def rows_of(self, rank: int) -> Int64s:
        """Return the sequences of a data-parallel rank."""
        return np.flatnonzero(self.rank_S == rank)
