"""Samples as arrays: ragged, never padded, one raw frame an array.

Shapes: ``S`` sequences, ``T`` tokens of all sequences laid end to end. Sequence ``i`` owns the tokens from
``offsets[i]`` to ``offsets[i + 1]`` where ``offsets`` is the cumulative sum of ``lengths_S``.

What arrives is checked, not believed: `RaggedArrays.from_frames` checks names, dtypes and shapes, which each field
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
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


class RaggedArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the array bundles that travel beside a message: each field is one frame."""

    lengths_S: Int32s
    """Tokens of each sequence, prompt included; at least one."""
    token_ids_T: Int32s

    def to_frames(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by field name, uncopied."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @classmethod
    def from_frames(cls, frames: Mapping[str, NDArray[Any]]) -> Self:
        """Rebuild from received frames; the arrays stay read-only views of them.

        Raises `WireError` unless there is one array for each field, of its dtype and one dimension, and there are
        sequences, each of at least one token, whose tokens are all that there are.
        """
        dtypes = _dtypes(cls)
        for name in [*dtypes, *frames]:
            if name not in frames:
                raise WireError(f"{name}: is missing")
            if name not in dtypes:
                raise WireError(f"{name[:_SHOWN]}: is no array of this message, which has {', '.join(dtypes)}")
            array = frames[name]
            if array.dtype != dtypes[name] or array.ndim != 1:
                raise WireError(f"{name}: is {array.dtype} {array.shape}, must be {dtypes[name]} of one dimension")
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                raise WireError(f"{name}: holds bytes that are no booleans")
        lengths_S = frames["lengths_S"]
        if not len(lengths_S) or lengths_S.min() < 1:
            at = int(lengths_S.argmin()) if len(lengths_S) else 0
            what = f"{lengths_S[at]} for sequence {at}" if len(lengths_S) else "of no sequence"
            raise WireError(f"lengths_S: {what}, must be at least 1")
        sizes = {"S": len(lengths_S), "T": int(lengths_S.sum(dtype=np.int64))}
        for name in dtypes:
            axis = name.rpartition("_")[2]
            if len(frames[name]) != sizes[axis]:
                of = f"the {sizes['S']} sequences" if axis == "S" else f"lengths_S, which add up to {sizes['T']}"
                raise WireError(f"{name}: {len(frames[name])} numbers, does not fit {of}")
        return cls(**frames)

    def offsets(self) -> NDArray[np.int64]:
        """Return where each sequence begins, and the end of the last: ``S + 1`` numbers."""
        return np.concatenate([[0], np.cumsum(self.lengths_S, dtype=np.int64)])

    def sequence_of(self, token: int) -> int:
        """Return the sequence that owns a token."""
        return int(np.searchsorted(self.offsets(), token, side="right")) - 1

    def refuse(self, field: str, wrong_T: Bools, must: str) -> None:
        """Raise `WireError` if any number of a field is wrong, naming the first."""
        if not wrong_T.any():
            return
        at = int(wrong_T.argmax())
        where = f"token {at}, of sequence {self.sequence_of(at)}" if field.endswith("_T") else f"sequence {at}"
        raise WireError(f"{field}: {getattr(self, field)[at]} for {where}, {must}")

    def check_tokens(self, vocabulary: int) -> None:
        """Token ids are of the vocabulary."""
        # As unsigned numbers, negative ones are the largest: one comparison.
        wrong_T = self.token_ids_T.view(np.uint32) >= np.uint32(vocabulary)
        self.refuse("token_ids_T", wrong_T, f"must be from 0 to {vocabulary - 1}")


_SHOWN = 100
"""Characters of a name that is shown to somebody who does not know it."""


@functools.cache
def _dtypes(kind: type[RaggedArrays]) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each field, as its annotation says."""
    hints = get_type_hints(kind)
    return {name: np.dtype(get_args(get_args(hints[name])[1])[0]) for name in kind.__struct_fields__}


def check_logprobs(bundle: RaggedArrays, field: str) -> None:
    """Log-probabilities are finite and not positive."""
    logprobs_T = getattr(bundle, field)
    # NaN compares false with everything, and so is wrong, too.
    bundle.refuse(field, ~((logprobs_T <= 0) & (logprobs_T > -np.inf)), "must be finite and at most 0")


class SampleArrays(RaggedArrays, frozen=True, kw_only=True):
    """The tokens of finished samples, prompt and response, as the engine saw them."""

    loss_mask_T: Bools
    """True where the policy made the token."""
    generation_logprobs_T: Float32s
    """Log-probability of each made token under the distribution it was drawn from; zero elsewhere."""
    versions_T: Int32s
    """Weight version that made each token; -1 where none did."""

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
        return SampleArrays(
            **{name: np.concatenate([getattr(p, name) for p in parts]) for name in SampleArrays.__struct_fields__}
        )

    def take(self, rows: Sequence[int]) -> SampleArrays:
        """Return the given sequences in the given order."""
        offsets = self.offsets()
        tokens = np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in rows])
        return SampleArrays(
            lengths_S=self.lengths_S[list(rows)],
            token_ids_T=self.token_ids_T[tokens],
            loss_mask_T=self.loss_mask_T[tokens],
            generation_logprobs_T=self.generation_logprobs_T[tokens],
            versions_T=self.versions_T[tokens],
        )


class TrainingBatch(RaggedArrays, frozen=True, kw_only=True):
    """What a training step consumes. For SFT the advantages are one and the generation log-probabilities zero."""

    loss_mask_T: Bools
    """True where the token counts in the loss."""
    generation_logprobs_T: Float32s
    advantages_S: Float32s

    def check(self, vocabulary: int, *, may_mask_all: bool = False) -> None:
        """Raise `WireError` unless the numbers can be what they are said to be.

        Token ids are of the vocabulary, log-probabilities finite and at most 0, advantages finite. Some token counts in
        the loss, unless `may_mask_all`.
        """
        self.check_tokens(vocabulary)
        check_logprobs(self, "generation_logprobs_T")
        self.refuse("advantages_S", ~np.isfinite(self.advantages_S), "must be finite")
        if not (may_mask_all or self.loss_mask_T.any()):
            raise WireError("loss_mask_T: no token counts in the loss")

    def part(self, first: int, count: int) -> TrainingBatch:
        """Return `count` sequences from `first` on, uncopied."""
        start, size = (int(self.lengths_S[rows].sum()) for rows in (slice(first), slice(first, first + count)))
        rows, tokens = slice(first, first + count), slice(start, start + size)
        return TrainingBatch(
            lengths_S=self.lengths_S[rows],
            token_ids_T=self.token_ids_T[tokens],
            loss_mask_T=self.loss_mask_T[tokens],
            generation_logprobs_T=self.generation_logprobs_T[tokens],
            advantages_S=self.advantages_S[rows],
        )
