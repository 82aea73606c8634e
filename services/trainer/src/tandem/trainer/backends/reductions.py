"""Sums over the ranks of the DTensor backend in an optimizer step: losses, the norm of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sum_over(group: dist.ProcessGroup, device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Add a float64 tensor over the ranks of a group, which compute on this kind of device."""
    total = values.detach().clone().to(device)
    dist.all_reduce(total, group=group)
    return total


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all elements of tensors on one mesh of all ranks, as a float64 scalar.

    Collective. Ranks exchange one number, whereas torch would reduce over one axis of the mesh after the other.
    """
    total, is_shared = torch.zeros((), dtype=torch.float64), False
    for tensor in tensors:
        local, num_holders = tensor, 1
        if isinstance(tensor, DTensor):
            is_shared = True
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            local, num_holders = tensor.to_local(), math.prod(size for each, size in sizes if each.is_replicate())
        square = torch.linalg.vector_norm(local.detach(), dtype=torch.float64).square()
        total = total.to(square.device) + square / num_holders
    if is_shared:
        dist.all_reduce(total)
    return total.sqrt()


def scale_down(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale tensors of this norm to `max_norm` in place, if it is larger: `torch.nn.utils.clip_grads_with_norm_`.

    Each rank scales its own parts. Of whole tensors torch would first find out, one by one, how ranks share the
    multiplication, which takes a first step tenths of a second a tensor where a mesh has several axes.
    """
    if tensors:  # torch multiplies no empty list
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        torch._foreach_mul_(own, factor)
