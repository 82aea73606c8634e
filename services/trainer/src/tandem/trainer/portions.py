"""Which sequences of a batch a rank works on for a model, where models divide the ranks differently.

Sequences come to the ranks as the policy divides them. A model whose parallel sizes are others has other replicas: the
tokens of its sequences come from the ranks that have them, and the numbers that it says of these go back. Each is a sum
over the replicas of what one of them has and zeros: exact, and four or eight bytes a token of the batch.

Shapes: ``S`` sequences of the whole batch; ``T`` tokens of this rank's portion of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.assignment import EMPTY_ROW, Assignment
from tandem.common.batch import Batch
from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.trainer.backend import Replicas


class Portion:
    """The sequences of a batch that one division of the ranks gives to this rank."""

    def __init__(self, replicas: Replicas, table: Batch, batch: Batch) -> None:
        """Begin with a table of the whole batch, and the sequences that it assigns to this rank."""
        self.replicas, self.table, self.batch = replicas, table, batch
        self.rows = own = table.rows_of(replicas.rank)
        """Of the table."""
        assert table.lengths_S[own].tolist() == batch.lengths_S.tolist(), "the share is what the table says"
        self.place_of = {EMPTY_ROW: EMPTY_ROW} | {row: place for place, row in enumerate(own.tolist())}
        """The place in the portion of each row of the table that is in it."""
        self.token_of_T = tokens_of(table, own)
        """Where the tokens of the portion lie when all of the batch lie end to end."""

    def for_model(self, model: Model, replicas: Replicas, config: Config) -> Portion:
        """Return what a model with other replicas works on. Collective: its tokens come from the ranks of this one."""
        table = divided(self.table, model, replicas.size, config)
        own = table.rows_of(replicas.rank)
        tokens = tokens_of(table, own)
        token_ids_T, loss_mask_T = (
            self._everywhere(values_T)[tokens] for values_T in (self.batch.token_ids_T, self.batch.loss_mask_T)
        )
        return Portion(replicas, table, batch_of(table, own, token_ids_T, loss_mask_T))

    def keep(self, kept_S: NDArray[np.bool_]) -> None:
        """Have no token count of the batch's other sequences."""
        self.batch = self.batch.keeping(kept_S[self.rows])

    def moved_to(self, other: Portion, values_T: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of this portion's tokens as the numbers of another one's. Collective."""
        if other is self:
            return values_T
        return self._everywhere(values_T)[other.token_of_T].astype(values_T.dtype)

    def _everywhere(self, values_T: NDArray[Any]) -> NDArray[np.float64]:
        """Return numbers of all tokens of the batch from those of each rank's portion."""
        whole = np.zeros((int(self.table.lengths_S.sum(dtype=np.int64)), *values_T.shape[1:]))
        whole[self.token_of_T] = values_T
        found: NDArray[np.float64] = self.replicas.sum(torch.from_numpy(whole)).cpu().numpy()
        return found


def divided(table: Batch, model: Model, num_ranks: int, config: Config) -> Batch:
    """Return the table of a batch as so many replicas of a model divide it, by its section."""
    assignment, settings = Assignment.of(config, shares_prompts=False), config.settings_of(model)
    by_tokens = settings.sequence_packing.enabled or settings.dynamic_batching.enabled
    return msgspec.structs.replace(assignment, num_ranks=num_ranks, by_tokens=by_tokens).assign(table)


def batch_of(table: Batch, rows: NDArray[np.int64], token_ids_T: NDArray[Any], loss_mask_T: NDArray[Any]) -> Batch:
    """Return some sequences of a table with their tokens; what else there is of these comes as columns."""
    return Batch(
        lengths_S=table.lengths_S[rows],
        token_ids_T=token_ids_T.astype(np.int32),
        loss_mask_T=loss_mask_T.astype(np.bool_),
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
        advantages_S=table.advantages_S[rows],
        rewards_S=table.rewards_S[rows],
    )


def tokens_of(table: Batch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the tokens of some sequences lie when all of the batch lie end to end."""
    ends = np.cumsum(table.lengths_S, dtype=np.int64)
    spans = (np.arange(ends[row] - table.lengths_S[row], ends[row]) for row in rows)
    return np.concatenate([np.zeros(0, dtype=np.int64), *spans])
