"""The ranks of the DTensor backend: their arrangement for a model, and its sharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tandem.config.schema import ModelConfig
from tandem.trainer.backend import ModelReplicas
from tandem.trainer.backends import tensor_plans
from tandem.trainer.backends.holding import sum_over
from tandem.trainer.models import decoder_layers


class RankMesh:
    """The ranks of the default process group as a mesh: data × context × tensor, with the last varying fastest.

    Data and context ranks shard parameters, in whole replicas if `dp_replicate_size` is more than 1. Ranks that share
    experts follow each other among them.
    """

    def __init__(self, sections: Sequence[ModelConfig], device: torch.device) -> None:
        """Arrange them for models of equal parallel sizes; `device` is this rank's. Collective."""
        self.device = device
        device_type = device.type
        settings = sections[0].dtensor_cfg
        self._splits_sequences = any(each.dtensor_cfg.sequence_parallel for each in sections)
        context, tensor = settings.context_parallel_size, settings.tensor_parallel_size
        num_replicas, remainder = divmod(dist.get_world_size(), settings.model_parallel_size)
        assert not remainder, "the configuration's checks require whole replicas"
        sizes = (num_replicas, context, tensor)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("data", "context", "tensor"))
        self.data, self.context, self.tensor = (mesh[name] for name in ("data", "context", "tensor"))
        # Parameters, gradients and optimizer state are sharded over data and context alike.
        copies, experts = settings.dp_replicate_size, settings.expert_parallel_size
        shards = num_replicas * context // copies
        axes, names = ((), ()) if copies == 1 else ((copies,), ("replicate",))
        self._over = names
        """Axes of meshes beside ``shard`` over which FSDP2 averages gradients."""
        self._shards = init_device_mesh(
            device_type, (*axes, shards, tensor), mesh_dim_names=(*names, "shard", "tensor")
        )
        self._of_experts: DeviceMesh | None = None
        if experts > 1:
            self._of_experts = init_device_mesh(
                device_type,
                (*axes, shards // experts, experts, tensor),
                mesh_dim_names=(*names, "shard", "expert", "tensor"),
            )

    @cached_property
    def num_shards(self) -> int:
        """Ranks over which FSDP2 shards parameters, replicas included, and averages gradients."""
        return self.data.size() * self.context.size()

    @cached_property
    def replicas(self) -> ModelReplicas:
        """The division of a batch among the ranks."""
        return ModelReplicas(
            sizes=(self.data.size(), self.context.size(), self.tensor.size()),
            rank=self.data.get_local_rank(),
            size=self.data.size(),
            sequence_divisor=self.sequence_divisor,
            sum=partial(sum_over, self.data.get_group(), self.device),
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

    def shard(self, model: torch.nn.Module, settings: ModelConfig) -> None:
        """Split a whole model over the tensor ranks, then shard each layer, and the rest, over the others.

        It computes in the precision of its `settings` and reduces gradients in float32. Host memory holds the unsharded
        layers between forward and backward pass, while GPU memory gathers them again, unless a single rank only casts
        them. A single rank that computes in the precision of the parameters has nothing to shard, gather or cast.
        Raises `ConfigError` if the model cannot be split.
        """
        device_type, dtype = self._shards.device_type, getattr(torch, settings.precision)
        offloads = settings.dtensor_cfg.cpu_offload or settings.fsdp_offload_enabled
        of_experts = None
        if self._of_experts is not None:
            from tandem.trainer.backends import experts  # models without experts need none of it

            splits_sequences = settings.dtensor_cfg.sequence_parallel and self.tensor.size() > 1
            of_experts = experts.SharedExperts(model, self._of_experts, splits_sequences=splits_sequences)
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
        gather_again = device_type != "cpu" and self.num_shards > 1
        mesh = self._shards[(*self._over, "shard")]
        if of_experts is not None:
            of_experts.shard(
                self._over, self.num_shards, policy, offload_policy=offload, reshard_after_forward=gather_again
            )
        for part in (*decoder_layers(model), model):
            # The rest is needed by the output layer, so by the end of one pass and the start of the next.
            reshards = gather_again and part is not model
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshards)

    def together(self, parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Return parameters in lists that one operation of torch can change: those of experts, and all others."""
        parts: list[list[torch.nn.Parameter]] = [[], []]
        for parameter in parameters:
            is_of_experts = self._of_experts is not None and "expert" in _axes(parameter)
            parts[is_of_experts].append(parameter)
        return [part for part in parts if part]


def _axes(parameter: torch.nn.Parameter) -> Sequence[str]:
    """Return the names of the axes of a sharded parameter's mesh."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
