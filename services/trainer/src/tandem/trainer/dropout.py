"""Dropout whose masks follow from where in the run they are drawn, and from nothing else.

A micro-batch that is computed again, by a backward pass or a run that is resumed, has the same masks. Ranks that hold
the same numbers draw the same masks, and those that hold shares of them draw others. Outside of training steps nothing
is left out.
"""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor


class Place:
    """Where in the run training is, told to all `Dropout` of a model."""

    def __init__(self, seed: int, sequences: int, share: int) -> None:
        """Begin outside of a step.

        Args:
            seed: of the run.
            sequences: number of this rank among those that see other tokens.
            share: number of this rank among those that share layers.
        """
        self._seed, self._sequences, self._share = seed, sequences, share
        self._place = ""

    def enter(self, num_steps: int, micro_batch: int) -> None:
        """Draw masks for a micro-batch, after so many optimizer steps."""
        self._place = f"{self._seed}/{num_steps}/{micro_batch}/{self._sequences}"

    def leave(self) -> None:
        """Leave nothing out until `enter`."""
        self._place = ""

    def draw(self, name: str, like: torch.Tensor, *, is_share: bool) -> torch.Tensor | None:
        """Return uniform numbers of the shape of a tensor for a layer of this name; None outside of a step."""
        if not self._place:
            return None
        told = f"{self._place}/{name}/{self._share if is_share else 'whole'}"
        digest = hashlib.blake2b(told.encode(), digest_size=7).digest()
        generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest))
        return torch.rand(like.shape, generator=generator, device=like.device)


class Dropout(torch.nn.Module):
    """Leaves out each of the numbers it is given with a probability, and scales the others up."""

    def __init__(self, name: str, probability: float, place: Place) -> None:
        """Begin; `name`: no other has it."""
        super().__init__()
        self._name, self._probability, self._place = name, probability, place
        self.is_share = False
        """Whether ranks that share the layer are given other numbers each."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what is left."""
        local = given.to_local() if isinstance(given, DTensor) else given
        drawn = self._place.draw(self._name, local, is_share=self.is_share)
        if drawn is None:
            return given
        left = local * ((drawn >= self._probability) / (1.0 - self._probability)).to(local.dtype)
        if isinstance(given, DTensor):
            return DTensor.from_local(left, given.device_mesh, given.placements, run_check=False)
        return left
