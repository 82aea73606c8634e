"""Messages of a stream: derived from copies alone, they move every element once and fit their limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.refit.layout import DTYPES
from tandem.refit.transfer import CopyColumns
from tandem.refit.transports import exchange
from tandem.refit.transports.exchange import MessageBuckets, divide
from tandem.refit.transports.memory import (
    CopySide,
    NamedStorages,
    destination_side,
    item_sizes,
    source_side,
    torch_dtype,
    wire_bytes,
)
from tandem.refit.transports.sizes import bucket_bytes

TYPES = ("float32", "bfloat16", "float16", "float64")


def make_copies(shapes: list[tuple[int, ...]], types: list[tuple[str, str]], commands: list[bool]) -> CopyColumns:
    """Return copies whose sources lie row-major, one after the other; destinations transposed where `commands` says."""
    num_dims = max(len(shape) for shape in shapes)
    rows: list[list[object]] = []
    offsets = [0, 0]
    for shape, (source, destination), is_transposed in zip(shapes, types, commands, strict=True):
        padded = (1,) * (num_dims - len(shape)) + shape
        codes = DTYPES.index(source), DTYPES.index(destination)
        strides = []
        for end, code in enumerate(codes):
            size = int(item_sizes(np.array([code]))[0])
            offsets[end] = -(-offsets[end] // 8) * 8
            command = list(range(num_dims)) if end and is_transposed else list(reversed(range(num_dims)))
            step, found = size, [0] * num_dims
            for dim in command:
                found[dim], step = step, step * padded[dim]
            strides.append(found)
        rows.append([0, 0, 0, *offsets, padded, *strides, *codes])
        num = int(np.prod(padded))
        for end, code in enumerate(codes):
            offsets[end] += num * int(item_sizes(np.array([code]))[0])
    return CopyColumns(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def extent(side: CopySide) -> int:
    ends = side.offset_C + ((side.shape_CD - 1) * side.strides_CD).sum(axis=1) + item_sizes(side.dtype_C)
    return int(ends.max())


def send_and_receive(copies: CopyColumns, found: MessageBuckets, memory: torch.Tensor, into: torch.Tensor) -> None:
    """Move bytes as two ends would that share nothing but messages."""
    there = NamedStorages("a", {"s": memory}).views(source_side(found.copies, ["s"]), ["t"], found.copies.tensor_C)
    here = NamedStorages("b", {"d": into}).views(destination_side(found.copies, ["d"]), ["t"], found.copies.tensor_C)
    for number, num_bytes in enumerate(found.num_bytes_B):
        message = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        for views, is_send in ((there, True), (here, False)):
            for row in range(found.first_B1[number], found.first_B1[number + 1]):
                dtype, first = torch_dtype(int(found.wire_dtype_K[row])), int(found.place_K[row])
                part = message[first : first + views[row].numel() * dtype.itemsize].view(dtype).view(views[row].shape)
                part.copy_(views[row]) if is_send else views[row].copy_(part)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_messages_move_every_element_and_fit(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6))
    types = [data.draw(st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES))) for _ in shapes]
    copies = make_copies(shapes, types, [data.draw(st.booleans()) for _ in shapes])
    limit = data.draw(st.integers(8, 400))
    found = divide(copies, limit)
    assert all(0 < num <= limit for num in found.num_bytes_B)
    assert sum(found.num_bytes_B) == int(wire_bytes(copies).sum())

    source, destination = source_side(copies, ["s"]), destination_side(copies, ["d"])
    memory, into, meant = (torch.zeros(extent(side), dtype=torch.uint8) for side in (source, destination, destination))
    for number, view in enumerate(NamedStorages("a", {"s": memory}).views(source, ["t"], copies.tensor_C)):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + 1000 * number)
    send_and_receive(copies, found, memory, into)
    wanted = NamedStorages("b", {"d": meant}).views(destination, ["t"], copies.tensor_C)
    given_ = NamedStorages("a", {"s": memory}).views(source, ["t"], copies.tensor_C)
    for to, from_, (source_type, destination_type) in zip(wanted, given_, types, strict=True):
        # Numbers this small are exact in float16 and rounded once in bfloat16, whichever end it is at.
        assert {str(from_.dtype), str(to.dtype)} == {f"torch.{source_type}", f"torch.{destination_type}"}
        to.copy_(from_)
    assert torch.equal(into, meant)


def test_small_copies_share_a_message_and_large_contiguous_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ALONE_BYTES", 400)
    types = [("float32", "float32")] * 4
    copies = make_copies([(10,), (100,), (10,), (10,)], types, [False] * 4)
    assert divide(copies, 1000).num_bytes_B == [40, 400, 80]
    transposed = make_copies([(2, 5), (10, 10), (2, 5)], types[:3], [True] * 3)
    # In one piece at the source, so the source sends it without packing.
    assert divide(transposed, 1000).num_bytes_B == [40, 400, 40]
    converted = make_copies([(10,), (100,), (10,)], [("float32", "bfloat16")] * 3, [False] * 3)
    assert divide(converted, 1000).num_bytes_B == [240], "200 bytes are not many"


def test_a_large_copy_is_cut_evenly() -> None:
    copies = make_copies([(1000, 3)], [("float32", "float32")], [False])
    assert divide(copies, 5000).num_bytes_B == [4008, 4008, 3984], "whole rows of 12 bytes"
    wide = make_copies([(2, 1000)], [("float32", "float32")], [False])
    assert divide(wide, 3000).num_bytes_B == [2000] * 4


def test_messages_shrink_where_many_processes_meet() -> None:
    assert bucket_bytes(2, 1 << 40) == bucket_bytes(16, 1 << 40) == 16 << 20
    assert bucket_bytes(64, 1 << 40) == 4 << 20
    assert bucket_bytes(513, 1 << 40) == 1 << 20


def test_a_small_transfer_has_several_messages_under_way() -> None:
    assert bucket_bytes(2, 32 << 20) == 8 << 20
    assert bucket_bytes(2, 1000) == 1 << 20
