"""Tokens drawn on a GPU: the noise of all requests of a step by one kernel.

Each request has a seed, so that its tokens do not depend on what else runs. vLLM then fills the noise of each request
by a kernel of its own, at every step: as many launches as there are requests. Its kernel for Gumbel noise, which it has
for another model runner, takes the seeds of all requests at once. The noise of a token is a hash of the request's seed,
of the position, and of the token's number in the vocabulary, so nothing has to be kept between steps.

On a CPU vLLM takes one number from each request's generator, and computes the noise by one kernel from these.

Shapes: ``B`` requests of a step, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class TokenDraws:
    """In the place of the sampler's method that filters logits and draws tokens; with the same arguments."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner  # its batch is made anew once the size of the cache is known
        self._device: torch.device = runner.device
        self._rows = torch.arange(runner.max_num_reqs, device=self._device)
        self._ones = torch.ones(runner.max_num_reqs, device=self._device)

    def __call__(
        self,
        logits_BV: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        top_k_B: torch.Tensor | None,
        top_p_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token of each request, and the log-probabilities that it was drawn from."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        logits_BV = apply_top_k_top_p(logits_BV, top_k_B, top_p_B)
        num = logits_BV.shape[0]
        seeds_B, positions_B = self._seeds(num, generators)
        token_ids_B = gumbel_sample(
            logits_BV,
            expanded_idx_mapping=self._rows[:num],
            temperature=self._ones,  # by which logits are divided already: it is not zero, so tokens are drawn
            seed=seeds_B,
            pos=positions_B,
            apply_temperature=False,
            is_drafting=False,
        )
        return token_ids_B, logits_BV.log_softmax(dim=-1, dtype=torch.float32)

    def _seeds(self, num: int, generators: Mapping[int, torch.Generator]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the seed and the number of tokens of each request. One without a generator is greedy, or a warm-up."""
        seeds_positions_2B = np.zeros((2, num), np.int64)
        for row, generator in generators.items():
            seeds_positions_2B[0, row] = np.uint64(generator.initial_seed() % 2**64).astype(np.int64)
        seeds_positions_2B[1] = self._runner.input_batch.num_tokens_no_spec[:num]
        seeds_B, positions_B = torch.from_numpy(seeds_positions_2B).to(self._device)
        return seeds_B, positions_B


def draw_at_once(runner: Any) -> None:
    """Have a model runner's sampler draw the tokens of all requests by one kernel."""
    runner.sampler.topk_topp_sampler.forward = TokenDraws(runner)
