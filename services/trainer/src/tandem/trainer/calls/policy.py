"""The protocol of policies that are trained by single calls, on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tandem.common.messages import StepOptimizer
from tandem.samples.batch import Float32s
from tandem.trainer.backend import LossOfMicroBatch
from tandem.trainer.micro_batches import MicroBatch

Progress = Any
"""An optimizer's state and a gradient, as a policy itself keeps them."""


class CalledPolicy(Protocol):
    """One rank's part of a policy. Methods are collective, but for those that only move this rank's memory."""

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of the loss of these micro-batches on all ranks to what there is. Return the loss."""
        ...

    def score(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Return the loss of these micro-batches on all ranks, without a gradient."""
        ...

    def complete(self, logprobs_T: Float32s) -> None:
        """Give all ranks of a replica what a loss has written on those that have scores."""
        ...

    def step(self, command: StepOptimizer, loss: float, *, has_gradient: bool) -> float:
        """Take a step of AdamW with the gradient, which is that of `loss`, or with zeros if there is none.

        Return its norm before clipping. Raises `NotFiniteError`, and then no weight has changed. Either way the
        gradient is forgotten.
        """
        ...

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of all that steps change, but for the optimizer's state, by reference."""
        ...

    def forget_gradient(self) -> None:
        """Forget the gradient."""
        ...

    def forget_steps(self) -> None:
        """Make the optimizer as if no step had been taken, and forget the gradient."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint, bit for bit, in the memory of the weights. Raises `CheckpointError`."""
        ...

    def set_aside(self, *, has_gradient: bool) -> Progress:
        """Return the optimizer's state, and the gradient if there is one; then `forget_steps`."""
        ...

    def take_back(self, progress: Progress) -> None:
        """Go on with what was set aside."""
        ...
