"""Expert parallelism: ranks that train on different sequences share the experts of each layer.

Transformers has the experts of a layer in parameters whose first dimension counts them. Each rank of an expert group
keeps equally many whole experts, and FSDP2 shards these over the ranks of the other groups. Tokens travel: a rank sends
a copy of each token to the ranks of its chosen experts, and gets back what these compute (GShard, Lepikhin et al. 2020,
arXiv:2006.16668). All else is sharded over all ranks, as without it.

Shapes: ``N`` tokens of this rank, ``K`` experts per token, ``S = N * K`` copies that it sends, ``R`` copies that it
receives, ``E`` experts of the layer, ``H`` hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard

from tandem.common.errors import ConfigError
from tandem.trainer.backends.tensor_plans import PlainStyle

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
        PlainStyle((Shard(0), Shard(0)), of_tensor)._apply(module, mesh)
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
