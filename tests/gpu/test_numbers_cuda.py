"""Kernels of torch that only a GPU has: attention of packed rows in bfloat16, and quantisation to float8."""

from __future__ import annotations

import pytest
import torch

from tandem.common.attention.segments import attend
from tandem.refit.installing import quantise
from tests.harness.attention_formula import SEGMENTS, formula
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(IS_RUNNING, reason="a simulated GPU lacks these kernels"),
]

WIDTH = 64
"""The head dimension."""
TOLERANCE = 2**-6
"""Of values near 1 with bfloat16's 8 bits, rounded at the ends and within."""


def drawn(segments: list[tuple[int, int]], num_key_heads: int) -> list[torch.Tensor]:
    """Return queries, keys and values that bfloat16 holds, in float32; scores with the formula's scale are moderate."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = (sum(pair[index] for pair in segments) for index in (0, 1))
    shapes = [(num_queries, 4, WIDTH), *[(num_keys, num_key_heads, WIDTH)] * 2]
    return [torch.randn(shape, generator=generator).mul(0.5).bfloat16().float().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_packed_rows_attend_as_the_formula_says(
    segments: list[tuple[int, int]], num_key_heads: int, window: int | None
) -> None:
    inputs = drawn(segments, num_key_heads)
    expected_LHD = formula(*inputs, segments, window)
    weights_LHD = torch.randn(expected_LHD.shape, generator=torch.Generator().manual_seed(1)) / len(expected_LHD) ** 0.5
    expected = [expected_LHD, *torch.autograd.grad((expected_LHD * weights_LHD).sum(), inputs)]
    there = [tensor.detach().cuda().bfloat16().requires_grad_() for tensor in inputs]
    found_LHD = attend(*there, segments, 0.3, window)
    found = [found_LHD, *torch.autograd.grad((found_LHD * weights_LHD.cuda()).sum(), there)]
    for own, meant in zip(found, expected, strict=True):
        scale = max(1.0, float(meant.detach().abs().max()))
        torch.testing.assert_close(own.float().cpu(), meant, rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize("shape", [(256, 384), (130, 257), (3, 200, 128)])
def test_blocks_in_float8_have_the_bits_of_a_cpu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    x.view(-1)[:128] = 0.0
    for here, there in zip(
        quantise(x, (128, 128), torch.float8_e4m3fn), quantise(x.cuda(), (128, 128), torch.float8_e4m3fn), strict=True
    ):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
