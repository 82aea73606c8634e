"""A batch: sequences with their columns, ragged and never padded, one raw frame an array.

Shapes: ``S`` sequences, ``T`` tokens of all sequences laid end to end. Sequence ``i`` owns the tokens from
``offsets[i]`` to ``offsets[i + 1]`` where ``offsets`` is the cumulative sum of ``lengths_S``.

A batch has the arrays that were filled in. The coordinator fills in the columns of each sequence (`TABLE`), an engine
its tokens (`SAMPLES`), a data set both (`TABLE` and `TOKENS`). Arrays with a name that is declared here have the
declared dtype. Others belong to their readers (`tandem.config.schema.columns`, `tandem.samples.routed_experts`).

Received batches are checked: `SampleBatch.parse_frames` checks names, dtypes and shapes, and the methods that begin
with ``check`` the numbers. All raise `WireError` with a text that begins with the array's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import WireError
from tandem.common.messages import Media

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
UInt8s = NDArray[np.uint8]

_SHOWN = 100
"""The most characters of an unknown name in a message."""


class SampleBatch:
    """Sequences with their columns, on one rank or over all.

    The arrays that a batch has are its attributes. Those with a declared dtype (`DECLARED`) are described here.
    """

    lengths_S: Int32s
    """Tokens of each sequence, prompt included; at least one."""
    token_ids_T: Int32s
    loss_mask_T: Bools
    """True for tokens that count in the loss: those that the policy generated, or of a given answer."""
    generation_logprobs_T: Float32s
    """Log-probability of each token under the sampling distribution; zero for tokens the policy did not generate."""
    versions_T: Int32s
    """Weight version that generated each token; -1 for tokens the policy did not generate."""
    num_valid_S: Int32s
    """Valid tokens: those that count in the loss. Zero if the sequence is masked whole."""
    prompt_S: Int32s
    """Number of the prompt, which sequences with the same prompt share; -1 if it shares its prompt with no other."""
    prompt_lengths_S: Int32s
    """Tokens of the prompt."""
    rank_S: Int32s
    """Data-parallel rank that trains on it (`tandem.samples.batch_sharding`)."""
    advantages_S: Float32s
    """Advantage of the sequence's sample; one if nothing was generated."""
    rewards_S: Float32s
    """Rewards that the advantages come from, or those of the data set; zero where there are none."""
    source_S: Int32s
    """Index of the source of its tokens, among the command's sources sorted by name; -1 if the command has them."""
    command_S: Int64s
    """Command id, part of its key at the source (`tandem.common.messages.SampleKey`); zero without a source."""
    group_S: Int32s
    """Rollout group."""
    sample_S: Int32s
    """Place of the sample in the group."""
    branch_S: Int32s
    """Place among its sample's consecutive sequences; 0 if it is the only one."""
    num_images_S: Int32s
    """Images in each sequence; only in batches of vision models."""
    image_digests_IX: UInt8s
    """SHA-256 of each image's encoded bytes, in the order of the sequences and of the images in them: ``[I, 32]``."""
    image_grids_IX: Int32s
    """Patches of each image, as its family counts them (`tandem.common.messages.ImageRef.grid`): ``[I, 3]``."""
    num_mask_words_S: Int32s
    """Words of the sampling masks of each sequence; only where engines cut distributions off."""
    mask_lengths_T: Int32s
    """Words of the sampling mask that each token was drawn from (`tandem.samples.sampling_masks`)."""
    mask_words_W: Int32s
    """Words of all masks, in the order of the tokens."""

    sources: tuple[str, ...] = ()
    """Names of the processes that have the tokens, sorted; `source_S` is an index into them."""
    notes: tuple[str, ...] = ()
    """Notes on the numbers, one a line."""

    def __init__(self, **columns: NDArray[Any]) -> None:
        """Take arrays, by names that end with their axes. They are neither copied nor changed."""
        self.columns: dict[str, NDArray[Any]] = columns
        vars(self).update(columns)

    if not TYPE_CHECKING:  # types know the declared arrays alone

        def __getattr__(self, name: str) -> Any:
            """Raise `AttributeError` for an array that the batch lacks, naming those that there are."""
            if name in DECLARED:
                raise AttributeError(f"this batch has no {name}, but {', '.join(self.columns)}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths_S)

    @classmethod
    def parse_frames(
        cls,
        frames: Mapping[str, NDArray[Any]],
        names: Sequence[str],
        columns: Mapping[str, str] | None = None,
        *,
        sources: Sequence[str] = (),
        may_be_empty: bool = False,
    ) -> SampleBatch:
        """Rebuild a batch from received frames. The arrays stay read-only views of them.

        Args:
            frames: the arrays' bytes, by name.
            names: required declared arrays (`TABLE`, `TOKENS`, `SAMPLES`).
            columns: dtypes of other required arrays, by name.
            sources: the batch's sources.
            may_be_empty: whether the batch may have no sequence.

        Raises `WireError` unless exactly these arrays are there, each with its dtype and the dimensions of its name.
        There must be sequences, each of at least one token, and every array must have the length that follows.

        """
        _check_declared(frames, names, columns or {})
        lengths_S = frames["lengths_S"]
        if not len(lengths_S) and not may_be_empty:
            raise WireError("lengths_S: of no sequence, must be at least 1")
        if len(lengths_S) and lengths_S.min() < 1:
            at = int(lengths_S.argmin())
            raise WireError(f"lengths_S: {lengths_S[at]} for sequence {at}, must be at least 1")
        sizes = {"S": len(lengths_S)}
        for axis, name in LENGTHS.items():
            if name in frames:
                if len(frames[name]) and frames[name].min() < 0:
                    raise WireError(f"{name}: {frames[name].min()}, must be at least 0")
                sizes[axis] = int(frames[name].sum(dtype=np.int64))
        for name in frames:
            axis = name.rpartition("_")[2][0]
            if len(frames[name]) != sizes[axis]:
                of = f"the {sizes['S']} sequences" if axis == "S" else f"{LENGTHS[axis]}, which add up to {sizes[axis]}"
                raise WireError(f"{name}: {len(frames[name])} numbers, does not fit {of}")
        return cls(**frames).attach_sources(sources)

    @staticmethod
    def concatenate(parts: Sequence[SampleBatch]) -> SampleBatch:
        """Join batches that have the same arrays, in the order of their sequences."""
        arrays = {}
        for name in parts[0].columns:
            arrays[name] = np.concatenate([part.columns[name] for part in parts])
        return SampleBatch(**arrays)

    def replace(self, **arrays: NDArray[Any]) -> SampleBatch:
        """Return the batch with these arrays added or replaced."""
        return SampleBatch(**{**self.columns, **arrays}).attach_sources(self.sources, self.notes)

    def attach_sources(self, sources: Sequence[str], notes: Sequence[str] = ()) -> SampleBatch:
        """Return the batch with the names of the processes that have its tokens, and with notes."""
        batch = SampleBatch(**self.columns)
        batch.sources, batch.notes = tuple(sources), tuple(notes)
        return batch

    def only(self, names: Sequence[str]) -> SampleBatch:
        """Return the batch with these arrays only."""
        return SampleBatch(**{name: self.columns[name] for name in names}).attach_sources(self.sources, self.notes)

    def take(self, rows: slice | Sequence[int] | Int64s) -> SampleBatch:
        """Return the given sequences in the given order. Those of a slice are not copied."""
        index_of_axis: dict[str, slice | Int64s] = {
            "S": rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
        }
        arrays = {}
        for name, array in self.columns.items():
            axis = name.rpartition("_")[2][0]
            if axis not in index_of_axis:
                index_of_axis[axis] = self._along(axis, index_of_axis["S"])
            arrays[name] = array[index_of_axis[axis]]
        return SampleBatch(**arrays).attach_sources(self.sources, self.notes)

    def rows_of(self, rank: int) -> Int64s:
        """Return the sequences of a data-parallel rank."""
        return np.flatnonzero(self.rank_S == rank)

    def tokens_of(self, rows: Int64s) -> Int64s:
        """Return the positions of the tokens of some sequences."""
        return np.arange(self.lengths_S.sum(dtype=np.int64))[self._along("T", rows)]

    def _along(self, axis: str, rows: slice | Int64s) -> slice | Int64s:
        """Return the places on an axis of some sequences, or of consecutive ones."""
        offsets = self.offsets(axis)
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(self))
            return slice(int(offsets[first]), int(offsets[max(first, last)]))
        starts_R = offsets[rows]
        sizes_R = offsets[rows + 1] - starts_R
        firsts_R = np.cumsum(sizes_R) - sizes_R
        return np.asarray(np.arange(sizes_R.sum()) + np.repeat(starts_R - firsts_R, sizes_R), dtype=np.int64)

    def offsets(self, axis: str = "T") -> Int64s:
        """Return the start of each sequence on an axis, and the end of the last: ``S + 1`` numbers."""
        return np.concatenate([[0], np.cumsum(self.columns[LENGTHS[axis]], dtype=np.int64)])

    def of_tokens(self, name: str) -> NDArray[Any]:
        """Return a column's value for each token: its own, or that of its sequence."""
        column_T = self.columns.get(f"{name}_T")
        return np.repeat(self.columns[f"{name}_S"], self.lengths_S) if column_T is None else column_T

    def valid(self) -> Bools:
        """Return the loss mask without the first token of each sequence, which nothing predicts."""
        mask_T = self.loss_mask_T.copy()
        firsts = np.cumsum(self.lengths_S, dtype=np.int64) - self.lengths_S
        mask_T[firsts[self.lengths_S > 0]] = False
        return mask_T

    def num_valid(self) -> Int64s:
        """Return the number of valid tokens of each sequence."""
        cumulative = np.concatenate([[0], np.cumsum(self.valid(), dtype=np.int64)])
        ends = np.cumsum(self.lengths_S, dtype=np.int64)
        return np.asarray(cumulative[ends] - cumulative[ends - self.lengths_S], dtype=np.int64)

    def keep_sequences(self, kept_S: Bools) -> SampleBatch:
        """Return the batch without valid tokens in the sequences that are not kept."""
        return self.replace(loss_mask_T=self.loss_mask_T & np.repeat(kept_S, self.lengths_S))

    def check_table(self, *, num_ranks: int, may_mask_all: bool = False) -> None:
        """Raise `WireError` unless the numbers of a table are possible.

        Prompts and valid tokens are no longer than their sequences. Advantages, rewards and columns are finite. Every
        sequence has a data-parallel rank, and a source if there are any. Some token is valid, unless `may_mask_all`.
        """
        for name in ("num_valid_S", "prompt_lengths_S"):
            values_S = self.columns[name]
            self._refuse(name, (values_S < 0) | (values_S > self.lengths_S), "must be from 0 to the sequence's length")
        self._refuse("rank_S", (self.rank_S < 0) | (self.rank_S >= num_ranks), f"must be from 0 to {num_ranks - 1}")
        for name in ("advantages_S", "rewards_S", *sorted(self.columns.keys() - TABLE)):
            self._refuse(name, ~np.isfinite(self.columns[name]), "must be finite")
        first, last = (0, len(self.sources) - 1) if self.sources else (-1, -1)
        self._refuse("source_S", (self.source_S < first) | (self.source_S > last), f"must be from {first} to {last}")
        for name in ("command_S", "group_S", "sample_S"):
            self._refuse(name, self.columns[name] < 0, "must be at least 0")
        follows_S = self.branch_S == np.concatenate([[-1], self.branch_S[:-1]]) + 1
        self._refuse("branch_S", (self.branch_S != 0) & ~follows_S, "must be 0, or follow the one before it")
        if not (may_mask_all or self.num_valid_S.any()):
            raise WireError("num_valid_S: no token counts in the loss")

    def check_tokens(self, vocabulary: int, num_valid_S: Int32s | None = None) -> None:
        """Raise `WireError` unless token ids are in the vocabulary, and the counts of valid tokens match, if given."""
        # As unsigned numbers, negative ones are the largest: one comparison.
        wrong_T = self.token_ids_T.view(np.uint32) >= np.uint32(vocabulary)
        self._refuse("token_ids_T", wrong_T, f"must be from 0 to {vocabulary - 1}")
        if num_valid_S is not None and self.num_valid().tolist() != num_valid_S.tolist():
            raise WireError("loss_mask_T: must have as many tokens of each sequence as num_valid_S")

    def check_samples(self, vocabulary: int) -> None:
        """Raise `WireError` unless the numbers of samples are possible.

        Token ids are in the vocabulary. Log-probabilities are finite, at most 0, and 0 for tokens that the policy did
        not make. Versions are -1 for exactly these tokens.
        """
        self.check_tokens(vocabulary)
        logprobs_T = self.generation_logprobs_T
        # NaN compares false with everything, and so is also wrong.
        wrong_T = ~((logprobs_T <= 0) & (logprobs_T > -np.inf))
        self._refuse("generation_logprobs_T", wrong_T, "must be finite and at most 0")
        given_T = ~self.loss_mask_T
        self._refuse("generation_logprobs_T", (logprobs_T != 0) & given_T, "must be 0 where the policy made no token")
        self._refuse("versions_T", (self.versions_T != -1) & given_T, "must be -1 where the policy made no token")
        self._refuse("versions_T", (self.versions_T < 0) & self.loss_mask_T, "must be a version: the policy made it")

    def _refuse(self, name: str, wrong: Bools, must: str) -> None:
        """Raise `WireError` if any number of an array is wrong, and name the first."""
        if wrong.any():
            at = int(wrong.argmax())
            place = f"sequence {at}"
            if name.endswith("_T"):
                place = f"token {at}, of sequence {int(np.searchsorted(self.offsets(), at, side='right')) - 1}"
            raise WireError(f"{name}: {self.columns[name][at]} for {place}, {must}")


