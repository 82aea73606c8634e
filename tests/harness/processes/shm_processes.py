"""The other process in tests of shared memory: a trainer rank that shares its shards, or an engine that reads them.

`main` takes ``PATH writer RANK NUM_RANKS`` or ``PATH reader``. Orders and replies are lines over the socket at that
path.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from typing import IO

import msgspec
import torch

from tandem.refit import layout, planner
from tandem.refit.layout import Box, Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.transports import shm
from tandem.refit.weights import bind
from tests.harness.processes import wires
from tests.harness.processes.wires import TIMEOUT_S

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
    builder, item_size = LayoutBuilder("host"), layout.ITEM_SIZES[dtype]
    sizes = {name: int(torch.Size(shape).numel()) * item_size for name, shape in SHAPES.items()}
    fused = builder.storage("qk", sum(sizes[name] for name in FUSED))
    offset = 0
    for name, shape in SHAPES.items():
        storage = fused if name in FUSED else builder.storage(name, sizes[name])
        at = offset if name in FUSED else 0
        strides = contiguous_strides(shape, item_size)
        builder.add(builder.tensor(name, shape, dtype), whole(shape), storage, at, strides)
        offset += sizes[name] if name in FUSED else 0
    return builder.build()


def engine_parameters(dtype: str) -> dict[str, torch.Tensor]:
    """Return the storages that `engine_layout` describes, not written yet."""
    item_size = layout.ITEM_SIZES[dtype]
    storages = engine_layout(dtype).storages
    return {s.name: torch.full((s.num_bytes // item_size,), -1.0, dtype=getattr(torch, dtype)) for s in storages}


def _share(rank: int, num_ranks: int) -> tuple[Layout, dict[str, torch.Tensor]]:
    shards: dict[str, torch.Tensor] = {}
    builder = LayoutBuilder("host")
    for name, shape in SHAPES.items():
        box = shard_of(name, rank, num_ranks)
        padded = torch.zeros(3 + box.num_elements)  # the shard does not lie at the start of its storage
        shards[name] = padded[3:].view(box.shape)
        address = shm.share(shards[name])
        assert shm.share(padded) == address, "sharing twice changes nothing"
        storage = builder.storage(name, padded.nbytes, address)
        builder.add(builder.tensor(name, shape, "float32"), box, storage, 12, contiguous_strides(box.shape, 4))
    return builder.build(), shards


def _write(rank: int, num_ranks: int, wire: socket.socket, orders: IO[bytes]) -> None:
    """Share shards of version 0; each order is a version to write in place."""
    held, shards = _share(rank, num_ranks)
    version = 0
    while True:
        for name, shard in shards.items():
            box = shard_of(name, rank, num_ranks)
            shard.copy_(values_of(version)[name][box.start[0] : box.stop[0]])
        wire.sendall(layout.encode(held).hex().encode() + b"\n")
        command = orders.readline()
        if not command:
            return
        version = int(command)


def _read(wire: socket.socket, orders: IO[bytes]) -> None:
    """Bind to the layout in the first order and run for every later one; ``scribble`` writes to what is aliased."""
    source = layout.decode(bytes.fromhex(orders.readline().decode()))
    parameters = engine_parameters("float32")
    planned = planner.plan({"trainer-0": source}, {"rollout-0": engine_layout("float32")}, allow_alias=True)
    bound = bind(planned.programs["rollout-0"], parameters)
    while True:
        bound.run(TIMEOUT_S)
        sums = {name: parameter.double().sum().item() for name, parameter in parameters.items()}
        wire.sendall(msgspec.json.encode(sums) + b"\n")
        command = orders.readline()
        if not command:
            return
        if command.strip() == b"scribble":
            parameters["embed"].zero_()


def main(arguments: Sequence[str]) -> int:
    """Do what the test says until it closes the wire."""
    path, kind, *ranks = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one is meant to end by a signal
    torch.set_num_threads(1)
    with wires.connect(path, " ".join((kind, *ranks[:1]))) as wire, wire.makefile("rb") as orders:
        if kind == "writer":
            rank, num_ranks = map(int, ranks)
            _write(rank, num_ranks, wire, orders)
        else:
            _read(wire, orders)
    return 0
