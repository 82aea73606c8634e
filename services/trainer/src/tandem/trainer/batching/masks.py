"""Sampling masks on a trainer's device: scores over the tokens that an engine drew from.

Shapes: ``K`` scored tokens, ``R`` of them at a time; ``C`` columns of logits; ``W`` words of all masks; ``M``
tokens of masks that are lists; ``B`` masks that are bitmaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.samples.sampling_masks import BITS
from tandem.trainer.micro_batches import move_to_device
from tandem.trainer.scores import MaskedScores, StudentScores, TokenScores

NEVER = -1e30
"""The logit of padding, and of tokens that cannot be drawn. Its probability is zero, and zero times this is not NaN,
unlike with infinity.
"""


class TokenMasks(NamedTuple):
    """The masks of scored tokens (`tandem.samples.sampling_masks`)."""

    lengths_K: torch.Tensor
    """int64; words of each mask, none if the token is scored over the whole vocabulary."""
    starts_K: torch.Tensor
    """int64; first word of each mask."""
    words_W: torch.Tensor
    """int32."""
    bitmap_words: int
    """Words of a mask that is a bitmap; others are lists of token ids."""

    def take(self, chosen_K: torch.Tensor) -> TokenMasks:
        """Return the masks of some of the tokens, by place or by a mask of places."""
        return self._replace(lengths_K=self.lengths_K[chosen_K], starts_K=self.starts_K[chosen_K])

    def split(self, size: int) -> list[TokenMasks]:
        """Return the masks of as many tokens at a time."""
        parts = zip(torch.split(self.lengths_K, size), torch.split(self.starts_K, size), strict=True)
        return [self._replace(lengths_K=lengths_R, starts_K=starts_R) for lengths_R, starts_R in parts]

    def rule_out(self, logits_KC: torch.Tensor, first: int) -> None:
        """Give probability zero to tokens outside of the masks; the first of the columns is that of token `first`."""
        logits_KC.masked_fill_(self.is_outside(logits_KC.shape[1], first), NEVER)

    def is_outside(self, num_columns: int, first: int) -> torch.Tensor:
        """Return, ``[K, C]``, whether the token of each column, from `first` on, is outside of the mask."""
        has_ids_K = self.lengths_K < self.bitmap_words
        counts_K = torch.where(has_ids_K, self.lengths_K, 0)
        row_M = torch.arange(len(counts_K), device=counts_K.device).repeat_interleave(counts_K)
        shifts_K = self.starts_K - (counts_K.cumsum(0) - counts_K)
        word_M = self.words_W[torch.arange(len(row_M), device=row_M.device) + shifts_K[row_M]].long()
        is_outside_K = self.lengths_K > 0
        is_outside_K[row_M[word_M < 0]] = False  # these masks name what is outside
        is_outside_KC = is_outside_K[:, None].repeat(1, num_columns)
        column_M = torch.where(word_M < 0, -1 - word_M, word_M) - first
        is_here_M = (column_M >= 0) & (column_M < num_columns)
        is_outside_KC[row_M[is_here_M], column_M[is_here_M]] = word_M[is_here_M] < 0
        bitmap_row_B = (~has_ids_K).nonzero()[:, 0]
        if len(bitmap_row_B):
            is_outside_KC[bitmap_row_B] = ~self._bits(bitmap_row_B, num_columns, first)
        return is_outside_KC

    def _bits(self, row_B: torch.Tensor, num_columns: int, first: int) -> torch.Tensor:
        """Return the bits of some bitmaps, ``[B, C]``; zero beyond their ends."""
        first_word = min(self.bitmap_words, first // BITS)  # padding of the vocabulary lies beyond
        last_word = min(self.bitmap_words, -(-(first + num_columns) // BITS))
        words = torch.arange(first_word, last_word, device=row_B.device)
        words_BX = self.words_W[self.starts_K[row_B][:, None] + words]
        bits = torch.arange(BITS, dtype=torch.int32, device=row_B.device)
        bits_BC = ((words_BX[:, :, None] >> bits) & 1).flatten(1).bool()
        bits_BC = bits_BC[:, first - first_word * BITS :][:, :num_columns]
        return torch.nn.functional.pad(bits_BC, (0, num_columns - bits_BC.shape[1]))


def rule_out(logits_RC: torch.Tensor, token_ids: Sequence[int], first: int) -> None:
    """Give these tokens probability zero; the first of the columns is that of token `first`."""
    columns = [token - first for token in token_ids if 0 <= token - first < logits_RC.shape[1]]
    if columns:
        logits_RC.index_fill_(1, torch.tensor(columns, device=logits_RC.device), NEVER)


def masks_on(device: torch.device, batch: SampleBatch, tokens_K: NDArray[np.int64], bitmap_words: int) -> TokenMasks:
    """Return the masks of these tokens of a batch, and no others, on a device."""
    lengths_T = batch.mask_lengths_T.astype(np.int64)
    lengths_K = lengths_T[tokens_K]
    ends_K = np.cumsum(lengths_K)
    # From the words of these masks, laid end to end, to those of all.
    shifts_K = (np.cumsum(lengths_T) - lengths_T)[tokens_K] - (ends_K - lengths_K)
    place_W = np.arange(int(lengths_K.sum())) + np.repeat(shifts_K, lengths_K)
    lengths, starts, words = (
        move_to_device(array, device) for array in (lengths_K, ends_K - lengths_K, batch.mask_words_W[place_W])
    )
    return TokenMasks(lengths, starts, words, bitmap_words)


def compares_whole(config: Config) -> bool:
    """Tell whether a penalty holds the policy against a reference, which has no masks, beside a loss with masks."""
    return config.replays_sampling_masks and config.loss_fn.reference_policy_kl_penalty > 0


def masked_scores(
    score: Callable[..., TokenScores | StudentScores], masks: TokenMasks, *, needs_whole: bool
) -> TokenScores | StudentScores | MaskedScores:
    """Return what `score` gives with masks, and for training without them, too, if the loss needs that.

    That is where a penalty holds the policy against a reference, which is scored over the whole vocabulary (NeMo-RL
    v0.7, ``curr_logprobs_unfiltered``). It takes a second pass over the output layer.
    """
    scores = score(masks=masks)
    if not (needs_whole and torch.is_grad_enabled()):
        return scores
    return MaskedScores(*scores[:3], whole_logprobs=score().logprobs)
