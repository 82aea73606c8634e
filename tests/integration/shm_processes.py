"""The other process in tests of shared memory: a trainer rank that shares its shards, or an engine that reads them.

Run as a script: ``writer RANK NUM_RANKS`` or ``reader``. Orders are lines on standard input, replies JSON lines.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import torch

from tandem.refit import layout, planner
from tandem.refit.layout import Box, Layout, Piece, PrivateMemory, Storage, TensorLayout, contiguous_strides, whole
from tandem.refit.transports import shm

SHAPES = {"q": (8, 6), "k": (4, 6), "norm": (6,), "embed": (64, 6)}
FUSED = ("q", "k")
"""Both lie in one storage of the engine."""


def values_of(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, float32; no two elements are equal."""
    tensors, first = {}, 1000.0 * version
    for name, shape in SHAPES.items():
        num = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(first, first + num).reshape(shape) / 7
        first += num
    return tensors


def shard_of(name: str, rank: int, num_ranks: int) -> Box:
    """Return the rows that a rank holds."""
    rows, *columns = SHAPES[name]
    start, stop = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
    return Box((start,) + (0,) * len(columns), (stop - start, *columns))


def engine_layout(dtype: str) -> Layout:
    """Return what an engine wants: everything, ``q`` and ``k`` in one storage."""
    item_size = layout.ITEM_SIZES[dtype]
    tensors, num_bytes = {}, {}
    for name, shape in SHAPES.items():
        storage = "qk" if name in FUSED else name
        offset = num_bytes.get(storage, 0)
        piece = Piece(whole(shape), storage, offset, contiguous_strides(shape, item_size))
        tensors[name] = TensorLayout(shape, dtype, (piece,))
        num_bytes[storage] = offset + int(torch.Size(shape).numel()) * item_size
    return Layout("host", tensors, {name: Storage(n, PrivateMemory()) for name, n in num_bytes.items()})


def engine_parameters(dtype: str) -> dict[str, torch.Tensor]:
    """Return the storages that `engine_layout` describes, not written yet."""
    item_size = layout.ITEM_SIZES[dtype]
    storages = engine_layout(dtype).storages
    return {n: torch.full((s.num_bytes // item_size,), -1.0, dtype=getattr(torch, dtype)) for n, s in storages.items()}


def _share(rank: int, num_ranks: int) -> tuple[Layout, dict[str, torch.Tensor]]:
    shards: dict[str, torch.Tensor] = {}
    tensors, storages = {}, {}
    for name, shape in SHAPES.items():
        box = shard_of(name, rank, num_ranks)
        padded = torch.zeros(3 + box.num_elements)  # the shard does not lie at the start of its storage
        shards[name] = padded[3:].view(box.shape)
        address = shm.share(shards[name])
        assert shm.share(padded) == address, "sharing twice changes nothing"
        piece = Piece(box, name, 12, contiguous_strides(box.shape, 4))
        tensors[name] = TensorLayout(shape, "float32", (piece,))
        storages[name] = Storage(padded.nbytes, address)
    return Layout("host", tensors, storages), shards


def _reply(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def write(rank: int, num_ranks: int) -> None:
    """Share shards of version 0; each order is a version to write in place."""
    held, shards = _share(rank, num_ranks)
    version = 0
    while True:
        for name, shard in shards.items():
            box = shard_of(name, rank, num_ranks)
            shard.copy_(values_of(version)[name][box.start[0] : box.stop[0]])
        _reply(held)
        order = sys.stdin.readline()
        if not order:
            return
        version = int(order)


def read() -> None:
    """Bind to the layout in the first order and run for every later one; ``scribble`` writes to what is aliased."""
    source = msgspec.json.decode(sys.stdin.readline(), type=Layout)
    parameters = engine_parameters("float32")
    planned = planner.plan({"trainer-0": source}, {"rollout-0": engine_layout("float32")}, allow_alias=True)
    bound = shm.bind(planned.programs["rollout-0"], parameters)
    while True:
        bound.run()
        _reply({name: parameter.double().sum().item() for name, parameter in parameters.items()})
        order = sys.stdin.readline()
        if not order:
            return
        if order.strip() == "scribble":
            parameters["embed"].zero_()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "writer":
        write(int(sys.argv[2]), int(sys.argv[3]))
    else:
        read()