LENGTHS = {"T": "lengths_S", "I": "num_images_S", "W": "num_mask_words_S"}
"""The axes along which sequences lie end to end: tokens, images, words of masks. Each has the column of the sequences'
lengths."""
DECLARED: dict[str, np.dtype[Any]] = {
    "lengths_S": np.dtype("int32"),
    "token_ids_T": np.dtype("int32"),
    "loss_mask_T": np.dtype("bool"),
    "generation_logprobs_T": np.dtype("float32"),
    "versions_T": np.dtype("int32"),
    "num_valid_S": np.dtype("int32"),
    "prompt_S": np.dtype("int32"),
    "prompt_lengths_S": np.dtype("int32"),
    "rank_S": np.dtype("int32"),
    "advantages_S": np.dtype("float32"),
    "rewards_S": np.dtype("float32"),
    "source_S": np.dtype("int32"),
    "command_S": np.dtype("int64"),
    "group_S": np.dtype("int32"),
    "sample_S": np.dtype("int32"),
    "branch_S": np.dtype("int32"),
    "num_images_S": np.dtype("int32"),
    "image_digests_IX": np.dtype("uint8"),
    "image_grids_IX": np.dtype("int32"),
    "num_mask_words_S": np.dtype("int32"),
    "mask_lengths_T": np.dtype("int32"),
    "mask_words_W": np.dtype("int32"),
}
"""The dtypes of the declared arrays, by name."""
TOKENS = ("lengths_S", "token_ids_T", "loss_mask_T")
"""The tokens of one rank's sequences that were not generated. The lengths are not sent, as the table has them."""
SAMPLES = (*TOKENS, "generation_logprobs_T", "versions_T")
"""The tokens of finished samples, prompt and response, as the engine saw them."""
MEDIA = ("num_images_S", "image_digests_IX", "image_grids_IX")
"""The images of sequences, beside `TOKENS` or `SAMPLES`, where the model sees."""
DIGEST_BYTES = 32
"""Numbers of a row of ``image_digests_IX``."""
GRID_SIZES = 3
"""Numbers of a row of ``image_grids_IX``."""
MASKS = ("num_mask_words_S", "mask_lengths_T", "mask_words_W")
"""The sampling masks of samples, beside `SAMPLES`, where engines cut distributions off."""
TABLE = (
    "lengths_S",
    "num_valid_S",
    "prompt_S",
    "prompt_lengths_S",
    "rank_S",
    "advantages_S",
    "rewards_S",
    "source_S",
    "command_S",
    "group_S",
    "sample_S",
    "branch_S",
)
"""A training batch without its tokens: the columns of all sequences that every rank needs, in the batch's order.

Everything that ranks have to agree on follows from it: the counts that means divide by, and the number of micro-batches
of each rank. A table also has the columns of a custom loss: a frame ``NAME_S``, with finite numbers, for each of
``loss_fn.columns`` that comes from the environment. With several teachers it has ``teacher_S``, that of each sequence.
"""


