"""Sampling masks in a vLLM worker: the tokens that min-p, top-k and top-p left of each draw.

vLLM's own way (``return_sampling_mask``) needs its second model runner, which CPUs have not. Workers of tensor
parallelism all draw the same tokens; of pipeline stages, the last one draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.rollout.engines.masks import masks_of
from tandem.samples.sampling_masks import MaskFormat, SamplingMasks, Words

KEPT = "tandem_sampling_masks"
"""Key of vLLM's ``additional_config`` with the size of the vocabulary."""


class MaskRecord:
    """In the place of the sampler's method that cuts distributions off and draws tokens; with the same arguments."""

    def __init__(self, runner: Any, vocabulary: int) -> None:
        """Note what the sampler of a model runner keeps, for every request."""
        self._runner = runner
        self._format = MaskFormat(vocabulary=vocabulary)
        self._masks: dict[str, list[Words]] = {}
        sampler = runner.sampler.topk_topp_sampler
        self._draw = sampler.forward
        sampler.forward = self

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token for each request, and note its mask."""
        token_ids_B, logprobs_BV = self._draw(*arguments)
        requests = self._runner.requests
        self._masks = {name: masks for name, masks in self._masks.items() if name in requests}
        masks_B = masks_of(logprobs_BV > -torch.inf, self._format)
        for name, mask in zip(self._runner.input_batch.req_ids, masks_B, strict=True):
            self._masks.setdefault(name, []).append(mask)
        return token_ids_B, logprobs_BV

    def of(self, num_tokens: Mapping[str, int]) -> list[tuple[bytes, bytes]]:
        """Return the masks of this many tokens of each request: their lengths and words; nothing if none are known."""
        encoded_masks = []
        for request, number in num_tokens.items():
            # vLLM may have added something to the request's name.
            names = (name for name in self._masks if name == request or name.startswith(f"{request}-"))
            masks = self._masks.get(next(names, ""), [])
            joined = SamplingMasks.join(masks[:number] if len(masks) >= number else [])
            encoded_masks.append((joined.lengths_T.tobytes(), joined.words_W.tobytes()))
        return encoded_masks
