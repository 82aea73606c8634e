"""Batches drawn as strings."""

from __future__ import annotations

import numpy as np
import torch

from tandem.samples.batch import SampleBatch

CPU = torch.device("cpu")


def batch_of(*masks: str) -> SampleBatch:
    """One sequence a string: ``.`` is a prompt token, ``x`` one that counts. Token ids number all tokens from 1."""
    text = "".join(masks)
    return SampleBatch(
        lengths_S=np.array([len(mask) for mask in masks], dtype=np.int32),
        token_ids_T=np.arange(1, len(text) + 1, dtype=np.int32),
        loss_mask_T=np.array([token == "x" for token in text]),
        generation_logprobs_T=-np.arange(1, len(text) + 1, dtype=np.float32),
        advantages_S=np.arange(len(masks), dtype=np.float32) - 1,
        rewards_S=np.zeros(len(masks), dtype=np.float32),
    )
