"""Boxes of tensors, written by some processes and read by others; and the boxes that a flat range of an array is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import CheckpointError
from tandem.refit.layout import Box, whole
from tandem.trainer.files.box_files import BoxFiles, BoxPart, boxes_of_range, snapshot, write

WHOLE = torch.arange(48, dtype=torch.float32).reshape(6, 8)


def part(start: tuple[int, int], shape: tuple[int, int]) -> BoxPart:
    rows, columns = (slice(a, a + n) for a, n in zip(start, shape, strict=True))
    return BoxPart("weight", (6, 8), Box(start, shape), WHOLE[rows, columns])


def test_any_box_is_read_from_the_boxes_that_several_wrote(tmp_path: Path) -> None:
    write(tmp_path, 0, snapshot([part((0, 0), (4, 3)), part((4, 0), (2, 3))]), max_file_bytes=1)
    write(tmp_path, 1, snapshot([part((0, 3), (6, 5))]), max_file_bytes=1)
    assert len(list(tmp_path.iterdir())) == 3
    files = BoxFiles(tmp_path)
    assert files.shapes == {"weight": (6, 8)}
    for box in (whole((6, 8)), Box((3, 2), (2, 2)), Box((5, 7), (1, 1))):
        found = torch.full(box.shape, -1.0)
        files.read("weight", (6, 8), box, found)
        rows, columns = (slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        assert torch.equal(found, WHOLE[rows, columns])


def test_a_number_has_a_box_too(tmp_path: Path) -> None:
    number, box = torch.tensor(3.0), Box((), ())
    write(tmp_path, 0, snapshot([BoxPart("step", (), box, number)]), max_file_bytes=1)
    found = torch.tensor(-1.0)
    BoxFiles(tmp_path).read("step", (), box, found)
    assert torch.equal(found, number)


def test_a_snapshot_does_not_change_with_what_it_was_made_of() -> None:
    live = torch.zeros(3)
    (taken,) = snapshot([BoxPart("bias", (3,), whole((3,)), live)])
    live += 1
    assert not taken.elements.any()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert BoxFiles(tmp_path).shapes == {}, "an optimizer may keep no state"
    with pytest.raises(CheckpointError, match="it is not whole"):
        BoxFiles(tmp_path).read("bias", (8,), whole((8,)), torch.zeros(8))
    write(tmp_path, 0, snapshot([part((0, 0), (4, 8))]), max_file_bytes=1000)
    files, found = BoxFiles(tmp_path), torch.zeros(6, 8)
    with pytest.raises(CheckpointError, match=r"a file is missing: 32 of 48 elements of weight\[0:6, 0:8\]"):
        files.read("weight", (6, 8), whole((6, 8)), found)
    with pytest.raises(CheckpointError, match="bias is in none of its files"):
        files.read("bias", (8,), whole((8,)), found[0])
    with pytest.raises(CheckpointError, match=r"weight is torch.float32 and should be torch.int16"):
        files.read("weight", (6, 8), whole((6, 8)), found.short())
    with pytest.raises(CheckpointError, match=r"weight has shape \(6, 8\), the model's has \(8, 6\)"):
        files.read("weight", (8, 6), whole((8, 6)), found)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_a_range_of_offsets_is_a_few_boxes(sizes: list[int], data: st.DataObject) -> None:
    strides, span = [1] * len(sizes), 1
    for dim in data.draw(st.permutations(range(len(sizes)))):
        strides[dim] = span + data.draw(st.integers(0, 3))
        span += (sizes[dim] - 1) * strides[dim]
    offsets = torch.zeros([1] * len(sizes), dtype=torch.int64)
    for dim, (n, stride) in enumerate(zip(sizes, strides, strict=True)):
        offsets = offsets + (torch.arange(n) * stride).reshape([-1 if dim == d else 1 for d in range(len(sizes))])
    first, stop = sorted(data.draw(st.tuples(*[st.integers(-2, span + 3)] * 2)))
    boxes = list(boxes_of_range(sizes, strides, first, stop))
    assert len(boxes) <= 2 * len(sizes) - 1
    covered = torch.zeros(sizes, dtype=torch.int64)
    for box in boxes:
        assert box.num_elements
        covered[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    assert torch.equal(covered, ((offsets >= first) & (offsets < stop)).long())
