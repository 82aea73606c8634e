"""The protocol of training backends: one object a rank, with its share of model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from tandem.config.schema.columns import Model
from tandem.refit.endpoint import Weights
from tandem.trainer.micro_batches import MicroBatch, Replicas
from tandem.trainer.scoring import Scores

LossOfMicroBatch = Callable[[MicroBatch, Any], torch.Tensor]
"""From a micro-batch and what the model says of its tokens to a scalar loss, whose sum over all micro-batches of all
ranks is the loss of the global batch."""


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did, equal on every rank."""

    loss: float
    """Of the global batch."""
    grad_norm: float
    """Euclidean norm over all parameters before clipping."""
    learning_rate: float


class Writing(NamedTuple):
    """A rank's part of a checkpoint, on its way to the disk."""

    num_bytes: Future[int]
    """That were written, once they are there and synced; or `CheckpointError`."""
    why_waited: str
    """Why training had to wait until all was written; empty if a thread writes a copy."""


class Backend(Protocol):
    """The models that a rank holds, and their optimizers: the policy, and what else the algorithm's declaration names.

    Or, in processes that are there for one model, that one alone. What is said of a rank is of the first that it holds.
    """

    data_parallel_rank: int
    data_parallel_size: int
    num_parameters: int
    """Of the whole model, the policy where that is held."""
    device: torch.device
    shares_prompts: bool
    """Whether its models take a `MicroBatch.row` with shared prompts."""
    sequence_divisor: int
    """The width of padded rows, and the length of every segment of a packed one, must be a multiple of this."""

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, model: Model = "policy"
    ) -> OptimizerStep:
        """Forward and backward over this rank's micro-batches, clip, and step the model's optimizer and schedule once.

        Raises `NotFiniteError`, with the weights unchanged, if the loss or the gradient is not a finite number.
        """
        ...

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return what a model says of each micro-batch without gradient, aligned with its ``token_ids_BT``.

        `number` is that of one of several teachers.

        Position ``t`` holds what it says of token ``t`` given the tokens before it, a language model at the sampling
        temperature; positions whose token does not count in the loss hold zero.
        """
        ...

    def replicas(self, model: Model) -> Replicas:
        """Return how a model divides the ranks; the first as `data_parallel_rank` and its like say."""
        ...

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        ...

    def weights(self) -> Weights:
        """Return the weights of the policy that this rank holds, all in memory that the host's engines can open."""
        ...

    def save(self, folder: Path) -> Writing:
        """Copy every model that is trained, and its optimizer, and begin to write them under `folder`.

        `tandem.trainer.files.checkpoints` has the names: ``policy/`` (Hugging Face format), ``optimizer/`` and so on.

        Training may go on at once. One checkpoint at a time. Collective. Raises `CheckpointError` for an optimizer
        whose state cannot be saved; the rest is said by what is returned.
        """
        ...

    def offload(self) -> None:
        """Give up the device memory that only training needs: gradients, optimizers' states, values' parameters.

        They go to host memory. The policy's parameters stay where they are: engines may be reading them.
        """
        ...

    def reload(self) -> None:
        """Take back what `offload` gave up; nothing if nothing was. Training steps and `save` need it."""
        ...

    def close(self) -> None:
        """Release models and optimizer."""
        ...
