"""The protocol of training backends: one object for each rank, with its part of model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from tandem.config.schema.columns import Model
from tandem.refit.weights import Weights
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores

LossOfMicroBatch = Callable[[MicroBatch, Any], torch.Tensor]
"""From a micro-batch and the model's scores of its tokens to a scalar loss. Its sum over all micro-batches of all ranks
is the loss of the global batch.
"""


class ModelReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the ranks by one model: each replica sees its own sequences."""

    sizes: tuple[int, ...]
    """Parallel sizes. Models with equal sizes divide the ranks in the same way."""
    rank: int
    """This rank's replica."""
    size: int
    """The number of replicas."""
    sequence_divisor: int
    """The width of padded rows, and the length of every segment of a packed one, must be a multiple of this."""
    sum: Callable[[torch.Tensor], torch.Tensor]
    """Adds a float64 tensor over the replicas."""


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one optimizer step, equal on every rank."""

    loss: float
    """Loss of the global batch."""
    grad_norm: float
    """Euclidean norm over all parameters before clipping."""
    learning_rate: float


class CheckpointWriting(NamedTuple):
    """A rank's part of a checkpoint, on its way to the disk."""

    num_bytes: Future[int]
    """Bytes written, once they are on disk and synced; or `CheckpointError`."""
    why_waited: str
    """The reason why training had to wait until all was written; empty if a thread writes a copy."""


class TrainerBackend(Protocol):
    """The models that a rank holds, and their optimizers: the policy, and others that the algorithm declares.

    Processes of one other model hold only that one. The attributes about the rank refer to the first model that it
    holds.
    """

    data_parallel_rank: int
    data_parallel_size: int
    num_parameters: int
    """Parameters of the whole policy, or of the first model held."""
    device: torch.device
    divides_alike: bool
    """Whether all of its models divide the ranks in the same way: each replica then sees the same sequences."""
    shares_prompts: bool
    """Whether its models take a `MicroBatch.row` with shared prompts."""
    sequence_divisor: int
    """The width of padded rows, and the length of every segment of a packed one, must be a multiple of this."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossOfMicroBatch,
        model: Model = "policy",
        *,
        refuses_outliers: bool = False,
    ) -> OptimizerStep:
        """Forward and backward over this rank's micro-batches, clip, and step the model's optimizer once.

        Raises `NotFiniteError`, with the weights unchanged, if the loss or the gradient is not a finite number; with
        `refuses_outliers`, `OutlierError` if it is out of all proportion to those of the steps before.
        """
        ...

    def advance_schedule(self, model: Model = "policy") -> None:
        """Advance the schedule of a model's learning rate, after the optimizer steps of a pass over a batch."""
        ...

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return a model's scores of each micro-batch without gradient, aligned with its ``token_ids_BT``.

        `number` selects one of several teachers.

        Position ``t`` holds the score of token ``t`` given the tokens before it, for a language model at the sampling
        temperature. Positions of tokens that are not valid hold zero.
        """
        ...

    def replicas(self, model: Model) -> ModelReplicas:
        """Return how a model divides the ranks; the first model, as `data_parallel_rank` and its like say."""
        ...

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        ...

    def weights(self) -> Weights:
        """Return the policy weights that this rank holds, all in memory that the host's engines can open."""
        ...

    def save(self, folder: Path) -> CheckpointWriting:
        """Copy every trained model and its optimizer, and begin to write them under `folder`.

        The names are in `tandem.trainer.files.checkpoints`: ``policy/`` (Hugging Face), ``optimizer/`` and so on.

        Training may go on at once. One checkpoint at a time. Collective. Raises `CheckpointError` if an optimizer's
        state cannot be saved. Later errors come with the result.
        """
        ...

    def offload(self) -> None:
        """Free the device memory that only training needs: gradients, optimizer states, the value model's parameters.

        They move to host memory. The policy's parameters stay in place, because engines may be reading them.
        """
        ...

    def reload(self) -> None:
        """Take back what `offload` freed, if it freed anything. Training steps and `save` need it."""
        ...

    def close(self) -> None:
        """Release models and optimizer."""
        ...
