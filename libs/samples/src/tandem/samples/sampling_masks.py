"""Sampling masks, columns of samples: the tokens that top-k, top-p, min-p or bad words left over.

An engine's log-probabilities are of the distribution over these tokens. Trainers compute the policy's over the same
ones, whatever its weights have become: the Keep Sampling Mask of DeepSeek-V3.2 (arXiv:2512.02556, section 3.1), which
vLLM calls sampling distribution replay. A cut that is computed again could leave a drawn token out, at a tie, by a
rounding, or because weights have moved, and its log-probability would be minus infinity.

The mask of a token is a number of 32-bit words. They are the kept token ids in ascending order, or, if these are fewer,
the ids that were left out, each as ``-1 - id``. If a bitmap of the vocabulary takes no more words, they are that bitmap
with the lowest bit first. A mask without words means that nothing was cut off, or that the policy did not draw the
token. So a token takes 4 bytes, and 4 more for each token that is kept or left out, whichever are fewer, but never more
than a bit for each token of the vocabulary: 19 kB for 151,936 tokens.

Shapes: ``S`` sequences, ``T`` tokens, ``W`` words of all masks end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import WireError
from tandem.config.models.model_sizes import vocabulary_size
from tandem.samples.batch import Bools, SampleBatch

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.config.schema.columns import Model

BITS = 32
"""Bits of a word."""
Words = NDArray[np.int32]


class SamplingMasks(NamedTuple):
    """The masks of consecutive tokens."""

    lengths_T: NDArray[np.int32]
    """Words of each mask."""
    words_W: Words

    @classmethod
    def join(cls, masks: Iterable[Words]) -> SamplingMasks:
        """Return masks that are given one by one."""
        parts = [*masks]
        lengths_T = np.array([*map(len, parts)], dtype=np.int32)
        return cls(lengths_T, np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32))

    @classmethod
    def none_of(cls, num_tokens: int) -> SamplingMasks:
        """Return the masks of tokens of which nothing was cut off."""
        return cls(np.zeros(num_tokens, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def slice_from(self, start: int) -> SamplingMasks:
        """Return the masks from that of token `start` on."""
        return SamplingMasks(self.lengths_T[start:], self.words_W[int(self.lengths_T[:start].sum()) :])


class MaskFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a model's masks."""

    vocabulary: int
    """Number of tokens."""

    @property
    def bitmap_words(self) -> int:
        """Words of a bitmap, which no mask exceeds."""
        return -(-self.vocabulary // BITS)

    def check(self, batch: SampleBatch) -> None:
        """Raise `WireError` unless each mask of a batch is possible and has the token that was drawn from it."""
        lengths_T, words_W = batch.mask_lengths_T, batch.mask_words_W
        if len(lengths_T) and not 0 <= int(lengths_T.min()) <= int(lengths_T.max()) <= self.bitmap_words:
            raise WireError(f"mask_lengths_T: must be from 0 to {self.bitmap_words}")
        ends_T = np.concatenate([[0], np.cumsum(lengths_T, dtype=np.int64)])[batch.offsets()]
        if ends_T.tolist() != batch.offsets("W").tolist():
            raise WireError("mask_lengths_T: must add up to num_mask_words_S in each sequence")
        if not self.has_drawn(lengths_T, words_W, batch.token_ids_T).all():
            raise WireError("mask_words_W: must have the token that was drawn from each mask")

    def has_drawn(self, lengths_T: NDArray[np.int32], words_W: Words, token_ids_T: NDArray[np.int32]) -> Bools:
        """Return, for each token, whether it is in its own mask; true without a mask."""
        found_T: Bools = lengths_T == 0
        token_W = np.repeat(np.arange(len(lengths_T)), lengths_T)
        is_id_W = lengths_T[token_W] < self.bitmap_words
        found_T[token_W[is_id_W & (words_W < 0)]] = True
        found_T[token_W[is_id_W & (words_W == token_ids_T[token_W])]] = True
        found_T[token_W[is_id_W & (words_W == -1 - token_ids_T[token_W])]] = False
        bitmap_B = np.flatnonzero(lengths_T == self.bitmap_words)
        ids_B = token_ids_T[bitmap_B].astype(np.int64)
        starts_T = np.cumsum(lengths_T, dtype=np.int64) - lengths_T
        found_T[bitmap_B] = (words_W[starts_T[bitmap_B] + ids_B // BITS] >> (ids_B % BITS)) & 1 == 1
        return found_T


def mask_columns(num_tokens: int, drawn: Iterable[tuple[int, SamplingMasks | None]]) -> dict[str, NDArray[Any]]:
    """Return the columns of one sequence; each of `drawn` has the place of its first token, in order."""
    lengths_T, words = np.zeros(num_tokens, dtype=np.int32), [np.zeros(0, dtype=np.int32)]
    for first, masks in drawn:
        if masks is not None:
            lengths_T[first : first + len(masks.lengths_T)] = masks.lengths_T
            words.append(masks.words_W)
    words_W = np.concatenate(words)
    return {
        "num_mask_words_S": np.array([len(words_W)], dtype=np.int32),
        "mask_lengths_T": lengths_T,
        "mask_words_W": words_W,
    }


def masks_of_run(config: Config, model: Model = "policy") -> MaskFormat | None:
    """Return the format of the masks that samples carry for one of a run's models; None if it replays none.

    The current and the previous policy are scored with masks, as in NeMo-RL. The reference, teachers and other losses
    than policy gradients are not.
    """
    if model != "policy" or not config.replays_sampling_masks:
        return None
    return MaskFormat(vocabulary=vocabulary_size(config.policy))
