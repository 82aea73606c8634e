"""A policy of the DTensor backend, trained by single calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.common.errors import ConfigError
from tandem.common.messages import LARGEST, StepOptimizer
from tandem.samples.batch import Float32s
from tandem.trainer.backend import LossOfMicroBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.micro_batches import MicroBatch


class _Progress(NamedTuple):
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    num_steps: int
    gradients: dict[str, torch.Tensor | None]


class OfDTensor:
    """One rank's part, as a `tandem.trainer.calls.calls.CalledPolicy`."""

    def __init__(self, backend: DTensorBackend) -> None:
        self._backend, self._policy = backend, backend.policy

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of a loss. Return the loss."""
        return self._policy.add_gradient(micro_batches, loss)

    def score(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Return the loss, without a gradient."""
        total = torch.zeros(1, dtype=torch.float64, device=self._backend.device)
        for micro_batch, scores_BT in zip(micro_batches, self._policy.scores(micro_batches), strict=True):
            total += loss(micro_batch, scores_BT)
        return float(self._backend.sum_over_ranks(total)[0])

    def complete(self, logprobs_T: Float32s) -> None:
        """Do nothing: all ranks have scores."""

    def step(self, command: StepOptimizer, loss: float, *, has_gradient: bool) -> float:
        """Take a step. Return the norm of the gradient."""
        if not has_gradient:
            # FSDP has no gradient to clip, and AdamW would step with none: then only the weights decay.
            for parameter in self._policy.parameters.values():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        for group in self._policy.optimizer.param_groups:
            if "betas" not in group:
                raise ConfigError("policy.optimizer.name: only torch.optim.AdamW trains by single calls")
            group["lr"] = command.learning_rate
            group["betas"] = (command.beta1, command.beta2)
            group["eps"] = command.eps
            group["weight_decay"] = command.weight_decay
        return self._policy.take_step(loss, command.max_grad_norm or None, largest=LARGEST).grad_norm

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are trained."""
        return self._policy.trained_here()

    def forget_gradient(self) -> None:
        """Forget the gradient."""
        self._policy.optimizer.zero_grad(set_to_none=True)

    def forget_steps(self) -> None:
        """Make a new optimizer."""
        self._policy.forget_steps()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        self._backend.load(folder)

    def set_aside(self, *, has_gradient: bool) -> _Progress:
        """Return optimizer and gradient."""
        policy = self._policy
        gradients = {name: parameter.grad for name, parameter in policy.parameters.items()}
        progress = _Progress(policy.optimizer, policy.scheduler, policy.num_steps, gradients)
        for parameter in policy.parameters.values():
            parameter.grad = None
        policy.forget_steps()
        return progress

    def take_back(self, progress: _Progress) -> None:
        """Go on with an optimizer and a gradient."""
        policy = self._policy
        policy.optimizer, policy.scheduler, policy.num_steps, gradients = progress
        for name, parameter in policy.parameters.items():
            parameter.grad = gradients[name]
