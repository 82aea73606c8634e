"""Kernels for Megatron-Core on the CPU, against the plain formulas and autograd: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from tandem.trainer.backends.megatron import preparing
from tandem.trainer.backends.megatron.on_cpu import kernels
from tandem.trainer.context import tokens_of_share

Formula = Callable[..., torch.Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(found: Formula, expected: Formula, inputs: Sequence[torch.Tensor], **tolerance: float) -> None:
    """Compare the values, and the gradients of an uneven sum of them, of two functions of the same inputs."""
    results = []
    for formula in (found, expected):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]  # which keeps strides
        value = formula(*leaves)
        grad = random(*value.shape, seed=99, dtype=value.dtype)
        results.append([value, *torch.autograd.grad(value, leaves, grad)])
    for tensor, other in zip(*results, strict=True):
        torch.testing.assert_close(tensor, other, **(tolerance or {"rtol": 2e-6, "atol": 2e-6}))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(50, 1, 48), (7, 3, 16), (1, 1, 1), (0, 1, 8)])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    def plain(x: torch.Tensor, weight_C: torch.Tensor) -> torch.Tensor:
        return weight_C * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))

    inputs = random(*shape), 1 + 0.1 * random(shape[-1], seed=1)
    assert_same(lambda x, weight_C: kernels.rms_norm(x, weight_C, eps), plain, inputs)


def test_rms_norm_of_a_part_of_a_tensor_and_of_zeros() -> None:
    """Keys lie between queries and values; a row of zeros has a norm, and no infinite gradient."""
    part = random(20, 2, 5, 16)[:, :, 3]
    assert not part.is_contiguous()
    part[4] = 0.0
    weight_C = 1 + 0.1 * random(16, seed=1)
    assert_same(
        lambda x, weight: kernels.rms_norm(x, weight, 1e-6),
        lambda x, weight: F.rms_norm(x, (16,), weight, 1e-6),
        (part, weight_C),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rms_norm_is_as_exact_as_the_plain_formula_over_many_tokens() -> None:
    """The weight's gradient is a sum over all of them."""
    x, weight_C, grad = random(60_000, 8), random(8, seed=1), 1 + random(60_000, 8, seed=2)
    found = []
    for formula, dtype in ((kernels.rms_norm, torch.float32), (F.rms_norm, torch.float32), (F.rms_norm, torch.float64)):
        leaf = weight_C.to(dtype).requires_grad_()
        arguments = (x.to(dtype), leaf, 1e-6) if formula is kernels.rms_norm else (x.to(dtype), (8,), leaf, 1e-6)
        found.append(torch.autograd.grad(formula(*arguments), leaf, grad.to(dtype))[0].double())
    of_kernel, of_formula, exact = found
    assert (of_kernel - exact).norm() <= 2 * (of_formula - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 1, 12), (1000, 1, 700), (3, 4), (0, 6)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also of more tokens than are worked on at a time, and of none, as an expert may get."""

    def plain(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    assert kernels._BLOCK < 1000 * 700
    assert_same(kernels.SwiGlu(None), plain, [random(*shape, dtype=dtype)], rtol=0.0, atol=0.0)


def rotated_by_halves(x_NHD: torch.Tensor, angle_ND: torch.Tensor) -> torch.Tensor:
    """The formula of transformers' models."""
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * angle_ND.cos()[:, None] + torch.cat((-second, first), dim=-1) * angle_ND.sin()[:, None]


def angles_of(num_positions: int, size: int) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
    half = torch.outer(torch.arange(num_positions).float(), frequencies)
    return torch.cat((half, half), dim=-1)[:, None, None]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_rotation_by_the_positions_within_each_sequence(cp_size: int) -> None:
    lengths = [12, 24, 12, 36]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    angles_P11D = angles_of(max(lengths), 16)
    position_N = torch.cat([torch.arange(length) for length in lengths])
    whole_NHD = random(sum(lengths), 3, 16)
    for rank in range(cp_size):
        mine = slice(None) if cp_size == 1 else torch.from_numpy(tokens_of_share(lengths, rank, cp_size))
        angle_ND = angles_P11D[position_N[mine], 0, 0]
        assert_same(
            lambda x, rank=rank: kernels.rotate(x, bounds, angles_P11D, cp_size=cp_size, cp_rank=rank),
            lambda x, angle_ND=angle_ND: rotated_by_halves(x, angle_ND),
            [whole_NHD[mine]],
        )


def test_rows_and_types_are_not_mistaken_for_each_other() -> None:
    """Angles are kept from one layer to the next."""
    angles_P11D = angles_of(8, 4)
    for dtype in (torch.float32, torch.bfloat16):
        for lengths in ((8,), (3, 5)):
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            x_NHD = random(8, 2, 4, dtype=dtype)
            angle_ND = torch.cat([angles_P11D[:length, 0, 0] for length in lengths])
            for _ in range(2):
                rotated_NHD = kernels.rotate(x_NHD, bounds, angles_P11D)
                assert rotated_NHD.dtype == dtype
                expected_NHD = rotated_by_halves(x_NHD.float(), angle_ND)
                error = 2e-2 if dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(rotated_NHD.float(), expected_NHD, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up(dtype: torch.dtype) -> None:
    weight_VE = random(5, 7, dtype=dtype).requires_grad_()
    total_VE, expected_VE = torch.zeros(5, 7), torch.zeros(5, 7)
    for seed in range(3):
        input_NE, grad_NV = random(11, 7, seed=seed, dtype=dtype), random(11, 5, seed=seed + 10, dtype=dtype)
        preparing.add_weight_gradient(input_NE, grad_NV, total_VE)
        expected_VE += torch.autograd.grad(F.linear(input_NE, weight_VE), weight_VE, grad_NV)[0]
    torch.testing.assert_close(total_VE, expected_VE, rtol=2e-6, atol=2e-6)
