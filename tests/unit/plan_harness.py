"""Layouts over real bytes, and an interpreter that runs transfer programs on them as transports would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tandem.refit import program as programs
from tandem.refit.layout import (
    DTYPES,
    ITEM_SIZES,
    Address,
    Box,
    CudaMemory,
    Layout,
    LayoutBuilder,
    PrivateMemory,
    SharedMemory,
    contiguous_strides,
    whole,
)
from tandem.refit.planner import TransferPlan
from tandem.refit.program import Quantisation, QuantizedDestinations, TransferProgram
from tandem.refit.transfer import LinkTransfer

Bytes = NDArray[np.uint8]
Memory = dict[str, Bytes]
"""The storages of one process."""
Values = dict[str, NDArray[np.float64]]

SHARED = SharedMemory(pid=1, fd=3, inode=5)
PRIVATE = PrivateMemory()
CUDA = CudaMemory(pid=1, device="GPU-0", handle=b"handle", offset=0)
ADDRESSES: tuple[Address, ...] = (SHARED, PRIVATE, CUDA)
UNTOUCHED = 0xA5
NUMPY = {"float8_e4m3fn": "int8", "bfloat16": "float16"}
"""Types of the same size where numpy has none of the name."""


def view(
    memory: Bytes, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> NDArray[np.generic]:
    """Return elements in memory; numpy refuses what reaches outside."""
    return np.ndarray(shape, np.dtype(NUMPY.get(dtype, dtype)), memory.data, offset, strides)


def fresh(layout: Layout) -> Memory:
    return {storage.name: np.full(storage.num_bytes, UNTOUCHED, np.uint8) for storage in layout.storages}


def places(layout: Layout, memory: Memory) -> list[tuple[str, Box, NDArray[np.generic]]]:
    """Return the elements of every piece, by tensor and box."""
    found = []
    for row in range(len(layout.pieces)):
        tensor, piece = layout.tensors[layout.pieces.tensor_P[row]], layout.piece(row)
        place = view(memory[piece.parameter], tensor.dtype, piece.box.shape, piece.offset, piece.strides)
        found.append((tensor.name, piece.box, place))
    return found


def fill(layout: Layout, values: Values) -> Memory:
    memory = fresh(layout)
    for name, box, place in places(layout, memory):
        place[...] = part(values[name], box).astype(place.dtype)
    return memory


def part(values: NDArray[np.float64], box: Box) -> NDArray[np.float64]:
    return values[box.region]


def number(shapes: Mapping[str, tuple[int, ...]]) -> Values:
    """Number all elements, so that none can be mistaken for another; small enough for every type used here."""
    numbers = itertools.count(1)
    return {
        name: np.array([next(numbers) for _ in range(math.prod(shape))], np.float64).reshape(shape)
        for name, shape in shapes.items()
    }


def run(
    plan: TransferPlan, sources: Mapping[str, Layout], engines: Mapping[str, Layout], values: Values
) -> dict[str, Memory]:
    """Run a whole plan, each program as it comes off the wire; return the memory of every engine.

    Checks what transports rely on: that both ends of a stream have the same transfer, that they are in one mesh, that
    bytes on links are as planned, and that nothing is written twice.
    """
    memories = {member: fill(layout, values) for member, layout in sources.items()}
    wire = {member: programs.decode(programs.encode(program)) for member, program in plan.programs.items()}
    assert wire == plan.programs
    assert set(wire) == {*sources, *engines}
    for engine, layout in engines.items():
        memories[engine] = fresh(layout)
        for staging in wire[engine].staging:
            memories[engine][staging.name] = np.full(staging.num_bytes, UNTOUCHED, np.uint8)
    written = {engine: {name: np.zeros(len(m), np.int64) for name, m in memories[engine].items()} for engine in engines}
    counted: dict[tuple[str, str, str, int], int] = {}
    for round_ in (0, 1):
        for engine in engines:
            for transfer in wire[engine].receives:
                if transfer.round == round_:
                    _check_ends(transfer, wire)
                    link = transfer.source, engine, transfer.transport, round_
                    assert link not in counted
                    counted[link] = _receive(transfer, memories, written[engine])
    assert counted == {(k.source, k.destination, k.transport, k.round): k.num_bytes for k in plan.links}
    for engine in engines:
        for quantisation in wire[engine].quantisations:
            _quantise(quantisation, memories[engine])
        assert all((counts <= 1).all() for counts in written[engine].values()), "each byte is written once"
    return {engine: memories[engine] for engine in engines}


def _check_ends(transfer: LinkTransfer, wire: Mapping[str, TransferProgram]) -> None:
    assert transfer.round == 0 or transfer.transport == "stream"
    if transfer.transport != "stream":
        assert transfer.transfer_group == ""
        return
    assert transfer in wire[transfer.source].sends
    for member in (transfer.source, transfer.destination):
        (transfer_group,) = (
            transfer_group
            for transfer_group in wire[member].transfer_groups
            if transfer_group.name == transfer.transfer_group
        )
        assert {transfer.source, transfer.destination} <= set(transfer_group.members)


def _receive(transfer: LinkTransfer, memories: dict[str, Memory], written: dict[str, NDArray[np.int64]]) -> int:
    """Carry out one transfer; return the bytes on the link."""
    num_bytes, at = 0, transfer.copies
    destination = memories[transfer.destination]
    for row in range(len(at)):
        there, here = transfer.dtypes(row)
        storage = transfer.source_storages[at.source_C[row]]
        name = transfer.destination_storages[at.destination_C[row]]
        memory = memories[transfer.source][storage.name]
        assert storage.num_bytes == len(memory)
        assert transfer.tensors[at.tensor_C[row]]
        shape = tuple(at.shape_CD[row].tolist())
        if transfer.transport == "alias":
            assert there == here
            offset = int(at.source_offset_C[row])
            destination[name] = memory[offset : offset + math.prod(shape) * ITEM_SIZES[here]]
            continue
        strides = tuple(at.destination_strides_CD[row].tolist())
        read = view(memory, there, shape, int(at.source_offset_C[row]), tuple(at.source_strides_CD[row].tolist()))
        target = view(destination[name], here, shape, int(at.destination_offset_C[row]), strides)
        target[...] = read.astype(target.dtype)
        counts = np.zeros(len(destination[name]), np.uint8)
        ones = view(counts, here, shape, int(at.destination_offset_C[row]), strides)
        ones[...] = np.full(1, 255, np.uint8).repeat(ones.itemsize).view(ones.dtype)[0]
        written[name] += counts != 0
        num_bytes += math.prod(shape) * min(ITEM_SIZES[there], ITEM_SIZES[here])
    assert transfer.num_bytes == num_bytes
    return num_bytes


def quantised(values: NDArray[np.float64], block: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values and scales of a whole tensor: integers up to 100, so that a wrong block shows."""
    block = (1,) * (values.ndim - len(block)) + block
    scales = np.zeros([-(-n // b) for n, b in zip(values.shape, block, strict=True)])
    scaled = np.zeros_like(values)
    for index in np.ndindex(*scales.shape):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, block, strict=True))
        scales[index] = np.abs(values[where]).max() / 100
        scaled[where] = np.rint(values[where] / scales[index])
    return scaled, scales


def _quantise(quantisation: Quantisation, memory: Memory) -> None:
    at = quantisation.regions
    results = []
    for row in range(len(at)):
        shape = tuple(at.shape_QD[row].tolist())
        strides = contiguous_strides(shape, ITEM_SIZES[quantisation.staging_dtype])
        region = view(memory[quantisation.staging], quantisation.staging_dtype, shape, int(at.offset_Q[row]), strides)
        results.append(quantised(region.astype(np.float64), quantisation.block))
    for which, places_, dtype in (
        (0, quantisation.values, quantisation.dtype),
        (1, quantisation.scales, quantisation.scales_dtype),
    ):
        _place(places_, [result[which] for result in results], dtype, quantisation.storages, memory)


def _place(
    places_: QuantizedDestinations,
    results: list[NDArray[np.float64]],
    dtype: str,
    storages: tuple[str, ...],
    memory: Memory,
) -> None:
    for row in range(len(places_)):
        box = Box(tuple(places_.start_RD[row].tolist()), tuple(places_.shape_RD[row].tolist()))
        target = view(
            memory[storages[places_.storage_R[row]]],
            dtype,
            box.shape,
            int(places_.offset_R[row]),
            tuple(places_.strides_RD[row].tolist()),
        )
        target[...] = part(results[places_.region_R[row]], box).astype(target.dtype)


def simple(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    address: Address = SHARED,
    host: str = "host",
    device: str = "cpu",
    boxes: Mapping[str, list[Box]] | None = None,
) -> Layout:
    """Tensors, or boxes of them, each contiguous in a storage of its own."""
    builder = LayoutBuilder(host, device)
    for name, (shape, dtype) in tensors.items():
        tensor = builder.tensor(name, shape, dtype)
        for index, box in enumerate([whole(shape)] if boxes is None else boxes.get(name, [])):
            num_bytes = box.num_elements * ITEM_SIZES[dtype]
            storage = builder.storage(f"{name}.{index}", num_bytes, address)
            builder.add(tensor, box, storage, 0, contiguous_strides(box.shape, ITEM_SIZES[dtype]))
    return builder.build()


assert set(NUMPY) <= set(DTYPES)
