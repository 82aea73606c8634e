"""The DTensor backend: FSDP2, with tensor and context parallelism.

Parameters that are trained are float32 whatever the precision of the passes; on the CPU those of the policy lie in
shared memory for as long as the backend lives, at the same addresses, so that engines can copy straight out of them or
read them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.common.worlds import World
from tandem.refit.endpoint import Weights
from tandem.trainer import checkpoints
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, Replicas, Writing
from tandem.trainer.backends import shards
from tandem.trainer.backends.devices import device_of
from tandem.trainer.backends.held import HeldModel
from tandem.trainer.backends.sharding import Ranks
from tandem.trainer.packing import MicroBatch
from tandem.trainer.scoring import Scores


class DTensorBackend:
    """One rank of the default process group; obeys `tandem.trainer.backend.Backend`.

    What is trained starts from the ``model_name`` of its section or, where given, from a checkpoint of Tandem. The
    reference, which exists only if the loss reads it, is always ``policy.model_name``: the policy before any training.
    Where adapters are trained, that is the policy with its adapters switched off, and nothing else is held.

    Raises `ModelError`, `ConfigError` (optimizer or schedule) or `CheckpointError`.
    """

    def __init__(self, config: Config, *, checkpoint: Path | None, world: World | None = None) -> None:
        """`world` is that of the process group; None: it holds all models."""
        self._config = config
        self._world = world or World(models=config.declaration.holds(config), first=0, size=dist.get_world_size())
        self.device = device_of(self._world.first + dist.get_rank())
        self._ranks = _arranged(config, self._world.models, self.device)
        ranks = self._ranks[self._world.name]
        self.data_parallel_rank = ranks.data.get_local_rank()
        self.data_parallel_size = ranks.data.size()
        self.sequence_divisor = ranks.sequence_divisor
        proof = checkpoints.Proof(checkpoints.files_to_load(config, checkpoint, self._world.models))
        self._models: dict[Model, HeldModel] = {}
        self._others: list[HeldModel] = []
        """Teachers after the first."""
        adapts = config.policy.adapters is not None
        for name in self._world.models:
            if name == "reference" and adapts:  # it is the policy without its adapters
                continue
            self._models[name] = HeldModel(name, config, self._ranks[name], checkpoint=checkpoint)
            if name == "policy":
                shards.share(self._models[name].parameters | self._models[name].buffers)
            for number in range(1, config.num_of(name)):
                self._others.append(HeldModel(name, config, self._ranks[name], checkpoint=checkpoint, number=number))
        self.shares_prompts = all(model.shares_prompts for model in self._held())
        first = self._models[self._world.name]
        self.num_parameters = sum(parameter.numel() for parameter in first.parameters.values())
        for model in self._trained():
            model.start(checkpoint)
        proof.conclude()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, model: Model = "policy"
    ) -> OptimizerStep:
        """Forward and backward over this rank's micro-batches, clip, and step the model's optimizer and schedule once.

        Raises `TrainingError`, before anything has changed, if the loss or the gradient is no finite number.
        """
        return self._models[model].train_step(micro_batches, loss)

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return what a model says of each micro-batch without gradient, zero where no token counts."""
        if model not in self._models:  # the reference of a policy that trains adapters
            return self._models["policy"].scores(micro_batches, as_reference=True)
        held = self._others[number - 1] if number else self._models[model]
        return held.scores(micro_batches)

    def replicas(self, model: Model) -> Replicas:
        """Return how a model divides the ranks: by the parallel sizes of its own section."""
        return self._ranks[model].replicas

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        return self._ranks[self._world.name].sum_over_replicas(values)

    def weights(self) -> Weights:
        """Return the shards of the policy this rank holds: the memory that it trains in."""
        policy = self._models["policy"]
        return shards.weights_of(policy.parameters | policy.buffers, self._config.policy.adapters)

    def save(self, folder: Path) -> Writing:
        """Copy what is trained, in float32, and the optimizers' state, and begin to write them.

        Rank 0 gathers each model a layer at a time. Raises `CheckpointError` for an optimizer that keeps anything but
        tensors.
        """
        return checkpoints.save(folder, self._states(), self._config, first_writer=self._world.first)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit, on any number of ranks, in the memory the parameters lie in."""
        proof = checkpoints.Proof(checkpoints.files_of(folder))
        for model in self._trained():
            model.load(folder)
        proof.conclude()

    def offload(self) -> None:
        """Free what only training needs: gradients, optimizers' states, and parameters that no engine reads."""
        for model in self._held():
            model.offload()

    def reload(self) -> None:
        """Move it back, to tensors that are the same as before."""
        for model in self._held():
            model.reload()

    def close(self) -> None:
        """Release models and optimizers; the process group belongs to whoever made it."""
        self._models.clear()
        self._others.clear()

    def _held(self) -> list[HeldModel]:
        return [*self._models.values(), *self._others]

    def _trained(self) -> list[HeldModel]:
        return [model for model in self._models.values() if model.is_trained]

    def _states(self) -> dict[Model, checkpoints.State]:
        return {model.name: model.state() for model in self._trained()}


def _arranged(config: Config, models: Sequence[Model], device: torch.device) -> dict[Model, Ranks]:
    """Return the ranks as each model has them, arranged once for all that have the same parallel sizes. Collective."""
    by_sizes: dict[tuple[int, int], list[Model]] = {}
    for name in models:
        sizes = config.settings_of(name).dtensor_cfg
        by_sizes.setdefault((sizes.context_parallel_size, sizes.tensor_parallel_size), []).append(name)
    found: dict[Model, Ranks] = {}
    for names in by_sizes.values():
        ranks = Ranks([config.settings_of(name) for name in names], device)
        found |= dict.fromkeys(names, ranks)
    return found
