"""Sequences of tokens that a response may not contain, such as those of ``bad_words``.

The last token of a sequence is masked where the response ends with those before it. Tokens are then drawn from what
remains, renormalised, and their log-probabilities are of that distribution. An engine that was never asked for any does
not wrap its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.rollout.engines.slots import EngineSlots


def forbidden_next(sequences: Sequence[Sequence[int]], made_ids: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of the sequences after these tokens of the response."""
    response_ids = tuple(made_ids)
    return [last for *before, last in sequences if response_ids[len(response_ids) - len(before) :] == tuple(before)]


class ForbiddingForward:
    """A forward pass whose logits of forbidden tokens are minus infinity."""

    def __init__(self, forward: Callable[[], torch.Tensor], slots: EngineSlots) -> None:
        """`forward` returns a row of logits for each running sequence of `slots`."""
        self._forward = forward
        self._slots = slots

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """Return the logits ``[R, V]`` from which the next tokens are drawn."""
        logits_RV = self._forward()
        for row, sequence in enumerate(self._slots.sequences):
            sequences = sequence.request.sampling.bad_token_ids
            if sequences:
                length = max(map(len, sequences)) - 1
                forbidden_ids = forbidden_next(sequences, self._slots.newest(row, length))
                logits_RV[row, forbidden_ids] = -torch.inf
        return logits_RV
