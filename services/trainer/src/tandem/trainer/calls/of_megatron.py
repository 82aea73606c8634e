"""A policy of the Megatron-Core backend, trained by single calls.

Each rank adds up the gradients of its own sequences, in Megatron-Core's buffers. They are reduced once, for the step
that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from tandem.common.messages import LARGEST, StepOptimizer
from tandem.samples.batch import Float32s
from tandem.trainer.backend import LossOfMicroBatch
from tandem.trainer.backends.megatron import optimizer_state
from tandem.trainer.backends.megatron.backend import MegatronBackend
from tandem.trainer.backends.megatron.held import adding
from tandem.trainer.micro_batches import MicroBatch


class _Progress(NamedTuple):
    state: optimizer_state.Taken
    num_steps: int
    gradients: list[torch.Tensor]


class OfMegatron:
    """One rank's part, as a `tandem.trainer.calls.calls.CalledPolicy`."""

    def __init__(self, backend: MegatronBackend) -> None:
        """Keep Megatron-Core's schedules from reducing gradients at the end of a call."""
        self._backend, self._policy = backend, backend.policy
        self._division = self._policy.division
        self._transformer = self._policy.settings.transformer
        self._transformer.finalize_model_grads_func = None
        self._transformer.no_sync_func = self._transformer.grad_sync_func = None

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of a loss. Return the loss."""
        return self._run(micro_batches, loss, has_gradient=True)

    def score(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Return the loss, without a gradient."""
        return self._run(micro_batches, loss, has_gradient=False)

    def _run(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, *, has_gradient: bool) -> float:
        policy = self._policy
        total = torch.zeros(1, dtype=torch.float64, device=policy.device)
        with self._division.entered(), torch.set_grad_enabled(has_gradient), ExitStack() as stack:
            for chunk in policy.chunks:
                stack.enter_context(chunk.no_sync())
            rows = policy.pipeline.rows(micro_batches)
            # Losses that balance experts count a rank's tokens, so that all is divided by those of this call.
            num_tokens = policy.num_tokens(rows)
            self._transformer.grad_scale_func = lambda value: value / num_tokens
            policy.pipeline.run(rows, adding(total, loss), scale=num_tokens, forward_only=not has_gradient)
        return float(self._division.sum_over_replicas(total)[0])

    def complete(self, logprobs_T: Float32s) -> None:
        """Send what the last stage has to the others."""
        if self._policy.settings.sizes.pp == 1:
            return
        values_T = torch.from_numpy(logprobs_T).to(self._policy.device)
        with self._division.entered():
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values_T, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        logprobs_T[:] = values_T.cpu().numpy()

    def step(self, command: StepOptimizer, loss: float, *, has_gradient: bool) -> float:
        """Reduce the gradient and take a step. Return the norm of the gradient.

        Megatron-Core has groups of parameters whose weights do not decay, such as norms. For clients all do, as in
        torch's AdamW.
        """
        policy = self._policy
        with self._division.entered():
            biases = policy.balancing_biases()
            if policy.settings.data_parallel.overlap_grad_reduce:
                for chunk in policy.chunks:
                    chunk.start_grad_sync()
            finalize_model_grads(policy.chunks)
            for group in policy.optimizer.param_groups:
                group["lr"] = command.learning_rate
                group["betas"] = (command.beta1, command.beta2)
                group["eps"] = command.eps
                group["weight_decay"] = command.weight_decay
            try:
                return policy.take_step(loss, biases, command.max_grad_norm, largest=LARGEST).grad_norm
            finally:
                policy.forget_gradient()

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return what is trained: parameters, copies of them that are more precise, biases that balance experts."""
        policy = self._policy
        tensors = {
            name: tensor.detach()
            for name, tensor in policy.weights.parameters.items()
            if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        }
        copies = optimizer_state.precise_copies(policy.optimizer, policy.weights)
        return tensors | {f"{name}, as it is stepped": tensor for name, tensor in copies.items()}

    def forget_gradient(self) -> None:
        """Make the gradient zero."""
        self._policy.forget_gradient()
        for chunk in self._policy.chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith("router.local_tokens_per_expert"):  # by which a step balances experts
                    buffer.zero_()

    def forget_steps(self) -> None:
        """Leave the optimizer no state."""
        self.forget_gradient()
        self._policy.forget_steps()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        self._backend.load(folder)

    def set_aside(self, *, has_gradient: bool) -> _Progress:
        """Return the optimizer's state, and a copy of the gradient if there is one."""
        policy = self._policy
        gradients = [buffer.clone() for buffer in self._gradients()] if has_gradient else []
        progress = _Progress(optimizer_state.take(policy.optimizer), policy.num_steps, gradients)
        self.forget_steps()
        return progress

    def take_back(self, progress: _Progress) -> None:
        """Go on with an optimizer's state and a gradient."""
        optimizer_state.give(self._policy.optimizer, progress.state)
        self._policy.num_steps = progress.num_steps
        if progress.gradients:
            for buffer, gradient in zip(self._gradients(), progress.gradients, strict=True):
                buffer.copy_(gradient)

    def _gradients(self) -> list[Any]:
        """Return the buffers that gradients are added up in."""
        chunks = self._policy.chunks
        return [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
