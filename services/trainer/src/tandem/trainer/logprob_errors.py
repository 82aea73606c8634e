"""Leaving out of sequences with log-probabilities that differ too much between training and generation.

Shapes: ``S`` sequences of a batch, ``T`` tokens of a rank's shard of it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.samples.batch import Float32s, SampleBatch
from tandem.trainer.batching.shard import RankBatch

_LARGEST = 600.0
"""The largest difference of log-probabilities. Beyond it the error would not be finite, and exceeds any threshold."""


def leave_out(batch: RankBatch, threshold: float, policy_T: Float32s) -> None:
    """Mask the sequences on which training and generation differ by more than the threshold. Collective.

    `policy_T` are the log-probabilities of the shard's tokens under the policy.
    """
    shard, table = batch.shards["policy"], batch.table
    errors_S = torch.zeros(len(table), dtype=torch.float64)
    errors_S[torch.from_numpy(shard.rows)] = torch.from_numpy(mult_prob_errors(shard.samples, policy_T))
    errors = batch.backend.sum_over_ranks(errors_S).cpu().numpy()
    kept_S, metrics = select_sequences(errors, table.num_valid_S, table.rewards_S, threshold)
    batch.metrics |= metrics
    batch.keep(kept_S)


def mult_prob_errors(batch: SampleBatch, policy_T: Float32s) -> NDArray[np.float64]:
    """Return for each sequence the mean of exp |log p_training - log p_generation| over its valid tokens.

    A sequence without valid tokens has 0. Over all tokens of a batch, this is the metric ``token_mult_prob_error``.
    """
    valid_T = batch.valid()
    differences_T = np.abs(policy_T.astype(np.float64) - batch.generation_logprobs_T)
    errors_T = np.where(valid_T, np.exp(np.minimum(differences_T, _LARGEST)), 0.0)
    rows_T = np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)
    sums_S = np.bincount(rows_T, weights=errors_T, minlength=len(batch.lengths_S))
    return np.asarray(sums_S / np.maximum(1, batch.num_valid()), dtype=np.float64)


def select_sequences(
    errors_S: NDArray[np.float64], num_valid_S: NDArray[np.int32], rewards_S: Float32s, threshold: float
) -> tuple[NDArray[np.bool_], dict[str, float]]:
    """Return a mask of the sequences to train on, and metrics under NeMo-RL's names.

    The largest error is over all sequences with a valid token. A reward of 1 is a correct answer.
    """
    kept_S = errors_S <= threshold
    masked_S = ~kept_S & (num_valid_S > 0)
    num_masked = int(masked_S.sum())
    return kept_S, {
        "max_seq_mult_prob_error": float(errors_S.max(initial=0.0)),
        "num_masked_seqs_by_logprob_error": float(num_masked),
        "masked_correct_pct": float((rewards_S[masked_S] == 1).sum() / max(1, num_masked)),
    }
