"""Dropout with masks that depend only on the place in the run where they are drawn.

A micro-batch that is computed again, by a backward pass or a resumed run, has the same masks. Ranks that hold the same
numbers draw the same masks, and ranks that hold different shares draw different masks. Outside of training steps
nothing is dropped.
"""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor


class DropoutPlace:
    """The present place in the run, shared by all `Dropout` modules of a model."""

    def __init__(self, seed: int, sequences: int, share: int) -> None:
        """Begin outside of a step.

        Args:
            seed: seed of the run.
            sequences: index of this rank among those that see different tokens.
            share: index of this rank among those that share layers.
        """
        self._seed, self._sequences, self._share = seed, sequences, share
        self._place = ""

    def enter(self, num_steps: int, micro_batch: int) -> None:
        """Draw masks for a micro-batch after this number of optimizer steps."""
        self._place = f"{self._seed}/{num_steps}/{micro_batch}/{self._sequences}"

    def leave(self) -> None:
        """Drop nothing until `enter`."""
        self._place = ""

    def draw(self, name: str, like: torch.Tensor, *, is_share: bool) -> torch.Tensor | None:
        """Return uniform numbers in a tensor's shape for the layer of this name; None outside of a step."""
        if not self._place:
            return None
        seed_text = f"{self._place}/{name}/{self._share if is_share else 'whole'}"
        digest = hashlib.blake2b(seed_text.encode(), digest_size=7).digest()
        generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest))
        return torch.rand(like.shape, generator=generator, device=like.device)


class Dropout(torch.nn.Module):
    """Drops each of its inputs with a probability, and scales the others up."""

    def __init__(self, name: str, probability: float, place: DropoutPlace) -> None:
        """Take a name that no other dropout has, its probability, and the place in the run."""
        super().__init__()
        self._name, self._probability, self._place = name, probability, place
        self.is_share = False
        """Whether ranks that share the layer get different numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the numbers that remain."""
        local = inputs.to_local() if isinstance(inputs, DTensor) else inputs
        drawn = self._place.draw(self._name, local, is_share=self.is_share)
        if drawn is None:
            return inputs
        remaining = local * ((drawn >= self._probability) / (1.0 - self._probability)).to(local.dtype)
        if isinstance(inputs, DTensor):
            return DTensor.from_local(remaining, inputs.device_mesh, inputs.placements, run_check=False)
        return remaining
