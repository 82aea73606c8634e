"""Tensors that engines hold in float8 with block scales: whole blocks are fetched, values and scales are made there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_harness import ADDRESSES, PRIVATE, SHARED, number, part, places, quantised, run, simple

from tandem.common.errors import CoverageError, RefitError
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.planner import plan, survey

NAME, SCALES = "w", "w_scale_inv"


def quantised_engine(
    shape: tuple[int, ...],
    block: tuple[int, ...],
    boxes: list[Box],
    scale_boxes: list[Box],
    host: str = "infer",
    *,
    extra: bool = False,
) -> Layout:
    """An engine that holds boxes of values and boxes of scales, each in a storage of its own."""
    full = (1,) * (len(shape) - len(block)) + block
    builder = LayoutBuilder(host)
    values = builder.tensor(NAME, shape, "float8_e4m3fn", block=block, scales=SCALES)
    scales = builder.tensor(SCALES, [-(-n // b) for n, b in zip(shape, full, strict=True)], "float32")
    for tensor, dtype, mine in ((values, "float8_e4m3fn", boxes), (scales, "float32", scale_boxes)):
        for index, box in enumerate(mine):
            item_size = ITEM_SIZES[dtype]
            storage = builder.storage(f"{tensor}.{index}", box.num_elements * item_size)
            builder.add(tensor, box, storage, 0, contiguous_strides(box.shape, item_size))
    if extra:
        norm = builder.tensor("norm", (3,), "float16")
        builder.add(norm, whole((3,)), builder.storage("norm", 6), 0, (2,))
    return builder.build()


def rows_of(shape: tuple[int, ...]) -> list[Box]:
    """Return the rows of a tensor, a box each."""
    rest = (0,) * (len(shape) - 1)
    return [Box((row, *rest), (1, *shape[1:])) for row in range(shape[0])]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_values_and_scales_are_those_of_whole_blocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    block = tuple(data.draw(st.integers(1, 4)) for _ in shape)[data.draw(st.integers(0, len(shape) - 1)) :]
    full = (1,) * (len(shape) - len(block)) + block
    scales_shape = tuple(-(-n // b) for n, b in zip(shape, full, strict=True))
    cut = data.draw(st.integers(0, shape[0]))
    halves = [Box((0, *[0] * (len(shape) - 1)), (cut, *shape[1:])), Box((cut, *[0] * (len(shape) - 1)), shape)]
    halves[1] = Box(halves[1].start, (shape[0] - cut, *shape[1:]))
    halves = [box for box in halves if box.num_elements]
    sources = {
        f"t{index}": simple(
            {NAME: (shape, "float32"), "norm": ((3,), "float16")}, data.draw(st.sampled_from(ADDRESSES)), "a"
        )
        for index in range(data.draw(st.integers(1, 2)))
    }
    engines = {
        f"e{index}": quantised_engine(
            shape,
            block,
            [data.draw(st.sampled_from(halves))] if data.draw(st.booleans()) else halves,
            data.draw(st.sampled_from([[], [whole(scales_shape)], rows_of(scales_shape)])),
            data.draw(st.sampled_from("ab")),
            extra=True,
        )
        for index in range(data.draw(st.integers(1, 3)))
    }
    planned = plan(sources, engines, allow_alias=data.draw(st.booleans()), grain=1)
    values = number({NAME: shape, "norm": (3,)})
    memories = run(planned, sources, engines, values)
    expected = dict(zip((NAME, SCALES), quantised(values[NAME], block), strict=True)) | {"norm": values["norm"]}
    for engine, layout in engines.items():
        for name, box, place in places(layout, memories[engine]):
            np.testing.assert_array_equal(place, part(expected[name], box).astype(place.dtype), err_msg=f"{name}{box}")
        verified = planned.programs[engine].verification
        assert verified.dtypes == ("float32", "", "float16"), "what was sent is verified, and the scales made of it not"
        assert verified.rows.tolist() == [row for row, tensor in enumerate(layout.pieces.tensor_P) if tensor != 1]
    surveyed = survey(sources, engines, allow_alias=False, grain=1)
    for engine, program in planned.programs.items():
        assert sum(staging.num_bytes for staging in program.staging) == surveyed.staging.get(engine, 0)


def test_only_the_enclosing_blocks_are_fetched() -> None:
    """Rows 5 to 6 of blocks of 4 rows: rows 4 to 8 come over."""
    source = simple({NAME: ((16, 8), "float32")}, PRIVATE)
    engine = quantised_engine((16, 8), (4, 8), [Box((5, 0), (1, 8))], [Box((1, 0), (1, 1))])
    planned = plan({"t": source}, {"e": engine}, allow_alias=False)
    assert [link.num_bytes for link in planned.links] == [4 * 8 * 4]
    (quantisation,) = planned.programs["e"].quantisations
    assert quantisation.dtype == "float8_e4m3fn"
    assert (quantisation.staging_dtype, quantisation.scales_dtype) == ("float32", "float32")
    assert quantisation.regions.start_QD.tolist() == [[4, 0]]
    assert quantisation.values.start_RD.tolist() == [[1, 0]]


def test_what_is_quantised_already_is_copied_with_its_scales() -> None:
    boxes = [whole((8, 8))], [whole((2, 2))]
    source, engine = (quantised_engine((8, 8), (4, 4), *boxes, host=host) for host in ("a", "b"))
    planned = plan({"t": source}, {"e": engine}, allow_alias=False)
    program = planned.programs["e"]
    assert program.quantisations == ()
    assert [link.num_bytes for link in planned.links] == [64 + 16]
    assert planned.programs["t"].verification.dtypes == ("float8_e4m3fn", "float32")


def test_scales_of_another_shape_are_refused() -> None:
    builder = LayoutBuilder("infer")
    values = builder.tensor(NAME, (8, 8), "float8_e4m3fn", block=(4, 4), scales=SCALES)
    builder.add(values, whole((8, 8)), builder.storage("w", 64), 0, (8, 1))
    scales = builder.tensor(SCALES, (3, 2), "float32")
    builder.add(scales, whole((3, 2)), builder.storage("s", 24), 0, (8, 4))
    with pytest.raises(RefitError, match=r"scales w_scale_inv of shape \(3, 2\); w of shape \(8, 8\) .* has \(2, 2\)"):
        plan({"t": simple({NAME: ((8, 8), "float32")})}, {"e": builder.build()}, allow_alias=False)


def test_a_missing_part_of_a_block_is_refused() -> None:
    source = simple({NAME: ((8, 8), "float32")}, boxes={NAME: [Box((0, 0), (6, 8))]})
    engine = quantised_engine((8, 8), (4, 4), [Box((4, 0), (1, 8))], [])
    with pytest.raises(CoverageError, match=r"e wants w\[6:8, 0:8\], which no trainer holds"):
        plan({"t": source}, {"e": engine}, allow_alias=False)


def test_staging_is_never_an_alias() -> None:
    """A transport may read parameters in place, not what is to be quantised."""
    source, engine = (
        simple({NAME: ((8, 8), "float32")}, SHARED, "a"),
        quantised_engine((8, 8), (4, 4), [whole((8, 8))], [whole((2, 2))], "a"),
    )
    planned = plan({"t": source}, {"e": engine}, allow_alias=True)
    assert [transfer.transport for transfer in planned.programs["e"].receives] == ["shm"]
