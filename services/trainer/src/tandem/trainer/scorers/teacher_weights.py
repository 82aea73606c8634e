"""The weights of several teachers of each sequence: given, or by their certainty on the batch.

Shapes: ``T`` tokens of the rank's shard of the batch; ``M`` teachers.
"""

from __future__ import annotations

import numpy as np
import torch

from tandem.config import Config
from tandem.config.schema.columns import TEACHER_CONFIDENCE, TEACHER_WEIGHTS
from tandem.samples.batch import Float32s
from tandem.trainer.advantages import EstimatedAdvantages, ScoredShard


def weigh(config: Config, scored: ScoredShard) -> EstimatedAdvantages:
    """Return the weights of the teachers, the same for every token of the batch.

    NeMo-RL finds those that depend on the tokens for each micro-batch; here they are of the whole batch, whatever the
    size of micro-batches.
    """
    weights_M = np.array([teacher.weight for teacher in config.joint_teachers], dtype=np.float32)
    metrics: dict[str, float] = {}
    if config.weighs_teachers_by:
        valid_T, confidence_TM = scored.batch.valid(), scored.columns[TEACHER_CONFIDENCE].astype(np.float64)
        sums = [int(valid_T.sum()), *confidence_TM[valid_T].sum(axis=0).tolist()]
        count, *totals = scored.sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
        score_M = np.array(totals) / max(1.0, count)
        is_one_taken = config.loss_fn.kd_loss_mode == "select_teacher"
        weights_M = select_highest(score_M) if is_one_taken else softmax(config.loss_fn.alpha * score_M)
        metrics = {f"weight_t{index}": float(weight) for index, weight in enumerate(weights_M)}
    num_tokens = len(scored.batch.token_ids_T)
    return EstimatedAdvantages({TEACHER_WEIGHTS: np.broadcast_to(weights_M, (num_tokens, len(weights_M)))}, metrics)


def select_highest(score_M: np.typing.NDArray[np.float64]) -> Float32s:
    """Return 1 in the place of the first of the highest scores, else 0."""
    weights_M = np.zeros(len(score_M), dtype=np.float32)
    weights_M[score_M.argmax()] = 1.0
    return weights_M


def softmax(score_M: np.typing.NDArray[np.float64]) -> Float32s:
    """Return weights that are proportional to the exponentials of the scores, and add up to 1."""
    exp_M = np.exp(score_M - score_M.max())
    return np.asarray(exp_M / exp_M.sum(), dtype=np.float32)
