"""An adapter of one's own, for an engine that keeps GPT-2 as linear layers of shape (out, in), cut over ranks.

GPT-2's checkpoints have them as (in, out), with queries, keys and values side by side. Each rank has the columns of its
heads from all three, one below the other, and its share of the feed-forward network.
"""

from __future__ import annotations

from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutBuilder, contiguous_strides, whole


def share(box: Box, dim: int, rank: int, size: int) -> Box:
    """Return the part of a box that one of `size` ranks has along a dimension."""
    start, shape = list(box.start), list(box.shape)
    shape[dim] //= size
    start[dim] += rank * shape[dim]
    return Box(tuple(start), tuple(shape))


def boxes_of(name: str, shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    """Return which boxes of a tensor a rank has, in the order in which it keeps them."""
    if ".c_attn." in name:
        return [share(share(whole(shape), -1, part, 3), -1, rank, size) for part in range(3)]
    if ".c_fc." in name:
        return [share(whole(shape), -1, rank, size)]
    if name.endswith("c_proj.weight"):
        return [share(whole(shape), 0, rank, size)]
    return [whole(shape)]


def layout(model: ModelShape, rank: int, size: int, host: str) -> Layout:
    """Return what a rank of the engine wants, and where: a storage for each tensor, of the same name."""
    builder = LayoutBuilder(host)
    builder.add_tensors(model.tensors)
    for index, tensor in enumerate(model.tensors):
        boxes, item_size = boxes_of(tensor.name, tensor.shape, rank, size), ITEM_SIZES[tensor.dtype]
        storage = builder.storage(tensor.name, sum(box.num_elements for box in boxes) * item_size)
        is_turned = ".c_" in tensor.name and len(tensor.shape) == 2
        offset = 0
        for box in boxes:
            shape = box.shape[::-1] if is_turned else box.shape
            strides = contiguous_strides(shape, item_size)
            builder.add(index, box, storage, offset, strides[::-1] if is_turned else strides)
            offset += box.num_elements * item_size
    return builder.build()
