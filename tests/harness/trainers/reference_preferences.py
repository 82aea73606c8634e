"""DPO of Hugging Face models, which takes one response at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tandem.samples.batch import SampleBatch

BETA, SFT_WEIGHT = 0.3, 0.2


def responses(model: Any, batch: SampleBatch) -> list[torch.Tensor]:
    """Log-probabilities of the counted tokens of each sequence, which goes through the model alone."""
    found = []
    for length, end in zip(batch.lengths_S, np.cumsum(batch.lengths_S), strict=True):
        token_ids = torch.from_numpy(batch.token_ids_T[end - length : end].astype(np.int64))
        mask = torch.from_numpy(batch.loss_mask_T[end - length : end])[1:]
        logits_TV = model(input_ids=token_ids[None]).logits[0, :-1]
        found.append(logits_TV.log_softmax(dim=-1).gather(1, token_ids[1:, None])[:, 0][mask])
    return found


def plain_dpo(model: Any, reference: Any, batch: SampleBatch, beta: float = BETA) -> tuple[torch.Tensor, Any]:
    """Loss, with gradient, and what there is to report."""
    policy = responses(model, batch)
    with torch.no_grad():
        before = responses(reference, batch)
    rewards = [(now - then).sum() for now, then in zip(policy, before, strict=True)]
    margins = torch.stack([a - b for a, b in zip(rewards[::2], rewards[1::2], strict=True)])
    preference_loss = -torch.log(torch.sigmoid(beta * margins)).mean()
    sft_loss = -torch.stack([logprobs.mean() for logprobs in policy[::2]]).mean()
    metrics = {
        "preference_loss": preference_loss,
        "sft_loss": sft_loss,
        "accuracy": (margins > 0).float().mean(),
        "rewards_chosen_mean": torch.stack(rewards[::2]).mean(),
        "rewards_rejected_mean": torch.stack(rewards[1::2]).mean(),
        "num_valid_samples": torch.tensor(len(margins)),
    }
    return preference_loss + SFT_WEIGHT * sft_loss, {name: float(value.detach()) for name, value in metrics.items()}
