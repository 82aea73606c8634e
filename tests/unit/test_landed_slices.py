"""Few slices say of each element of a parameter where it came from."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tandem.common.errors import ModelError
from tandem.refit.layout import Box, Layout, LayoutBuilder, whole
from tandem.rollout.engines.vllm.landed_slices import LandedSlice, check_all_is_held, fit_slices

SHAPES = {1: (6, 4), 2: (5,), 3: (3, 4, 2), 4: ()}


def origins_of(number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the number of a tensor, and each index in it, for each of its elements."""
    shape = SHAPES[number]
    indices = torch.from_numpy(np.indices(shape)).int() if shape else torch.zeros(0, dtype=torch.int32)
    absent = [torch.zeros(shape, dtype=torch.int32)] * (3 - len(shape))
    return torch.full(shape, number, dtype=torch.int32), [*indices, *absent]


def check(number_S: torch.Tensor, indices_DS: list[torch.Tensor], most: int) -> list[LandedSlice]:
    """Check that slices say of each element of a parameter what is known of it."""
    num_dims = {number: len(shape) for number, shape in SHAPES.items()}
    slices = fit_slices(number_S, indices_DS, num_dims)
    assert len(slices) <= most
    assert fit_slices(number_S, indices_DS, num_dims, by_lines=True) == slices, "lines show where any of these end"
    numbers, indices = torch.zeros_like(number_S), [torch.zeros_like(index) for index in indices_DS]
    for landed in slices:
        number, origins = origins_of(landed.tensor)
        assert (landed.view(numbers) == 0).all(), "no element is in two slices"
        landed.view(numbers).copy_(number[landed.box.region])
        for index, origin in zip(indices, origins, strict=True):
            landed.view(index).copy_(origin[landed.box.region])
    assert torch.equal(numbers, number_S)
    for index, expected in zip(indices, indices_DS, strict=True):
        assert torch.equal(index, expected)
    return slices


def both(change: object, number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return where the elements of a tensor came from after something was done to it."""
    numbers, indices = origins_of(number)
    return change(numbers), [change(index) for index in indices]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "number", "most"),
    [
        (lambda value: value, 1, 1),
        (lambda value: value.T.contiguous(), 1, 1),
        (lambda value: value[2:5, 1:3].contiguous(), 1, 1),
        (lambda value: torch.nn.functional.pad(value, (0, 3, 0, 1)), 1, 1),
        (lambda value: value.permute(0, 2, 1).contiguous(), 3, 1),
        (lambda value: value.reshape(12, 2), 3, 3),
        (lambda value: value[:, None, :], 1, 1),
        (lambda value: value.reshape(3, 2, 4).transpose(0, 1).reshape(6, 4), 1, 6),
        (lambda value: value[None, :3], 2, 1),
        (lambda value: value, 4, 1),
        (lambda value: value[[0, 1, 3, 2, 4]], 2, 4),
    ],
    ids=[
        "whole",
        "transposed",
        "cut",
        "padded",
        "permuted",
        "joined",
        "widened",
        "interleaved",
        "row",
        "scalar",
        "mixed",
    ],
)
def test_a_changed_tensor_is_few_slices(change: object, number: int, most: int) -> None:
    check(*both(change, number), most)


@hypothesis.given(st.data())
def test_fused_tensors_are_a_slice_each(data: st.DataObject) -> None:
    numbers, indices = origins_of(1)
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=4))
    rows = [slice(first, min(6, first + count)) for first, count in cuts]
    hypothesis.assume(
        len({row for each in rows for row in range(each.start, each.stop)})
        == sum(each.stop - each.start for each in rows)
    )
    padding = data.draw(st.integers(0, 2))
    pieces = [[value[each] for each in rows] for value in (numbers, *indices)]
    fused = [torch.nn.functional.pad(torch.cat(piece), (0, padding)) for piece in pieces]
    check(fused[0], fused[1:], len(rows))


def test_lines_miss_what_is_changed_between_them() -> None:
    numbers, indices = origins_of(1)
    mixed = [value.clone() for value in (numbers, *indices)]
    for value in mixed:
        value[1:3, 1] = value[1:3, 1].flip(0).clone()
    num_dims = {1: 2}
    (landed,) = fit_slices(mixed[0], mixed[1:], num_dims, by_lines=True)
    assert landed.box == whole(SHAPES[1])
    assert len(fit_slices(mixed[0], mixed[1:], num_dims)) > 1


def layout_of(*boxes: Box, shape: tuple[int, ...] = (4, 4)) -> Layout:
    """Return a layout of one worker that has these slices of a tensor."""
    builder = LayoutBuilder("host")
    tensor = builder.tensor("weight", shape, "float32")
    for number, box in enumerate(boxes):
        builder.add(tensor, box, builder.storage(str(number), box.num_elements * 4), 0, (0,) * len(shape))
    return builder.build()


def test_a_part_that_no_worker_takes_is_named() -> None:
    check_all_is_held([layout_of(whole((4, 4))), layout_of()])
    check_all_is_held([layout_of(Box((0, 0), (3, 4))), layout_of(Box((1, 0), (3, 4)))])
    with pytest.raises(ModelError, match=r"vLLM takes nothing of weight\[2:3, 1:4\], so"):
        check_all_is_held([layout_of(Box((0, 0), (2, 4))), layout_of(Box((3, 0), (1, 4)), Box((2, 0), (1, 1)))])
    with pytest.raises(ModelError, match=r"vLLM takes nothing of weight\[0:4, 0:4\], so"):
        check_all_is_held([layout_of(), layout_of()])
