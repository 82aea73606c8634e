"""Plans are executed on real bytes and every element is compared, for random shardings of random tensors."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.common.errors import CoverageError, RefitError
from tandem.refit import layout as layouts
from tandem.refit import program as programs
from tandem.refit.layout import (
    ITEM_SIZES,
    Address,
    Box,
    Layout,
    Piece,
    PrivateMemory,
    SharedMemory,
    Storage,
    TensorLayout,
    contiguous_strides,
    whole,
)
from tandem.refit.planner import Plan, plan
from tandem.refit.program import TransferProgram

Bytes = NDArray[np.uint8]
Memory = dict[str, Bytes]
"""The storages of one process."""

SHARED = SharedMemory(pid=1, fd=3, inode=5)
FLOATS = ("float64", "float32", "float16")
UNTOUCHED = 0xA5


# --- real memory, laid out by hypothesis ---


class Writer:
    """Lays pieces out in the storages of one process."""

    def __init__(self, data: st.DataObject, address: Address) -> None:
        self._data = data
        self._address = address
        self._tensors: dict[str, TensorLayout] = {}
        self._num_bytes: dict[str, int] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: str, boxes: list[Box]) -> None:
        """Describe the boxes of one tensor, each somewhere in memory."""
        item_size = ITEM_SIZES[dtype]
        storage = self._data.draw(st.sampled_from((name, "fused")))
        pieces: list[Piece] = []
        if self._data.draw(st.booleans()):  # views of one array: boxes lie interleaved
            offset, strides = self._reserve(storage, shape, item_size)
            for box in boxes:
                first = sum(a * s for a, s in zip(box.start, strides, strict=True))
                pieces.append(Piece(box, storage, offset + first, strides))
        else:
            for box in boxes:
                offset, strides = self._reserve(storage, box.shape, item_size)
                pieces.append(Piece(box, storage, offset, strides))
        self._tensors[name] = TensorLayout(shape, dtype, tuple(pieces))

    def _reserve(self, storage: str, shape: tuple[int, ...], item_size: int) -> tuple[int, tuple[int, ...]]:
        """Take memory for an array, with dimensions in any order and padding after each."""
        gap = self._data.draw(st.sampled_from((0, 0, 0, 8, 24)))
        offset = math.ceil(self._num_bytes.get(storage, 0) / 8) * 8 + gap
        strides, step = [0] * len(shape), item_size
        for dim in self._data.draw(st.permutations(range(len(shape)))):
            strides[dim] = step
            step = step * shape[dim] + item_size * self._data.draw(st.sampled_from((0, 0, 0, 1, 3)))
        self._num_bytes[storage] = offset + step
        return offset, tuple(strides)

    def layout(self) -> Layout:
        storages = {name: Storage(num_bytes, self._address) for name, num_bytes in self._num_bytes.items()}
        return Layout("host", self._tensors, storages)


def view(
    memory: Bytes, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> NDArray[np.generic]:
    """Return elements in memory; numpy refuses what reaches outside."""
    return np.ndarray(shape, np.dtype(dtype), memory.data, offset, strides)


def fresh(layout: Layout) -> Memory:
    return {name: np.full(storage.num_bytes, UNTOUCHED, np.uint8) for name, storage in layout.storages.items()}


def pieces_of(layout: Layout, memory: Memory, name: str) -> list[tuple[Box, NDArray[np.generic]]]:
    tensor = layout.tensors[name]
    return [
        (p.box, view(memory[p.parameter], tensor.dtype, p.box.shape, p.offset, p.strides))
        for p in tensor.pieces
        if p.box.num_elements
    ]


def fill(layout: Layout, values: dict[str, NDArray[np.float64]]) -> Memory:
    memory = fresh(layout)
    for name in layout.tensors:
        for box, place in pieces_of(layout, memory, name):
            place[...] = part(values[name], box).astype(place.dtype)
    return memory


def part(values: NDArray[np.float64], box: Box) -> NDArray[np.float64]:
    return values[tuple(itertools.starmap(slice, zip(box.start, box.stop, strict=True)))]


def execute(program: TransferProgram, sources: dict[str, Memory], destination: Memory) -> None:
    """Run a program as a transport would."""
    for copy in program.copies:
        source = program.sources[copy.source]
        memory = sources[source.member][source.storage]
        assert source.num_bytes == len(memory)
        there, here = copy.source_region, copy.destination_region
        read = view(memory, there.dtype, copy.shape, there.offset, there.strides)
        written = view(destination[copy.destination], here.dtype, copy.shape, here.offset, here.strides)
        assert written.nbytes == copy.num_bytes
        written[...] = read.astype(written.dtype)
    for alias in program.aliases:
        source = program.sources[alias.source]
        assert alias.num_bytes == len(destination[alias.destination])
        memory = sources[source.member][source.storage]
        assert alias.offset + alias.num_bytes <= len(memory)
        destination[alias.destination] = memory[alias.offset : alias.offset + alias.num_bytes]


def make_values(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    """Number all elements, so that none can be mistaken for another; every type used here holds these exactly."""
    numbers = itertools.count(1)
    return {name: np.array([next(numbers) for _ in range(math.prod(s))]).reshape(s) for name, s in shapes.items()}


# --- random tensors and shardings ---

shapes = st.dictionaries(
    st.sampled_from(("q", "k", "norm")), st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1
)


def grid(data: st.DataObject, shape: tuple[int, ...], *, rows_only: bool = False) -> list[Box]:
    """Cut a tensor along random lines; the boxes cover it."""
    spans = []
    for dim, n in enumerate(shape):
        cuts = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 and not (rows_only and dim) else set()
        edges = [0, *sorted(cuts), n]
        spans.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    return [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*spans)]


def draw_sources(data: st.DataObject, wanted: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> dict[str, Layout]:
    """Spread tensors over 1 to 4 ranks: rows, grids, replicas, and two shardings side by side."""
    ranks = [f"trainer-{rank}" for rank in range(data.draw(st.integers(1, 4)))]
    writers = {rank: Writer(data, SHARED) for rank in ranks}
    for name, shape in wanted.items():
        held: dict[str, list[Box]] = {rank: [] for rank in ranks}
        sharding = data.draw(st.sampled_from(("rows", "grid", "replicas", "two")))
        if sharding == "replicas":
            held = {rank: [whole(shape)] for rank in ranks}
        elif sharding == "two":  # one group of ranks holds all of it, cut differently from the rest
            for group in (ranks[::2], ranks[1::2] or ranks[:0]):
                for index, box in enumerate(grid(data, shape) if group else []):
                    held[group[index % len(group)]].append(box)
        else:
            for box in grid(data, shape, rows_only=sharding == "rows"):
                for rank in data.draw(st.sets(st.sampled_from(ranks), min_size=1)):
                    held[rank].append(box)
        for rank in ranks:
            writers[rank].add(name, shape, dtypes[name], held[rank])
    return {rank: writer.layout() for rank, writer in writers.items()}


def draw_destinations(
    data: st.DataObject, wanted: dict[str, tuple[int, ...]], dtypes: dict[str, str]
) -> dict[str, Layout]:
    """Engines that want everything, whole, or some boxes of it."""
    engines = {}
    for index in range(data.draw(st.integers(1, 2))):
        writer = Writer(data, PrivateMemory())
        for name, shape in wanted.items():
            boxes = [whole(shape)] if data.draw(st.booleans()) else grid(data, shape)
            chosen = boxes if data.draw(st.booleans()) else [box for box in boxes if data.draw(st.booleans())]
            writer.add(name, shape, dtypes[name], chosen)
        engines[f"rollout-{index}"] = writer.layout()
    return engines


def draw_dtypes(data: st.DataObject, names: dict[str, tuple[int, ...]]) -> tuple[dict[str, str], dict[str, str]]:
    """Element types of sources and of destinations: equal, or two that convert."""
    there, here = {}, {}
    for name in names:
        there[name] = data.draw(st.sampled_from((*FLOATS, "int32")))
        here[name] = data.draw(st.sampled_from(FLOATS)) if there[name] in FLOATS else there[name]
        if data.draw(st.booleans()):
            here[name] = there[name]
    return there, here


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_wanted_element_arrives_and_nothing_else_is_written(data: st.DataObject) -> None:
    wanted = data.draw(shapes)
    there, here = draw_dtypes(data, wanted)
    sources = draw_sources(data, wanted, there)
    destinations = draw_destinations(data, wanted, here)
    planned = plan(sources, destinations, allow_alias=data.draw(st.booleans()))

    values = make_values(wanted)
    memories = {rank: fill(layout, values) for rank, layout in sources.items()}
    written: dict[str, int] = {}
    for engine, layout in destinations.items():
        program = programs.decode(programs.encode(planned.programs[engine]))
        assert program == planned.programs[engine]
        memory = fresh(layout)
        execute(program, memories, memory)
        for name in layout.tensors:
            for box, place in pieces_of(layout, memory, name):
                np.testing.assert_array_equal(place, part(values[name], box), err_msg=f"{engine} {name}{box}")
        replaced = {alias.destination for alias in program.aliases}
        expected = fill(layout, values)
        for name in set(memory) - replaced:
            assert memory[name].tobytes() == expected[name].tobytes(), f"{engine} wrote beside its elements in {name}"
        for copy in program.copies:
            link = f"{program.sources[copy.source].member}>{engine}"
            written[link] = written.get(link, 0) + math.prod(copy.shape) * ITEM_SIZES[copy.destination_region.dtype]
    assert planned.num_bytes == written


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_missing_part_is_refused_by_tensor_and_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = grid(data, shape)
    lost = data.draw(st.sampled_from(boxes))
    trainer, engine = Writer(data, SHARED), Writer(data, PrivateMemory())
    trainer.add("model.norm.weight", shape, "float32", [box for box in boxes if box != lost])
    engine.add("model.norm.weight", shape, "float32", [whole(shape)])
    with pytest.raises(CoverageError) as caught:
        plan({"trainer-0": trainer.layout()}, {"rollout-0": engine.layout()}, allow_alias=True)
    message = str(caught.value)
    named = re.search(r"model\.norm\.weight\[(.*)\], which no trainer holds", message)
    assert named, message
    spans = [tuple(map(int, span.split(":"))) for span in named[1].split(", ") if span]
    missing = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    assert lost.contains(missing), message


# --- cases written by hand ---


def simple(tensors: dict[str, tuple[tuple[int, ...], str]], address: Address = SHARED, host: str = "host") -> Layout:
    """Whole tensors, each contiguous in a storage of its own."""
    held, storages = {}, {}
    for name, (shape, dtype) in tensors.items():
        strides = contiguous_strides(shape, ITEM_SIZES[dtype])
        held[name] = TensorLayout(shape, dtype, (Piece(whole(shape), name, 0, strides),))
        storages[name] = Storage(math.prod(shape) * ITEM_SIZES[dtype], address)
    return Layout(host, held, storages)


def rows(name: str, shape: tuple[int, int], spans: list[tuple[int, int]], dtype: str = "float32") -> Layout:
    """Spans of rows, one after the other in one storage."""
    item_size = ITEM_SIZES[dtype]
    pieces, offset = [], 0
    for start, stop in spans:
        box = Box((start, 0), (stop - start, shape[1]))
        pieces.append(Piece(box, "flat", offset, contiguous_strides(box.shape, item_size)))
        offset += box.num_elements * item_size
    return Layout("host", {name: TensorLayout(shape, dtype, tuple(pieces))}, {"flat": Storage(offset, SHARED)})


def plan_one(source: Layout, destination: Layout, *, allow_alias: bool = False) -> TransferProgram:
    return plan({"trainer-0": source}, {"rollout-0": destination}, allow_alias=allow_alias).programs["rollout-0"]


def test_a_tensor_nobody_holds_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"rollout-0 wants lm_head\[0:2, 0:3\], which no trainer holds"):
        plan_one(simple({"q": ((2, 3), "float32")}), simple({"lm_head": ((2, 3), "float32")}))


def test_shapes_must_agree() -> None:
    with pytest.raises(CoverageError, match=r"rollout-0 wants q of shape \(3, 2\), trainer-0 holds it as \(2, 3\)"):
        plan_one(simple({"q": ((2, 3), "float32")}), simple({"q": ((3, 2), "float32")}))
    two = {"trainer-0": simple({"q": ((2, 3), "float32")}), "trainer-1": simple({"q": ((2,), "float32")})}
    with pytest.raises(CoverageError, match=r"trainer-0 holds q of shape \(2, 3\), trainer-1 holds it as \(2,\)"):
        plan(two, {}, allow_alias=False)


def test_types_without_a_conversion_are_refused() -> None:
    with pytest.raises(RefitError, match=r"wants q as float32, trainer-0 holds int32: there is no conversion"):
        plan_one(simple({"q": ((4,), "int32")}), simple({"q": ((4,), "float32")}))


@pytest.mark.parametrize(
    "source",
    [simple({"q": ((4,), "float32")}, host="other"), simple({"q": ((4,), "float32")}, address=PrivateMemory())],
    ids=["another host", "private memory"],
)
def test_memory_out_of_reach_is_refused_unless_another_rank_has_it(source: Layout) -> None:
    wanted = simple({"q": ((4,), "float32")}, address=PrivateMemory())
    with pytest.raises(RefitError, match=r"rollout-0 on host cannot reach q\[0:4\] in the memory of trainer-0"):
        plan_one(source, wanted)
    both = {"trainer-0": source, "trainer-1": simple({"q": ((4,), "float32")})}
    assert plan(both, {"rollout-0": wanted}, allow_alias=False).num_bytes == {"trainer-1>rollout-0": 16}


def egress(planned: Plan, num_ranks: int) -> list[int]:
    sent = [0] * num_ranks
    for link, num_bytes in planned.num_bytes.items():
        sent[int(link.split(">")[0].removeprefix("trainer-"))] += num_bytes
    return sent


@settings(max_examples=50, deadline=None)
@given(
    num_ranks=st.integers(1, 4),
    num_engines=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
)
def test_replicas_share_what_is_sent(num_ranks: int, num_engines: int, sizes: list[int]) -> None:
    tensors = {f"t{index}": ((size,), "float32") for index, size in enumerate(sizes)}
    sources = {f"trainer-{rank}": simple(tensors) for rank in range(num_ranks)}
    planned = plan(sources, {f"rollout-{e}": simple(tensors) for e in range(num_engines)}, allow_alias=False)
    sent = egress(planned, num_ranks)
    assert sum(sent) == 4 * sum(sizes) * num_engines
    assert max(sent) - min(sent) <= 4 * max(sizes)  # no rank is more than one tensor ahead


def test_adjacent_pieces_become_one_copy() -> None:
    source = rows("q", (8, 5), [(0, 3), (3, 4), (4, 8)])
    destination = rows("q", (8, 5), [(0, 2), (2, 8)])
    (copy,) = plan_one(source, destination).copies
    assert (copy.shape, copy.num_bytes, copy.is_run) == ((40,), 160, True)


def test_whole_tensors_that_continue_each_other_become_one_copy() -> None:
    fused = Layout(
        "host",
        {
            name: TensorLayout((4, 5), "float32", (Piece(whole((4, 5)), "qkv", 80 * index, (20, 4)),))
            for index, name in enumerate("qkv")
        },
        {"qkv": Storage(240, SHARED)},
    )
    (copy,) = plan_one(fused, fused).copies
    assert (copy.shape, copy.num_bytes) == ((60,), 240)


def test_pieces_that_are_not_adjacent_in_the_source_stay_apart() -> None:
    source = rows("q", (8, 5), [(4, 8), (0, 4)])
    assert [copy.num_bytes for copy in plan_one(source, rows("q", (8, 5), [(0, 8)])).copies] == [80, 80]


def test_blocks_of_different_width_below_each_other_stay_apart() -> None:
    """They continue each other along the rows, on both sides, but joining them would move what nobody asked for."""
    blocks = [Box((0, 0), (2, 4)), Box((2, 0), (2, 5))]
    pieces = tuple(Piece(box, "matrix", 32 * box.start[0], (32, 4)) for box in blocks)
    matrix = Layout("host", {"q": TensorLayout((4, 8), "float32", pieces)}, {"matrix": Storage(128, SHARED)})
    assert sorted(copy.shape for copy in plan_one(matrix, matrix).copies) == [(2, 4), (2, 5)]


def test_pieces_that_step_differently_stay_apart() -> None:
    """The second starts where the first would go on, but its rows lie closer together."""
    boxes = Box((0, 0), (2, 5)), Box((2, 0), (2, 5))
    pieces = Piece(boxes[0], "flat", 0, (40, 4)), Piece(boxes[1], "flat", 80, (24, 4))
    source = Layout("host", {"q": TensorLayout((4, 5), "float32", pieces)}, {"flat": Storage(160, SHARED)})
    copies = plan_one(source, simple({"q": ((4, 5), "float32")})).copies
    assert [copy.source_region.strides for copy in copies] == [(40, 4), (24, 4)]


def test_a_whole_contiguous_parameter_is_aliased_where_allowed() -> None:
    whole_q = simple({"q": ((4, 5), "float32")})
    program = plan_one(whole_q, whole_q, allow_alias=True)
    assert (program.copies, program.num_bytes) == ((), 0)
    (alias,) = program.aliases
    assert (alias.destination, alias.offset, alias.num_bytes, alias.dtype) == ("q", 0, 80, "float32")
    assert plan_one(whole_q, whole_q).aliases == ()


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (simple({"q": ((4, 5), "float32")}), simple({"q": ((4, 5), "bfloat16")})),
        (rows("q", (8, 5), [(4, 8), (0, 4)]), rows("q", (8, 5), [(0, 8)])),
        (
            rows("q", (8, 5), [(0, 8)]),
            Layout("host", rows("q", (8, 5), [(0, 8)]).tensors, {"flat": Storage(164, SHARED)}),
        ),
    ],
    ids=["another element type", "two ranges", "more in the storage than the tensor"],
)
def test_what_is_not_one_range_of_one_type_is_copied(source: Layout, destination: Layout) -> None:
    program = plan_one(source, destination, allow_alias=True)
    assert program.aliases == ()
    assert program.num_bytes == sum(math.prod(t.shape) * ITEM_SIZES[t.dtype] for t in destination.tensors.values())


def test_a_transposed_source_is_not_aliased() -> None:
    pieces = (Piece(whole((4, 5)), "q", 0, (4, 16)),)
    source = Layout("host", {"q": TensorLayout((4, 5), "float32", pieces)}, {"q": Storage(80, SHARED)})
    program = plan_one(source, simple({"q": ((4, 5), "float32")}), allow_alias=True)
    assert program.aliases == ()
    assert len(program.copies) == 1


# --- layouts that contradict themselves ---


def one_storage(num_bytes: int, *pieces: Piece, shape: tuple[int, ...] = (4, 4), dtype: str = "float32") -> Layout:
    return Layout("host", {"q": TensorLayout(shape, dtype, pieces)}, {"s": Storage(num_bytes, SHARED)})


def piece(start: tuple[int, ...], shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] = (16, 4)) -> Piece:
    return Piece(Box(start, shape), "s", offset, strides)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (one_storage(64, piece((0, 0), (2, 4)), piece((1, 0), (2, 4), 32)), r"q\[0:2, 0:4\] overlaps \[1:3, 0:4\]"),
        (one_storage(99, piece((2, 0), (3, 4))), r"q\[2:5, 0:4\] lies outside the tensor's shape \(4, 4\)"),
        (one_storage(99, piece((-1, 0), (2, 4))), r"lies outside the tensor's shape"),
        (one_storage(64, piece((0,), (4,), 0, (4,))), r"lies outside the tensor's shape"),
        (one_storage(63, piece((0, 0), (4, 4))), r"reaches outside storage 's' of 63 bytes"),
        (one_storage(64, piece((0, 0), (4, 4), 4)), r"reaches outside storage 's' of 64 bytes"),
        (one_storage(64, piece((0, 0), (2, 4), 2)), r"not multiples of 4 bytes"),
        (one_storage(64, piece((0, 0), (2, 4), -4)), r"not multiples of 4 bytes"),
        (one_storage(64, Piece(whole((4, 4)), "other", 0, (16, 4))), r"storage 'other', which is not described"),
        (one_storage(64, piece((0, 0), (4, 4)), dtype="float3"), r"element type 'float3'"),
    ],
    ids=["overlap", "past the end", "negative", "rank", "storage", "offset", "odd", "below 0", "no storage", "dtype"],
)
def test_check_refuses_a_layout_that_contradicts_itself(wrong: Layout, message: str) -> None:
    with pytest.raises(RefitError, match=message) as caught:
        wrong.check("trainer-0")
    assert str(caught.value).startswith("trainer-0: q")


@pytest.mark.parametrize(
    "wrong",
    [
        one_storage(64, piece((0, 0), (2, 4)), piece((2, 0), (2, 4), 28)),
        one_storage(64, piece((0, 0), (4, 4), 0, (12, 4))),
        one_storage(64, piece((0, 0), (4, 4), 0, (0, 4))),
        one_storage(64, piece((0, 0), (4, 2)), piece((0, 2), (4, 2), 4)),
    ],
    ids=["ranges", "rows", "broadcast", "interleaved"],
)
def test_two_wanted_elements_may_not_share_memory(wrong: Layout) -> None:
    wrong.check("rollout-0")
    with pytest.raises(RefitError, match=r"rollout-0: storage 's': .* share memory"):
        plan({}, {"rollout-0": wrong}, allow_alias=False)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_shared_memory_is_found_exactly(data: st.DataObject) -> None:
    """Compare with counting how often every byte is written."""
    num_bytes, pieces = 0, []
    for index in range(2):
        shape = (1, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
        strides = (0, *(2 * data.draw(st.integers(0, 9)) for _ in range(2)))
        place = Piece(Box((index, 0, 0), shape), "s", 2 * data.draw(st.integers(0, 20)), strides)
        pieces.append(place)
        num_bytes = max(num_bytes, place.last + 2)
    counts = np.zeros(num_bytes, np.int64)
    for place in pieces:
        for _, i, j in itertools.product(*map(range, place.box.shape)):
            offset = place.offset_of(Box((place.box.start[0], i, j), (1, 1, 1)))
            counts[offset : offset + 2] += 1
    tested = one_storage(num_bytes, *pieces, shape=(2, 4, 4), dtype="float16")
    tested.check("rollout-0")
    if counts.max() > 1 or any(_refused_although_disjoint(place) for place in pieces):
        with pytest.raises(RefitError, match="share memory"):
            tested.check_writable("rollout-0")
    else:
        tested.check_writable("rollout-0")


def _refused_although_disjoint(place: Piece) -> bool:
    """Say whether no order of its dimensions nests: such a piece is refused, whether or not two elements collide."""
    dims = sorted((s, n) for n, s in zip(place.box.shape, place.strides, strict=True) if n > 1)
    return any(outer < inner * n for (inner, n), (outer, _) in itertools.pairwise([(2, 1), *dims]))


# --- encoding ---


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_layouts_survive_the_wire(data: st.DataObject) -> None:
    wanted = data.draw(shapes)
    for layout in draw_sources(data, wanted, dict.fromkeys(wanted, "bfloat16")).values():
        assert layouts.decode(layouts.encode(layout)) == layout
        moved = {name: Storage(s.num_bytes, PrivateMemory()) for name, s in layout.storages.items()}
        elsewhere = msgspec.structs.replace(layout, storages=moved)
        assert layouts.fingerprint(elsewhere) == layouts.fingerprint(layout)
        assert layouts.fingerprint(msgspec.structs.replace(layout, host="other")) != layouts.fingerprint(layout)


@given(garbage=st.binary(max_size=64))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(RefitError, match="not a layout"):
        layouts.decode(garbage)
    with pytest.raises(RefitError, match="not a transfer program"):
        programs.decode(garbage)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, tandem.refit.planner, tandem.refit.program, tandem.refit.layout, tandem.refit.service\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
