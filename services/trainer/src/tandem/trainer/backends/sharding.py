"""The ranks of the DTensor backend: their arrangement for a model, and its sharding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tandem.config.schema import Model
from tandem.trainer.backends import tensor_plans
from tandem.trainer.micro_batches import Replicas
from tandem.trainer.models import decoder_layers


class Ranks:
    """The ranks of the default process group as a mesh: data × context × tensor, with the last varying fastest."""

    def __init__(self, sections: Sequence[Model], device: torch.device) -> None:
        """Arrange them for models of equal parallel sizes; `device` is this rank's. Collective."""
        self.device = device
        device_type = device.type
        settings = sections[0].dtensor_cfg
        self._splits_sequences = any(each.dtensor_cfg.sequence_parallel for each in sections)
        context, tensor = settings.context_parallel_size, settings.tensor_parallel_size
        num_replicas, rest = divmod(dist.get_world_size(), settings.model_parallel_size)
        assert not rest, "the configuration's checks require whole replicas"
        sizes = (num_replicas, context, tensor)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("data", "context", "tensor"))
        self.data, self.context, self.tensor = (mesh[name] for name in ("data", "context", "tensor"))
        # Parameters, gradients and optimizer state are sharded over data and context alike.
        self._shards = init_device_mesh(
            device_type, (num_replicas * context, tensor), mesh_dim_names=("shard", "tensor")
        )

    @cached_property
    def num_shards(self) -> int:
        """Ranks over which FSDP2 shards parameters and averages gradients."""
        return self._shards["shard"].size()

    @cached_property
    def replicas(self) -> Replicas:
        """The division of a batch among the ranks."""
        return Replicas(
            sizes=(self.data.size(), self.context.size(), self.tensor.size()),
            rank=self.data.get_local_rank(),
            size=self.data.size(),
            sequence_divisor=self.sequence_divisor,
            sum=self.sum_over_replicas,
        )

    @property
    def sequences_rank(self) -> int:
        """Index of this rank among those that see other sequences, or other parts of them."""
        return self.data.get_local_rank() * self.context.size() + self.context.get_local_rank()

    @property
    def sequence_divisor(self) -> int:
        """Divisor of the length of a sequence, so that its shares are equal."""
        divisor = 1 if self.context.size() == 1 else 2 * self.context.size()
        return divisor * (self.tensor.size() if self._splits_sequences else 1)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the ranks that see other sequences."""
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.data.get_group())
        return total

    def shard(self, model: torch.nn.Module, settings: Model) -> None:
        """Split a whole model over the tensor ranks, then shard each layer, and the rest, over the others.

        It computes in the precision of its `settings` and reduces gradients in float32. Host memory holds the unsharded
        layers between forward and backward pass, while GPU memory gathers them again. A single rank that computes in
        the precision of the parameters has nothing to shard, gather or cast. Raises `ConfigError` if the model cannot
        be split.
        """
        device_type, dtype = self._shards.device_type, getattr(torch, settings.precision)
        offloads = settings.dtensor_cfg.cpu_offload or settings.fsdp_offload_enabled
        if self.tensor.size() > 1:
            tensor_plans.cut(
                model,
                self._shards["tensor"],
                sequence_parallel=settings.dtensor_cfg.sequence_parallel,
                custom_plan=settings.dtensor_cfg.custom_parallel_plan,
                adapts=settings.adapters is not None,
            )
        elif self.num_shards == 1 and not offloads and all(each.dtype == dtype for each in model.parameters()):
            model.to(device_type)
            return
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        # Engines read the parameters' memory, and shared memory is not pinned.
        offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
        gather_again = device_type != "cpu"
        mesh = self._shards["shard"]
        for part in (*decoder_layers(model), model):
            # The rest is needed by the output layer, so by the end of one pass and the start of the next.
            reshards = gather_again and part is not model
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshards)
