"""Train with Megatron-Core: tensor, pipeline, context, expert and data parallel.

Parameters have the precision of the passes; where that is bfloat16 the optimizer keeps them in float32 as well. On the
CPU those of the policy lie in shared memory for as long as the backend lives, at the same addresses, so that engines
can copy straight out of them or read them in place.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.common.worlds import World
from tandem.refit.endpoint import Weights
from tandem.trainer import checkpoints
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, Replicas, Writing
from tandem.trainer.backends.devices import device_of
from tandem.trainer.backends.megatron.held import Described, HeldModel, sum_over_replicas
from tandem.trainer.backends.megatron.model import make_groups
from tandem.trainer.packing import MicroBatch
from tandem.trainer.scoring import Scores


class MegatronBackend:
    """One rank of the default process group; obeys `tandem.trainer.backend.Backend`.

    After `tandem.trainer.backends.megatron.cpu.prepare`. What is trained starts from the ``model_name`` of its section
    or, where given, from a checkpoint of Tandem. The reference, which exists only if the loss reads it, is always
    ``policy.model_name``. Where adapters are trained, that is the policy without them, and nothing else is held.

    Raises `ModelError` or `CheckpointError`.
    """

    shares_prompts = False

    def __init__(self, config: Config, *, checkpoint: Path | None, world: World | None = None) -> None:
        """`world` is that of the process group; None: it holds all models."""
        self._config = config
        self._world = world or World(models=config.declaration.holds(config), first=0, size=dist.get_world_size())
        self.device = device_of(self._world.first + dist.get_rank())
        proof = checkpoints.Proof(checkpoints.files_to_load(config, checkpoint, self._world.models))
        described = [
            Described(name, config, number) for name in self._world.models for number in range(config.num_of(name))
        ]
        first = described[0]
        self.num_parameters = first.shape.num_parameters
        if dist.get_rank() == 0:
            for notice in dict.fromkeys(notice for each in described for notice in each.settings.notices):
                print(notice, flush=True)
        make_groups(first.settings, datetime.timedelta(seconds=config.cluster.deadlines.train_s))
        sizes = first.settings.sizes
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = sizes.dp
        self.sequence_divisor = 2 * sizes.cp if sizes.cp > 1 else 1
        if any(each.settings.transformer.sequence_parallel for each in described):
            self.sequence_divisor *= sizes.tp
        self._models: dict[Model, HeldModel] = {}
        self._others: list[HeldModel] = []
        """Teachers after the first."""
        for each in described:
            if each.name == "reference" and config.policy.adapters is not None:  # it is the policy without them
                continue
            held = HeldModel(each, config, self.device, checkpoint=checkpoint)
            if each.number:
                self._others.append(held)
            else:
                self._models[each.name] = held
        for model in self._trained():
            model.start(checkpoint)
        proof.conclude()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, model: Model = "policy"
    ) -> OptimizerStep:
        """Forward and backward over this replica's micro-batches, clip, and step optimizer and schedule once.

        Raises `TrainingError`, before anything has changed, if the loss or the gradient is no finite number.
        """
        return self._models[model].train_step(micro_batches, loss)

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return what a model says of each micro-batch without gradient, zero where no token counts, on every stage."""
        if model not in self._models:  # the reference of a policy that trains adapters
            return self._models["policy"].scores(micro_batches, as_reference=True)
        held = self._others[number - 1] if number else self._models[model]
        return held.scores(micro_batches)

    def replicas(self, model: Model) -> Replicas:
        """Return the policy's: Megatron-Core divides the ranks once, for all models."""
        return Replicas(
            sizes=(self.data_parallel_size,),
            rank=self.data_parallel_rank,
            size=self.data_parallel_size,
            sequence_divisor=self.sequence_divisor,
            sum=self.sum_over_ranks,
        )

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the replicas: of each, what its last stage has counts, once."""
        return sum_over_replicas(values, self.device)

    def weights(self) -> Weights:
        """Return the weights of the policy that this rank holds: the memory that it trains in."""
        return self._models["policy"].weights.shared

    def save(self, folder: Path) -> Writing:
        """Copy what is trained, in the precision of the parameters, and the optimizers' state; begin to write them.

        Raises `CheckpointError` for an optimizer whose state cannot be saved.
        """
        return checkpoints.save(folder, self._states(), self._config, first_writer=self._world.first)

    def offload(self) -> None:
        """Move what only training needs from the GPU to host memory; on a CPU that is where it is."""
        for model in self._held():
            model.offload()

    def reload(self) -> None:
        """Take back what `offload` gave up, to tensors that are the same as before."""
        for model in self._held():
            model.reload()

    def close(self) -> None:
        """Release models and optimizers, and leave Megatron-Core's groups."""
        self._models.clear()
        self._others.clear()
        parallel_state.destroy_model_parallel()

    def _held(self) -> list[HeldModel]:
        return [*self._models.values(), *self._others]

    def _states(self) -> dict[Model, checkpoints.State]:
        return {model.name: model.state() for model in self._trained()}

    def _trained(self) -> list[HeldModel]:
        return [model for model in self._models.values() if model.is_trained]