def is_of_table(name: str) -> bool:
    """Return whether an array has a number for each sequence that all ranks need; the rest goes to its rank alone."""
    return name.endswith("_S") and name not in (*MEDIA, *MASKS)


def _check_declared(frames: Mapping[str, NDArray[Any]], names: Sequence[str], columns: Mapping[str, str]) -> None:
    for name in [*names, *columns, *frames]:
        if name not in frames:
            raise WireError(f"{name}: is missing")
        if name not in names and name not in columns:
            declared = ", ".join([*names, *columns])
            raise WireError(f"{name[:_SHOWN]}: is no array of this message, which has {declared}")
        array, dtype = frames[name], np.dtype(columns[name]) if name in columns else DECLARED[name]
        num_axes = len(name.rpartition("_")[2])
        if array.dtype != dtype or array.ndim != num_axes:
            of = "one dimension" if num_axes == 1 else f"{num_axes} dimensions"
            raise WireError(f"{name}: is {array.dtype} {array.shape}, must be {dtype} of {of}")
        if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            raise WireError(f"{name}: holds bytes that are no booleans")


def build_given_table(batch: SampleBatch) -> SampleBatch:
    """Return the table (`TABLE`) of a batch that was not generated, all assigned to rank 0.

    Sequences with the same tokens before the first valid one share them as their prompt, if they have the same
    images.
    """
    prompts: dict[tuple[bytes, bytes], int] = {}
    firsts, lengths = [], []
    start = 0
    for row, length in enumerate(batch.lengths_S.tolist()):
        mask_T = batch.loss_mask_T[start : start + length]
        # Nothing predicts the very first token, so it belongs to the prompt whatever the mask says.
        prompt = max(1, int(mask_T.argmax()) if mask_T.any() else length)
        key = batch.token_ids_T[start : start + prompt].tobytes(), media_of(batch, row)
        firsts.append(prompts.setdefault(key, row))
        lengths.append(prompt)
        start += length
    nothing_S = np.zeros(len(firsts), dtype=np.int32)
    return SampleBatch(
        lengths_S=batch.lengths_S,
        num_valid_S=batch.num_valid().astype(np.int32),
        prompt_S=np.array(firsts, dtype=np.int32),
        prompt_lengths_S=np.array(lengths, dtype=np.int32),
        rank_S=nothing_S,
        advantages_S=batch.advantages_S,
        rewards_S=batch.rewards_S,
        source_S=nothing_S - 1,
        command_S=nothing_S.astype(np.int64),
        group_S=nothing_S,
        sample_S=nothing_S,
        branch_S=nothing_S,
    )


