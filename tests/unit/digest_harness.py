"""Members that hold parts of weights in memory of many shapes, for tests of digests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from tandem.refit.checks import check
from tandem.refit.layout import Box, Layout, LayoutBuilder, whole

Weights = dict[str, torch.Tensor]
Member = tuple[Layout, Weights]
"""A layout and its storages by name."""


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bits, so that every one of them counts: negative, subnormal, infinite and NaN elements too."""
    item_size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, item_size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def part(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values[box.region]


def boxes_between(cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Return the boxes of a grid, given where it is cut along each dimension, ends included."""
    spans = [[(a, b - a) for a, b in itertools.pairwise(edges)] for edges in cuts]
    return [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*spans)]


def hold(weights: Weights, boxes: Mapping[str, Sequence[Box]] | None = None, *, margin: int = 0) -> Member:
    """Hold copies of some boxes of some tensors (default: all, whole), each in a storage of its own.

    With a `margin` that many elements lie around each along every dimension, and dimensions lie in reverse order.
    """
    builder, storages = LayoutBuilder("host"), {}
    chosen = {name: [whole(values.shape)] for name, values in weights.items()} if boxes is None else boxes
    for name, values in weights.items():
        tensor = builder.tensor(name, values.shape, str(values.dtype).removeprefix("torch."))
        for number, box in enumerate(chosen.get(name, ())):
            command = tuple(reversed(range(len(box.shape)))) if margin else tuple(range(len(box.shape)))
            around = torch.zeros([box.shape[dim] + 2 * margin for dim in command], dtype=values.dtype)
            inner = around.permute(command)
            for dim, n in enumerate(box.shape):
                inner = inner.narrow(dim, margin, n)
            inner.copy_(part(values, box))
            storage = f"{name} {number}"
            storages[storage] = around
            item_size = values.element_size()
            strides = [stride * item_size for stride in inner.stride()]
            at = builder.storage(storage, around.nbytes)
            builder.add(tensor, box, at, int(inner.storage_offset()) * item_size, strides)
    layout = builder.build()
    check(layout, "test")
    return layout, storages


def even(values: torch.Tensor, dim: int, rank: int, ranks: int) -> Box:
    """Return a rank's box of a tensor that is cut evenly along one dimension."""
    start, shape = [0] * values.dim(), list(values.shape)
    shape[dim] //= ranks
    start[dim] = rank * shape[dim]
    return Box(tuple(start), tuple(shape))
