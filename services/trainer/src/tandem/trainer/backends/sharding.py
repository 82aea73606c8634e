"""The ranks of the DTensor backend: their arrangement for a model, and its sharding, experts included.

Expert parallelism: Transformers has the experts of a layer in parameters whose first dimension counts them. Each rank
of an expert group keeps equally many whole experts, and FSDP2 shards these over the ranks of the other groups. Tokens
travel: a rank sends a copy of each token to the ranks of its chosen experts, and gets back what these compute (GShard,
Lepikhin et al. 2020, arXiv:2006.16668). All else is sharded over all ranks, as without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tandem.common.errors import ConfigError
from tandem.config.schema import ModelConfig
from tandem.trainer import backend, models
from tandem.trainer.backends import holding, tensor_plans


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
    def replicas(self) -> backend.ModelReplicas:
        """The division of a batch among the ranks."""
        return backend.ModelReplicas(
            sizes=(self.data.size(), self.context.size(), self.tensor.size()),
            rank=self.data.get_local_rank(),
            size=self.data.size(),
            sequence_divisor=self.sequence_divisor,
            sum=partial(holding.sum_over, self.data.get_group(), self.device),
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
            splits_sequences = settings.dtensor_cfg.sequence_parallel and self.tensor.size() > 1
            of_experts = SharedExperts(model, self._of_experts, splits_sequences=splits_sequences)
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
        for part in (*models.decoder_layers(model), model):
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


_KEY = "dtensor_cfg.expert_parallel_size"


class SharedExperts:
    """The modules of a whole model whose experts ranks share."""

    def __init__(self, model: torch.nn.Module, mesh: DeviceMesh, *, splits_sequences: bool) -> None:
        """Share them out (`share_out`) over the axes ``expert`` and ``tensor`` of a mesh. Raises `ConfigError`."""
        self._mesh = mesh
        self._modules = share_out(model, mesh["expert", "tensor"], splits_sequences=splits_sequences)

    def shard(self, over: Sequence[str], num_shards: int, policy: MixedPrecisionPolicy, **settings: Any) -> None:
        """Shard experts over the ranks that have the same ones.

        `over` are the axes beside ``shard``, `num_shards` the ranks from whose tokens gradients come.
        """
        # Gates keep the precision that they have without it.
        policy = dataclasses.replace(policy, cast_forward_inputs=False)
        for module in self._modules:
            sharded = fully_shard(module, mesh=self._mesh[(*over, "shard")], mp_policy=policy, **settings)
            # Gradients of experts come from the tokens of all ranks, and are added up over fewer.
            sharded.set_gradient_divide_factor(num_shards)
            if self._mesh["shard"].size() > 1:  # torch would divide twice for one rank
                sharded.set_force_sum_reduction_for_comms(True)


def share_out(model: torch.nn.Module, mesh: DeviceMesh, *, splits_sequences: bool = False) -> list[torch.nn.Module]:
    """Keep only this rank's experts of a whole model, in place, and return the modules that have them.

    Raises `ConfigError` if the model has no experts, or they do not divide evenly.

    Args:
        model: to be cut over tensor-parallel ranks, and sharded, afterwards.
        mesh: the ranks that share experts × those of tensor parallelism. The former have tokens of their own, and all
            must run each layer equally often.
        splits_sequences: whether tensor-parallel ranks have tokens of their own too; otherwise all have the same.

    """
    expert_modules = [module for name, module in model.named_modules() if _has_experts(name, module)]
    size, group = mesh.size(0), mesh.get_group(0)
    of_tensor = (Replicate(), Partial() if splits_sequences else Replicate())
    if not expert_modules:
        raise ConfigError(f"{_KEY}: {size}, but {type(model).__name__} has no experts in one parameter for each layer")
    for module in expert_modules:
        if module.num_experts % size:
            raise ConfigError(f"{_KEY}: {size} does not divide {module.num_experts} experts")
        tensor_plans.PlainStyle((Shard(0), Shard(0)), of_tensor)._apply(module, mesh)
        module.num_experts //= size
        module.forward = functools.partial(_dispatch, module.forward, module.num_experts, group)
    return expert_modules


def _has_experts(name: str, module: Any) -> bool:
    """Tell whether all of a module's own parameters count experts in their first dimension."""
    parameters = list(module.parameters(recurse=False))
    num = getattr(module, "num_experts", None)
    return (
        name.endswith(".experts")
        and bool(parameters)
        and all(each.dim() > 1 and len(each) == num for each in parameters)
    )


def _dispatch(
    compute: Callable[..., torch.Tensor],
    num_experts: int,
    group: dist.ProcessGroup,
    hidden_NH: torch.Tensor,
    experts_NK: torch.Tensor,
    gates_NK: torch.Tensor,
) -> torch.Tensor:
    """Return what a token's experts compute, weighted by its gates and added up, wherever they are.

    Args:
        compute: the forward pass of this rank's experts, by their numbers on this rank.
        num_experts: number of these.
        group: the ranks that share the experts, in the order of the experts.
        hidden_NH: the hidden states of this rank's tokens.
        experts_NK: the experts of each token, by their numbers in the layer.
        gates_NK: the weights of these experts.

    """
    size, num_chosen = dist.get_world_size(group), experts_NK.shape[1]
    experts_S = experts_NK.flatten()
    order_S = experts_S.argsort(stable=True)
    received_E, (sent, received) = _counts(experts_S, num_experts, group)
    copies_RH = _exchange(hidden_NH[order_S // num_chosen], sent, received, group)
    own_E = torch.arange(num_experts, device=hidden_NH.device).repeat(size)
    results_RH = _compute(compute, copies_RH, own_E.repeat_interleave(received_E, output_size=len(copies_RH)))
    results_SH = _exchange(results_RH, received, sent, group)[order_S.argsort()]
    weighted_SH = results_SH * gates_NK.reshape(-1, 1)
    return weighted_SH.view(*experts_NK.shape, hidden_NH.shape[1]).sum(dim=1).to(hidden_NH.dtype)


def _counts(
    experts_S: torch.Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the copies from each rank for each of this rank's experts; and the sums for, and from, each rank."""
    size = dist.get_world_size(group)
    sent_E = torch.bincount(experts_S, minlength=size * num_experts)
    received_E = torch.empty_like(sent_E)
    dist.all_to_all_single(received_E, sent_E, group=group)
    sums: list[list[int]] = torch.stack([sent_E, received_E]).view(2, size, num_experts).sum(-1).tolist()
    return received_E, sums


def _compute(compute: Callable[..., torch.Tensor], copies_RH: torch.Tensor, experts_R: torch.Tensor) -> torch.Tensor:
    """Run this rank's experts, on a token of zeros if there is none, so that their gradients are never missing."""
    num = len(copies_RH)
    if not num:
        copies_RH = torch.cat([copies_RH, copies_RH.new_zeros(1, copies_RH.shape[1])])
        experts_R = experts_R.new_zeros(1)
    return compute(copies_RH, experts_R[:, None], copies_RH.new_ones(len(copies_RH), 1))[:num]


def _exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first rows to the first rank of a group, the next to the next; return those received, in that order.

    Gradients go the other way. `sent` and `received` count the rows for and from each rank.
    """
    exchanged: torch.Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received_rows = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(received_rows, rows.contiguous(), list(received), list(sent), group=group)
    return received_rows
