"""CPU kernels, with few passes over memory, for operations that Megatron-Core fuses on a GPU.

Autograd's own formulas read and write whole tensors at each of their steps, and copy a tensor to split or join it. On a
CPU core, this takes most of the time outside of matrix products and attention. Each function here computes the plain
formula with its gradients, in the place of a GPU kernel of Megatron-Core.

Shapes: ``N`` tokens of a row, ``H`` heads, ``D`` elements of a head; ``C`` channels of a norm; ``F`` of a feed-forward
layer; ``P`` positions.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_BLOCK = 2**18
"""Elements of a tensor that stay in a core's cache between operations, beside those of another tensor."""


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight_C * x / sqrt(mean(x**2) + eps)``, the mean over the last dimension of any number of them.

    RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4), computed in the type of `x`.
    """
    normed: torch.Tensor = _RmsNorm.apply(x, weight_C, eps)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_C, scale)
        return (x * scale).mul_(weight_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With r for the scale and g for the gradient: r (g w - x r^2 mean(g w x)), and the sum of g x r over all rows.
        x, weight_C, scale = ctx.saved_tensors
        product = torch.mul(grads[0], x, out=torch.empty(x.shape, dtype=x.dtype))
        product_NC = product.view(-1, x.shape[-1])
        mean = torch.mv(product_NC, weight_C).view(scale.shape).mul_(scale.square()).div_(x.shape[-1])
        product.mul_(scale)
        grad_weight_C = product_NC.sum(dim=0)
        grad_x = torch.mul(grads[0], weight_C, out=product).addcmul_(x, mean, value=-1.0).mul_(scale)
        return grad_x, grad_weight_C, None


class SwiGlu(torch.nn.Module):
    """``silu(gate) * up`` of the halves of a linear layer's output (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``[..., F]`` of ``[..., 2 * F]``."""
        gated: torch.Tensor = _SwiGlu.apply(gate_up.contiguous())  # type: ignore[no-untyped-call]
        return gated


class _SwiGlu(torch.autograd.Function):
    """The function in blocks of tokens. The gradients of gate and up are written side by side, in place."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gated = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        activated = torch.empty_like(gated)
        for gate_up_NF, activated_NF, gated_NF in _blocks(gate_up, activated, gated):
            gate_NF, up_NF = gate_up_NF.chunk(2, dim=1)
            torch.ops.aten.silu.out(gate_NF, out=activated_NF)
            torch.mul(activated_NF, up_NF, out=gated_NF)
        ctx.save_for_backward(gate_up, activated)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gate_up, activated = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        for gate_up_NF, activated_NF, grad_gate_up_NF, grad_NF in _blocks(gate_up, activated, grad_gate_up, grads[0]):
            gate_NF, up_NF = gate_up_NF.chunk(2, dim=1)
            grad_gate_NF, grad_up_NF = grad_gate_up_NF.chunk(2, dim=1)
            torch.mul(grad_NF, activated_NF, out=grad_up_NF)
            torch.mul(grad_NF, up_NF, out=grad_gate_NF)
            torch.ops.aten.silu_backward.grad_input(grad_gate_NF, gate_NF, grad_input=grad_gate_NF)
        return grad_gate_up


def _blocks(*tensors: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    """Yield the tensors' rows, by the last dimension, in blocks that stay in the cache."""
    num_rows = max(1, _BLOCK // max(1, tensors[0].shape[-1]))
    return zip(*(torch.split(tensor.reshape(-1, tensor.shape[-1]), num_rows) for tensor in tensors), strict=True)


def rotate(
    heads_NHD: torch.Tensor,
    bounds: torch.Tensor,
    angles_P11D: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return the heads of a packed row, rotated by their tokens' positions (RoPE; Su et al. 2021, arXiv:2104.09864).

    It has the arguments of Transformer Engine's ``fused_apply_rotary_pos_emb_thd``.

    Args:
        heads_NHD: heads of queries or keys of this rank's tokens.
        bounds: starts and ends of the row's sequences, over all context-parallel ranks.
        angles_P11D: angles of each position for both halves of a head, or of its rotated part.
        cp_size: context-parallel ranks. Each has two chunks of each sequence.
        cp_rank: rank of this process among them.
        interleaved: whether pairs are neighbours, which no configuration can ask for.
    """
    assert not interleaved
    cosine_N1D, sine_N1D = _of_row(bounds, angles_P11D, cp_size, cp_rank, heads_NHD.dtype)
    num_rotated = angles_P11D.shape[-1]
    rotated: torch.Tensor = _Rotation.apply(  # type: ignore[no-untyped-call]
        heads_NHD[..., :num_rotated], cosine_N1D, sine_N1D
    )
    if num_rotated == heads_NHD.shape[-1]:
        return rotated
    return torch.cat((rotated, heads_NHD[..., num_rotated:]), dim=-1)


@functools.lru_cache(maxsize=1)  # every layer asks for the same row's queries and keys
def _of_row(
    bounds: torch.Tensor, angles_P11D: torch.Tensor, cp_size: int, cp_rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of this rank's tokens; the sines of first halves are negative."""
    slices = []
    for start, end in itertools.pairwise(bounds.tolist()):
        chunk = (end - start) // (2 * cp_size)
        firsts = (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk)
        slices += [slice(first, first + chunk) for first in firsts] if cp_size > 1 else [slice(end - start)]
    cosine_P1D, sine_P1D = angles_P11D[:, 0].cos(), angles_P11D[:, 0].sin()
    sine_P1D[..., : sine_P1D.shape[-1] // 2].neg_()
    cosine_N1D, sine_N1D = (torch.cat([of_P1D[part] for part in slices]) for of_P1D in (cosine_P1D, sine_P1D))
    return cosine_N1D.to(dtype), sine_N1D.to(dtype)


class _Rotation(torch.autograd.Function):
    """A rotation, with a gradient that is rotated back."""

    @staticmethod
    def forward(ctx: Any, x_NHD: torch.Tensor, cosine_N1D: torch.Tensor, sine_N1D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine_N1D, sine_N1D)
        return _swapped(x_NHD).mul_(sine_N1D).addcmul_(x_NHD, cosine_N1D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine_N1D, sine_N1D = ctx.saved_tensors
        grad_NHD = grads[0]
        return _swapped(grad_NHD).mul_(_swapped(sine_N1D)).addcmul_(grad_NHD, cosine_N1D), None, None


def _swapped(x_NHD: torch.Tensor) -> torch.Tensor:
    """Return the second halves of heads before the first ones."""
    first_NHD, second_NHD = x_NHD.chunk(2, dim=-1)
    return torch.cat((second_NHD, first_NHD), dim=-1)
