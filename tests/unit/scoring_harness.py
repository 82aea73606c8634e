"""Hidden states to score, scores out of all logits, and the largest tensor there ever was."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.trainer.scores import TokenScores

NUM_TOKENS, HIDDEN, VOCABULARY = 37, 16, 101


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight, and targets with the first and the last token among them."""
    generator = torch.Generator().manual_seed(seed)
    hidden_KH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VH = (0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    target_K = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    target_K[:2] = torch.tensor([0, VOCABULARY - 1])
    target_K[2:12] = (hidden_KH @ weight_VH.T)[2:12].argmax(dim=-1)  # and of those that the model expects
    return hidden_KH, weight_VH, target_K


def of_full_logits(
    hidden_KH: torch.Tensor, weight_VH: torch.Tensor, target_K: torch.Tensor, temperature: float
) -> TokenScores:
    logits_KV = (hidden_KH @ weight_VH.T).float() / temperature
    logprobs_K = logits_KV.log_softmax(dim=-1).gather(1, target_K[:, None])[:, 0]
    entropy_K = torch.distributions.Categorical(logits=logits_KV.detach()).entropy()
    return TokenScores(logprobs_K, entropy_K, (logits_KV.argmax(dim=-1) == target_K).float())


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result
