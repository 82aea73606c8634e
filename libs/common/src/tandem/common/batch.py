"""Samples as arrays: ragged, never padded, one raw frame an array.

Shapes: ``S`` sequences, ``T`` tokens of all sequences laid end to end. Sequence ``i`` owns the tokens from
``offsets[i]`` to ``offsets[i + 1]`` where ``offsets`` is the cumulative sum of ``lengths_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


class RaggedArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the array bundles that travel beside a message: each field is one frame."""

    def to_frames(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by field name, uncopied."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @classmethod
    def from_frames(cls, frames: Mapping[str, NDArray[Any]]) -> Self:
        """Rebuild from received frames; the arrays stay read-only views of them."""
        return cls(**{name: frames[name] for name in cls.__struct_fields__})


class SampleArrays(RaggedArrays, frozen=True, kw_only=True):
    """The tokens of finished samples, prompt and response, as the engine saw them."""

    lengths_S: Int32s
    """Tokens of each sequence, prompt included."""
    token_ids_T: Int32s
    loss_mask_T: Bools
    """True where the policy made the token."""
    generation_logprobs_T: Float32s
    """Log-probability of each made token under the distribution it was drawn from; zero elsewhere."""
    versions_T: Int32s
    """Weight version that made each token; -1 where none did."""

    @staticmethod
    def concatenate(parts: Sequence[SampleArrays]) -> SampleArrays:
        """Join bundles, keeping the order of their sequences."""
        return SampleArrays(
            **{name: np.concatenate([getattr(p, name) for p in parts]) for name in SampleArrays.__struct_fields__}
        )

    def offsets(self) -> NDArray[np.int64]:
        """Return where each sequence begins, and the end of the last: ``S + 1`` numbers."""
        return np.concatenate([[0], np.cumsum(self.lengths_S, dtype=np.int64)])

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

    lengths_S: Int32s
    token_ids_T: Int32s
    loss_mask_T: Bools
    """True where the token counts in the loss."""
    generation_logprobs_T: Float32s
    advantages_S: Float32s
    rewards_S: Float32s = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """What advantages were made of; none where there are no rewards."""

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
            rewards_S=self.rewards_S[rows],
        )
