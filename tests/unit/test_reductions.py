"""Gradients are scaled down as torch does it."""

from __future__ import annotations

import pytest
import torch

from tandem.trainer.backends.dtensor import norm_of, scale_down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_gradients_are_scaled_as_torch_scales_them(dtype: torch.dtype, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.zeros(rows, 7, dtype=dtype)) for rows in (5, 40, 1)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    ours = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    before = [each.clone() for each in ours]
    norm = norm_of(ours)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    scale_down(ours, norm, max_norm)
    assert all(torch.equal(each, parameter.grad) for each, parameter in zip(ours, parameters, strict=True))
    assert all(torch.equal(each, old) for each, old in zip(ours, before, strict=True)) == (max_norm > norm)


def test_no_gradients_are_left_as_they_are() -> None:
    scale_down([], norm_of([]), 1.0)