def media_of(batch: SampleBatch, row: int) -> bytes:
    """Return the digests of a sequence's images, one after the other; empty where the model does not see."""
    if MEDIA[0] not in batch.columns:
        return b""
    offsets = batch.offsets("I")
    return batch.image_digests_IX[offsets[row] : offsets[row + 1]].tobytes()


def list_media(batch: SampleBatch) -> list[str]:
    """Return the digests of the images of all sequences, in hexadecimal; none where the model takes text alone."""
    if MEDIA[0] not in batch.columns:
        return []
    return [digest.tobytes().hex() for digest in batch.image_digests_IX]


def media_columns(media: Sequence[Media]) -> dict[str, NDArray[Any]]:
    """Return the columns (`MEDIA`) of sequences with these images; a grid of fewer numbers is padded with zeros."""
    flat = [image for references in media for image in references]
    digests = np.frombuffer(bytes.fromhex("".join(image.digest for image in flat)), dtype=np.uint8)
    grids = [(*image.grid, *(0,) * (GRID_SIZES - len(image.grid))) for image in flat]
    return {
        "num_images_S": np.array([len(references) for references in media], dtype=np.int32),
        "image_digests_IX": digests.reshape(-1, DIGEST_BYTES),
        "image_grids_IX": np.array(grids, dtype=np.int32).reshape(-1, GRID_SIZES),
    }
