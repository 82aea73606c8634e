"""The ranks of the DTensor backend: how they are arranged, and what of a model each holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tandem.common.config import Config
from tandem.trainer.backends import tensor_plans
from tandem.trainer.models import decoder_layers


class Ranks:
    """The ranks of the default process group as a mesh: data × context × tensor, the last varying fastest."""

    def __init__(self, config: Config, device_type: str) -> None:
        """Arrange them. Collective."""
        settings = config.policy.dtensor_cfg
        self._settings = settings
        self._offloads = settings.cpu_offload or config.policy.fsdp_offload_enabled
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

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP2 shards, and averages gradients."""
        return self._shards["shard"].size()

    @property
    def sequence_divisor(self) -> int:
        """What the length of a sequence must be a multiple of, so that its shares are equal."""
        divisor = 1 if self.context.size() == 1 else 2 * self.context.size()
        return divisor * (self.tensor.size() if self._settings.sequence_parallel else 1)

    def shard(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Cut a whole model over the tensor ranks, then shard each layer, and the rest, over the others.

        It computes in `dtype` and reduces gradients in float32. Host memory holds the unsharded layers between forward
        and backward pass; GPU memory gathers them again. A single rank that computes in the precision of the parameters
        has nothing to shard, to gather or to cast. Raises `ConfigError` where the model cannot be cut.
        """
        device_type = self._shards.device_type
        if self.tensor.size() > 1:
            tensor_plans.cut(
                model,
                self._shards["tensor"],
                sequence_parallel=self._settings.sequence_parallel,
                custom_plan=self._settings.custom_parallel_plan,
            )
        elif self.num_shards == 1 and not self._offloads and all(each.dtype == dtype for each in model.parameters()):
            model.to(device_type)
            return
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        # Engines read the parameters' memory, and what is shared with them is not pinned.
        offload = CPUOffloadPolicy(pin_memory=False) if self._offloads else OffloadPolicy()
        gather_again = device_type != "cpu"
        mesh = self._shards["shard"]
        for part in (*decoder_layers(model), model):
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=gather_again)
