"""The DTensor backend: FSDP2, with tensor, context and expert parallelism.

Trained parameters are float32, whatever the precision of the passes. On the CPU, the policy's parameters stay in shared
memory, at the same addresses, as long as the backend lives. So engines can copy straight out of them or read them in
place.

Here models are arranged on the ranks. The optimizer step of each is that of
`tandem.trainer.backends.held.DTensorHeldModel.train_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.config import Config
from tandem.config.model_groups import ModelGroup
from tandem.config.schema.columns import Model
from tandem.refit.weights import Weights
from tandem.trainer import exposed_weights
from tandem.trainer.backends.held import DTensorHeldModel
from tandem.trainer.backends.holding import HoldingBackend
from tandem.trainer.backends.sharding import RankMesh
from tandem.trainer.files import checkpoints


class DTensorBackend(HoldingBackend[DTensorHeldModel]):
    """One rank of the default process group, as a `tandem.trainer.backend.TrainerBackend`.

    Raises `ModelError`, `ConfigError` (optimizer or schedule) or `CheckpointError`.
    """

    def __init__(self, config: Config, *, checkpoint: Path | None, model_group: ModelGroup | None = None) -> None:
        """Build the models of a model group; `model_group` None: of all."""
        super().__init__(config, model_group)
        self._ranks = _arranged(config, self._model_group.models, self.device)
        self._replicas = {name: ranks.replicas for name, ranks in self._ranks.items()}
        self.divides_alike = len({replicas.sizes for replicas in self._replicas.values()}) == 1
        ranks = self._ranks[self._model_group.name]
        self.data_parallel_rank = ranks.data.get_local_rank()
        self.data_parallel_size = ranks.data.size()
        self.sequence_divisor = ranks.sequence_divisor
        proof = checkpoints.FileProof(checkpoints.files_to_load(config, checkpoint, self._model_group.models))
        for name, number in self._list_models():
            held_model = DTensorHeldModel(name, config, self._ranks[name], checkpoint=checkpoint, number=number)
            if name == "policy":
                exposed_weights.share(held_model.parameters | held_model.buffers)
            self._held[name, number] = held_model
        self.shares_prompts = all(model.shares_prompts for model in self._held.values())
        first = self._held[self._model_group.name, 0]
        self.num_parameters = sum(parameter.numel() for parameter in first.parameters.values())
        for model in self._trained():
            model.start(checkpoint)
        proof.conclude()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        return self._replicas[self._model_group.name].sum(values)

    @property
    def policy(self) -> DTensorHeldModel:
        """The policy."""
        return self._held["policy", 0]

    def weights(self) -> Weights:
        """Return the shards of the policy that this rank holds, in the memory that it trains in."""
        policy = self.policy
        return exposed_weights.weights_of(policy.parameters | policy.buffers, self._config.policy.adapters)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of `save`, bit for bit, on any number of ranks, in the parameters' own memory."""
        proof = checkpoints.FileProof(checkpoints.files_of(folder))
        for model in self._trained():
            model.load(folder)
        proof.conclude()


def _arranged(config: Config, models: Sequence[Model], device: torch.device) -> dict[Model, RankMesh]:
    """Return the ranks of each model, arranged once for models with the same parallel sizes. Collective."""
    by_sizes: dict[tuple[int, ...], list[Model]] = {}
    for name in models:
        by_sizes.setdefault(config.settings_of(name).dtensor_cfg.parallel_sizes, []).append(name)
    meshes: dict[Model, RankMesh] = {}
    for names in by_sizes.values():
        ranks = RankMesh([config.settings_of(name) for name in names], device)
        meshes |= dict.fromkeys(names, ranks)
    return meshes
