"""The Megatron-Core backend: tensor, pipeline, context, expert and data parallel.

Parameters have the precision of the passes. If that is bfloat16, the optimizer also keeps them in float32. On the CPU,
the policy's parameters stay in shared memory, at the same addresses, as long as the backend lives. So engines can copy
straight out of them or read them in place.

Here models are arranged on the ranks. The optimizer step of each is that of
`tandem.trainer.backends.megatron.held.MegatronHeldModel.train_step`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.config import Config
from tandem.config.placement import ModelGroup
from tandem.config.schema.columns import Model
from tandem.refit.weights import Weights
from tandem.trainer.backend import LossOfMicroBatch, ModelReplicas, OptimizerStep
from tandem.trainer.backends.holding import HoldingBackend
from tandem.trainer.backends.megatron.groups import RankDivision, divided
from tandem.trainer.backends.megatron.held import MegatronHeldModel, ModelDescription
from tandem.trainer.files import checkpoints
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores


class MegatronBackend(HoldingBackend[MegatronHeldModel]):
    """One rank of the default process group, as a `tandem.trainer.backend.TrainerBackend`.

    Call `tandem.trainer.backends.megatron.preparing.prepare` first. Raises `ModelError` or `CheckpointError`.
    """

    shares_prompts = False

    def __init__(self, config: Config, *, checkpoint: Path | None, model_group: ModelGroup | None = None) -> None:
        """Build the models of a model group; `model_group` None: of all."""
        super().__init__(config, model_group)
        proof = checkpoints.FileProof(checkpoints.files_to_load(config, checkpoint, self._model_group.models))
        described = [ModelDescription(name, config, number) for name, number in self._list_models()]
        first = described[0]
        self.num_parameters = first.shape.num_parameters
        if dist.get_rank() == 0:
            for notice in dict.fromkeys(notice for description in described for notice in description.settings.notices):
                print(notice, flush=True)
        timeout = datetime.timedelta(seconds=config.cluster.deadlines.train_s)
        self._divisions = divided(
            ((description.name, description.settings) for description in described), self.device, timeout
        )
        self.divides_alike = len({division.replicas.sizes for division in self._divisions.values()}) == 1
        replicas = self._divisions[first.name].replicas
        self.data_parallel_rank, self.data_parallel_size = replicas.rank, replicas.size
        self.sequence_divisor = replicas.sequence_divisor
        for description in described:
            division = self._divisions[description.name]
            with division.entered():
                held_model = MegatronHeldModel(description, config, division, self.device, checkpoint=checkpoint)
            self._held[description.name, description.number] = held_model
        for model in self._trained():
            with self._divisions[model.name].entered():
                model.start(checkpoint)
        proof.conclude()

    def replicas(self, model: Model) -> ModelReplicas:
        """Return the division of the ranks by a model; the policy's for a reference that is the policy itself."""
        return self._division_of(model).replicas

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossOfMicroBatch,
        model: Model = "policy",
        *,
        refuses_outliers: bool = False,
    ) -> OptimizerStep:
        """Take an optimizer step of a model in its own groups."""
        with self._division_of(model).entered():
            return super().train_step(micro_batches, loss, model, refuses_outliers=refuses_outliers)

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return a model's scores, computed in its own groups."""
        with self._division_of(model).entered():
            return super().scores(micro_batches, model, number)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the replicas of the first model, counting each replica's last stage once."""
        return self._divisions[self._model_group.name].sum_over_replicas(values)

    @property
    def policy(self) -> MegatronHeldModel:
        """The policy."""
        return self._held["policy", 0]

    def weights(self) -> Weights:
        """Return the policy's weights that this rank holds, in the memory that it trains in."""
        return self.policy.weights.shared

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of `save`, bit for bit, on any number of ranks, in the parameters' own memory."""
        proof = checkpoints.FileProof(checkpoints.files_of(folder))
        for model in self._trained():
            with self._divisions[model.name].entered():
                model.load(folder)
        proof.conclude()

    def close(self) -> None:
        """Release models and optimizers, and leave Megatron-Core's groups."""
        super().close()
        self._divisions.clear()

    def _division_of(self, model: Model) -> RankDivision:
        """Return a model's division; the reference of a policy with adapters is the policy itself."""
        return self._divisions.get(model) or self._divisions["policy"]
