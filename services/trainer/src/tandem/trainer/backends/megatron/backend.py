"""The Megatron-Core backend: tensor, pipeline, context, expert and data parallel.

Parameters have the precision of the passes. If that is bfloat16, the optimizer also keeps them in float32. On the CPU,
the policy's parameters stay in shared memory, at the same addresses, as long as the backend lives. So engines can copy
straight out of them or read them in place.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tandem.config import Config
from tandem.config.model_groups import ModelGroup
from tandem.config.schema.columns import Model
from tandem.refit.weight_client import Weights
from tandem.trainer.backends.holding import HoldingBackend
from tandem.trainer.backends.megatron.held import Described, HeldModel, sum_over_replicas
from tandem.trainer.backends.megatron.model import make_groups
from tandem.trainer.files import checkpoints
from tandem.trainer.micro_batches import Replicas


class MegatronBackend(HoldingBackend[HeldModel]):
    """One rank of the default process group, as a `tandem.trainer.backend.Backend`.

    Call `tandem.trainer.backends.megatron.preparing.prepare` first. Raises `ModelError` or `CheckpointError`.
    """

    shares_prompts = False

    def __init__(self, config: Config, *, checkpoint: Path | None, model_group: ModelGroup | None = None) -> None:
        """Build the models of a model group; `model_group` None: of all."""
        super().__init__(config, model_group)
        proof = checkpoints.Proof(checkpoints.files_to_load(config, checkpoint, self._model_group.models))
        described = [Described(name, config, number) for name, number in self._to_hold()]
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
        for each in described:
            self._held[each.name, each.number] = HeldModel(each, config, self.device, checkpoint=checkpoint)
        for model in self._trained():
            model.start(checkpoint)
        proof.conclude()

    def replicas(self, model: Model) -> Replicas:
        """Return the policy's replicas. Megatron-Core divides the ranks once, for all models."""
        return Replicas(
            sizes=(self.data_parallel_size,),
            rank=self.data_parallel_rank,
            size=self.data_parallel_size,
            sequence_divisor=self.sequence_divisor,
            sum=self.sum_over_ranks,
        )

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the replicas, counting each replica's last stage once."""
        return sum_over_replicas(values, self.device)

    def weights(self) -> Weights:
        """Return the policy's weights that this rank holds, in the memory that it trains in."""
        return self._held["policy", 0].weights.shared

    def close(self) -> None:
        """Release models and optimizers, and leave Megatron-Core's groups."""
        super().close()
        parallel_state.destroy_model_parallel()
