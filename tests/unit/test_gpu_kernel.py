"""The Triton kernel on a CPU, in Triton's own interpreter: which element goes where, for every word it copies by."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tandem.refit.transports import gpu_copy
from tandem.refit.transports.gpu_copy import tiles

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself"),
]

SHAPES = [(1,), (7,), (33, 65), (3, 5, 102), (2000,), (12, 409)]


# To a smaller type the interpreter cuts bits off, where the kernel rounds: only tests/gpu can say that it does.
@pytest.mark.parametrize(
    ("to", "from_"),
    [
        (torch.int8, torch.int8),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.int64, torch.int64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_the_interpreted_kernel_copies_what_torch_copies(
    monkeypatch: pytest.MonkeyPatch, to: torch.dtype, from_: torch.dtype
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is defined
    from tandem.refit import gpu_kernels

    random = torch.Generator().manual_seed(0)
    destinations, sources = [], []
    for number, shape in enumerate(SHAPES):  # transposed, from an odd element on
        large = (100 * torch.randn(*shape[:-1], shape[-1] + number, generator=random)).to(from_)
        sources.append(large[..., number:])
        destinations.append(torch.zeros(shape[::-1], dtype=to).permute(*reversed(range(len(shape)))))
    tables = tiles(gpu_copy.lay_out(destinations, sources), to.itemsize, from_.itemsize, converts=to != from_)
    for word, table in tables.items():
        table_M8 = torch.from_numpy(gpu_copy.rows_of(table))
        gpu_kernels.copy_tiles[(len(table_M8),)](table_M8, *gpu_kernels.types(word, to, from_), BLOCK=256)
    for destination, source in zip(destinations, sources, strict=True):
        assert torch.equal(destination, source.to(to))
