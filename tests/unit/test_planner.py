"""Plans are executed on real bytes and every element is compared, for random shardings of random tensors."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_harness import ADDRESSES, CUDA, PRIVATE, SHARED, Values, fill, number, part, places, run, simple

from tandem.common.errors import CoverageError, RefitError
from tandem.refit import planner
from tandem.refit.layout import ITEM_SIZES, Address, Box, Layout, LayoutBuilder, whole
from tandem.refit.planner import TransferPlan, plan, survey
from tandem.refit.planning.destination_shards import DestinationShards, resolve
from tandem.refit.planning.names import PairedTensors
from tandem.refit.planning.source_shards import SourceShards

FLOATS = ("float64", "float32", "float16")


# --- real memory, laid out by hypothesis ---


class Writer:
    """Lays pieces out in the storages of one process."""

    def __init__(self, data: st.DataObject, address: Address, host: str, device: str = "cpu") -> None:
        self._data = data
        self._address = address
        self._host, self._device = host, device
        self._tensors: list[tuple[str, tuple[int, ...], str]] = []
        self._pieces: list[tuple[int, Box, str, int, tuple[int, ...]]] = []
        self._num_bytes: dict[str, int] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: str, boxes: list[Box]) -> None:
        """Describe the boxes of one tensor, each somewhere in memory."""
        item_size, tensor = ITEM_SIZES[dtype], len(self._tensors)
        self._tensors.append((name, shape, dtype))
        storage = self._data.draw(st.sampled_from((name, "fused")))
        if self._data.draw(st.booleans()):  # views of one array: boxes lie interleaved
            offset, strides = self._reserve(storage, shape, item_size)
            for box in boxes:
                first = sum(a * s for a, s in zip(box.start, strides, strict=True))
                self._pieces.append((tensor, box, storage, offset + first, strides))
        else:
            for box in boxes:
                offset, strides = self._reserve(storage, box.shape, item_size)
                self._pieces.append((tensor, box, storage, offset, strides))

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
        builder = LayoutBuilder(self._host, self._device)
        for name, shape, dtype in self._tensors:
            builder.tensor(name, shape, dtype)
        number_of = {name: builder.storage(name, n, self._address) for name, n in self._num_bytes.items()}
        for tensor, box, storage, offset, strides in self._pieces:
            builder.add(tensor, box, number_of[storage], offset, strides)
        return builder.build()


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
    """Spread tensors over 1 to 4 ranks on 1 to 2 hosts: rows, grids, replicas of some boxes or of all."""
    ranks = [f"trainer-{rank}" for rank in range(data.draw(st.integers(1, 4)))]
    writers = {
        rank: Writer(data, data.draw(st.sampled_from(ADDRESSES)), data.draw(st.sampled_from("ab"))) for rank in ranks
    }
    for name, shape in wanted.items():
        held: dict[str, list[Box]] = {rank: [] for rank in ranks}
        sharding = data.draw(st.sampled_from(("rows", "grid", "replicas")))
        if sharding == "replicas":
            held = {rank: [whole(shape)] for rank in ranks}
        else:
            for box in grid(data, shape, rows_only=sharding == "rows"):
                for rank in data.draw(st.sets(st.sampled_from(ranks), min_size=1)):
                    held[rank].append(box)
        for rank in ranks:
            writers[rank].add(name, shape, dtypes[name], held[rank])
    return {rank: writer.layout() for rank, writer in writers.items()}


def draw_engines(data: st.DataObject, wanted: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> dict[str, Layout]:
    """Engines that want everything, whole, or some boxes of it; some are replicas, on the same host or not."""
    engines: dict[str, Layout] = {}
    for kind in range(data.draw(st.integers(1, 2))):
        writer = Writer(data, PRIVATE, "a", data.draw(st.sampled_from(("cpu", "GPU-0"))))
        for name, shape in wanted.items():
            boxes = [whole(shape)] if data.draw(st.booleans()) else grid(data, shape)
            chosen = boxes if data.draw(st.booleans()) else [box for box in boxes if data.draw(st.booleans())]
            writer.add(name, shape, dtypes[name], chosen)
        layout = writer.layout()
        for copy, host in enumerate(data.draw(st.lists(st.sampled_from("acc"), min_size=1, max_size=3))):
            engines[f"rollout-{kind}-{copy}"] = Layout(
                host, layout.device, layout.tensors, layout.storages, layout.pieces
            )
    return engines


def draw_dtypes(data: st.DataObject, names: dict[str, tuple[int, ...]]) -> tuple[dict[str, str], dict[str, str]]:
    """Element types of sources and of engines: equal, or two that convert."""
    there, here = {}, {}
    for name in names:
        there[name] = data.draw(st.sampled_from((*FLOATS, "int32")))
        here[name] = data.draw(st.sampled_from(FLOATS)) if there[name] in FLOATS else there[name]
        if data.draw(st.booleans()):
            here[name] = there[name]
    return there, here


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_wanted_element_arrives_and_nothing_else_is_written(data: st.DataObject) -> None:
    wanted = data.draw(shapes)
    there, here = draw_dtypes(data, wanted)
    sources, engines = draw_sources(data, wanted, there), draw_engines(data, wanted, here)
    allow_alias = data.draw(st.booleans())
    grain = data.draw(st.sampled_from((1, 8, 1 << 16)))
    planned = plan(sources, engines, allow_alias=allow_alias, grain=grain)

    values = number(wanted)
    memories = run(planned, sources, engines, values)
    for engine, layout in engines.items():
        for name, box, place in places(layout, memories[engine]):
            np.testing.assert_array_equal(place, part(values[name], box), err_msg=f"{engine} {name}{box}")
        program = planned.programs[engine]
        aliased = {name for t in program.receives if t.transport == "alias" for name in t.destination_storages}
        expected = fill(layout, values)
        for name in set(expected) - aliased:
            assert memories[engine][name].tobytes() == expected[name].tobytes(), f"{engine}: {name} is written beside"
    check_verification(planned, sources, engines, wanted, here)
    check_fan_out(planned, sources, engines, there)
    surveyed = survey(sources, engines, allow_alias=allow_alias, grain=grain)
    assert surveyed.links == planned.links


def check_verification(
    planned: TransferPlan,
    sources: dict[str, Layout],
    engines: dict[str, Layout],
    wanted: dict[str, tuple[int, ...]],
    here: dict[str, str],
) -> None:
    """Over all trainers every element of a wanted tensor is digested once; an engine digests all that it wants."""
    counts = {name: np.zeros(shape, np.int64) for name, shape in wanted.items()}
    is_wanted = {name: any(len(layout.pieces_of(name)) for layout in engines.values()) for name in wanted}
    for member, layout in sources.items():
        verified = planned.programs[member].verification
        for tensor, dtype in zip(layout.tensors, verified.dtypes, strict=True):
            assert dtype == (here[tensor.name] if is_wanted[tensor.name] else "")
        for row in verified.rows.tolist():
            name, piece = layout.tensors[layout.pieces.tensor_P[row]].name, layout.piece(row)
            counts[name][tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))] += 1
    for name in wanted:
        assert (counts[name] == is_wanted[name]).all(), name
    for engine, layout in engines.items():
        assert planned.programs[engine].verification.rows.tolist() == list(range(len(layout.pieces)))


def check_fan_out(
    planned: TransferPlan, sources: dict[str, Layout], engines: dict[str, Layout], there: dict[str, str]
) -> None:
    """To a host without trainers every distinct part of a held box that is wanted there is sent once."""
    trainer_hosts = {layout.host for layout in sources.values()}
    for host in {layout.host for layout in engines.values()} - trainer_hosts:
        boxes = {
            (tensor.name, tensor.dtype, piece.box)
            for layout in engines.values()
            if layout.host == host
            for tensor in layout.tensors
            for piece in layout.pieces_of(tensor.name)
        }
        parts = {
            (name, dtype, piece.box.intersect(box))
            for name, dtype, box in boxes
            for layout in sources.values()
            for piece in layout.pieces_of(name)
        }
        item_sizes = {(name, dtype): min(ITEM_SIZES[dtype], ITEM_SIZES[there[name]]) for name, dtype, _ in parts}
        expected = sum(part.num_elements * item_sizes[name, dtype] for name, dtype, part in parts if part)
        sent = sum(k.num_bytes for k in planned.links if k.round == 0 and engines[k.destination].host == host)
        assert sent == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_missing_part_is_refused_by_tensor_and_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = grid(data, shape)
    lost = data.draw(st.sampled_from(boxes))
    name = "model.norm.weight"
    held = simple({name: (shape, "float32")}, boxes={name: [box for box in boxes if box != lost]})
    with pytest.raises(CoverageError) as caught:
        plan({"trainer-0": held}, {"rollout-0": simple({name: (shape, "float32")}, PRIVATE)}, allow_alias=True)
    named = re.search(r"rollout-0 wants model\.norm\.weight\[(.*)\], which no trainer holds", str(caught.value))
    assert named, str(caught.value)
    spans = [tuple(map(int, span.split(":"))) for span in named[1].split(", ") if span]
    missing = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    assert lost.contains(missing), str(caught.value)


# --- cases written by hand ---


def rows(name: str, shape: tuple[int, int], spans: list[tuple[int, int]], host: str = "host") -> Layout:
    """Spans of rows, one after the other in one storage."""
    builder = LayoutBuilder(host)
    tensor = builder.tensor(name, shape, "float32")
    storage = builder.storage("s", sum(b - a for a, b in spans) * shape[1] * 4, SHARED)
    offset = 0
    for start, stop in spans:
        builder.add(tensor, Box((start, 0), (stop - start, shape[1])), storage, offset, (shape[1] * 4, 4))
        offset += (stop - start) * shape[1] * 4
    return builder.build()


def only(planned: TransferPlan, engine: str = "rollout-0") -> tuple[int, ...]:
    """Return the shape of the only copy of an engine."""
    (transfer,) = planned.programs[engine].receives
    assert len(transfer.copies) == 1
    return tuple(transfer.copies.shape_CD[0].tolist())


def test_adjacent_rows_are_one_copy() -> None:
    spans = [(0, 2), (2, 5), (5, 8)]
    planned = plan({"t": rows("q", (8, 5), spans)}, {"rollout-0": rows("q", (8, 5), [(0, 8)])}, allow_alias=False)
    assert only(planned) == (40,)


def test_replicas_send_long_ranges_however_an_engine_lists_its_pieces() -> None:
    tensors = {f"w{index}": ((16, 4), "float32") for index in range(8)}
    builder = LayoutBuilder("infer")
    fused = builder.storage("fused", 8 * 256)
    for index in (3, 0, 6, 5, 1, 7, 2, 4):
        tensor = builder.tensor(f"w{index}", (16, 4), "float32")
        builder.add(tensor, whole((16, 4)), fused, index * 256, (16, 4))
    source = LayoutBuilder("train")
    storage = source.storage("flat", 8 * 256)
    for index, (name, (shape, dtype)) in enumerate(tensors.items()):
        source.add(source.tensor(name, shape, dtype), whole(shape), storage, index * 256, (16, 4))
    sources = {name: source.build() for name in ("t0", "t1")}
    planned = plan(sources, {"e": builder.build()}, allow_alias=False, grain=1)
    assert [t.copies.shape_CD.tolist() for t in planned.programs["e"].receives] == [[[256]], [[256]]]


def test_columns_of_many_tensors_at_equal_distances_are_one_copy() -> None:
    """A column shard of every expert, out of one grouped parameter into another."""
    names = [f"expert.{index}" for index in range(6)]
    source, engine = LayoutBuilder("host"), LayoutBuilder("host")
    grouped, own = source.storage("w2", 6 * 4 * 8 * 4, SHARED), engine.storage("w2", 6 * 4 * 2 * 4)
    for index, name in enumerate(names):
        source.add(source.tensor(name, (4, 8), "float32"), whole((4, 8)), grouped, index * 4 * 8 * 4, (32, 4))
        engine.add(engine.tensor(name, (4, 8), "float32"), Box((0, 2), (4, 2)), own, index * 4 * 2 * 4, (8, 4))
    planned = plan({"t": source.build()}, {"rollout-0": engine.build()}, allow_alias=False)
    assert only(planned) == (24, 2)


def test_experts_at_other_distances_are_a_copy_of_one_more_dimension() -> None:
    source, engine = LayoutBuilder("host"), LayoutBuilder("host")
    grouped, own = source.storage("w2", 6 * 100 * 4, SHARED), engine.storage("w2", 6 * 4 * 2 * 4)
    for index in range(6):
        tensor = source.tensor(f"expert.{index}", (4, 8), "float32")
        source.add(tensor, whole((4, 8)), grouped, index * 100 * 4, (32, 4))
        tensor = engine.tensor(f"expert.{index}", (4, 8), "float32")
        engine.add(tensor, Box((0, 2), (4, 2)), own, index * 4 * 2 * 4, (8, 4))
    planned = plan({"t": source.build()}, {"rollout-0": engine.build()}, allow_alias=False)
    assert only(planned) == (6, 4, 2)


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_replicas_send_even_shares_even_of_one_tensor(num_replicas: int, num_engines: int) -> None:
    tensors = {"embedding": ((997, 16), "float32"), "norm": ((16,), "float32"), "q": ((64, 16), "float32")}
    sources = {f"t{index}": simple(tensors, PRIVATE, f"train-{index}") for index in range(num_replicas)}
    engines = {f"e{index}": simple(tensors, PRIVATE, f"infer-{index}") for index in range(num_engines)}
    surveyed = survey(sources, engines, allow_alias=False, grain=64)
    total = num_engines * (997 + 1 + 64) * 64
    assert set(surveyed.egress) == set(sources)
    for sent in surveyed.egress.values():
        assert abs(sent - total / num_replicas) <= 2 * 64
    assert set(surveyed.ingress.values()) == {total // num_engines}


def test_a_rank_that_alone_holds_much_sends_less_of_what_is_replicated() -> None:
    tensors = {"expert": ((100, 16), "float32"), "dense": ((300, 16), "float32")}
    sources = {
        f"t{index}": simple(tensors, PRIVATE, "train", boxes={"dense": [whole((300, 16))], "expert": experts})
        for index, experts in enumerate([[whole((100, 16))], [], []])
    }
    surveyed = survey(sources, {"e": simple(tensors, PRIVATE, "infer")}, allow_alias=False, grain=64)
    total = 400 * 64
    assert all(abs(sent - total / 3) <= 2 * 64 for sent in surveyed.egress.values()), surveyed.egress


def test_shares_take_into_account_what_other_replicas_have_given() -> None:
    """Two of three ranks hold a matrix of 300 rows, all three another of 300: the third sends most of that."""
    tensors = {"pair": ((300, 16), "float32"), "all": ((300, 16), "float32")}
    boxes = [whole((300, 16))]
    sources = {
        name: simple(tensors, PRIVATE, "train", boxes={"all": boxes, "pair": boxes if name != "t2" else []})
        for name in ("t0", "t1", "t2")
    }
    surveyed = survey(sources, {"e": simple(tensors, PRIVATE, "infer")}, allow_alias=False, grain=64)
    assert all(abs(sent - 200 * 64) <= 2 * 64 for sent in surveyed.egress.values()), surveyed.egress


def test_an_engine_within_reach_and_one_that_is_not_share_nothing() -> None:
    tensors = {"q": ((64, 16), "float32")}
    engines = {
        "near": simple(tensors, PRIVATE, "host", "GPU-1"),
        "far": simple(tensors, PRIVATE, "host", "cpu"),
    }
    planned = plan({"t": simple(tensors, CUDA, "host", "GPU-0")}, engines, allow_alias=False)
    found = {(link.source, link.destination, link.transport, link.num_bytes) for link in planned.links}
    assert found == {("t", "near", "cuda_ipc", 4096), ("t", "far", "stream", 4096)}


def test_engines_of_a_host_share_what_comes_from_outside() -> None:
    tensors = {"q": ((1024, 16), "float32")}
    engines = {f"e{index}": simple(tensors, PRIVATE, "infer") for index in range(4)}
    planned = plan({"t": simple(tensors, PRIVATE, "train")}, engines, allow_alias=False, grain=64)
    outside = {k.destination: k.num_bytes for k in planned.links if k.round == 0}
    assert outside == dict.fromkeys(engines, 256 * 64)
    inside = [(k.source, k.destination, k.num_bytes) for k in planned.links if k.round == 1]
    assert sorted(inside) == [(a, b, 256 * 64) for a in engines for b in engines if a != b]
    (transfer_group,) = planned.transfer_groups
    assert transfer_group.members == (*engines, "t")


def test_engines_without_fan_out_have_meshes_of_their_own() -> None:
    tensors = {"q": ((1024, 16), "float32")}
    engines = {f"e{index}": simple(tensors, PRIVATE, f"infer-{index}") for index in range(2)}
    planned = plan({"t": simple(tensors, PRIVATE, "train")}, engines, allow_alias=False)
    assert [transfer_group.members for transfer_group in planned.transfer_groups] == [("e0", "t"), ("e1", "t")]
    assert planned.programs["t"].transfer_groups == planned.transfer_groups


def test_receivers_start_at_different_senders_and_both_ends_agree_on_the_order() -> None:
    boxes = [Box((start, 0), (4, 4)) for start in range(0, 16, 4)]
    tensors = {"q": ((16, 4), "float32")}
    sources = {f"t{i}": simple(tensors, PRIVATE, "train", boxes={"q": [box]}) for i, box in enumerate(boxes)}
    engines = {f"e{index}": simple(tensors, PRIVATE, f"infer-{index}") for index in range(4)}
    planned = plan(sources, engines, allow_alias=False)
    for turn in range(4):
        assert {planned.programs[engine].receives[turn].source for engine in engines} == set(sources)
        assert {planned.programs[source].sends[turn].destination for source in sources} == set(engines)
        for engine in engines:
            transfer = planned.programs[engine].receives[turn]
            assert planned.programs[transfer.source].sends[turn] == transfer


@pytest.mark.parametrize(
    ("address", "host", "device", "transport"),
    [
        (SHARED, "host", "cpu", "shm"),
        (SHARED, "host", "GPU-1", "shm"),
        (CUDA, "host", "GPU-1", "cuda_ipc"),
        (CUDA, "host", "cpu", "stream"),
        (PRIVATE, "host", "cpu", "stream"),
        (SHARED, "other", "cpu", "stream"),
        (CUDA, "other", "GPU-1", "stream"),
    ],
)
def test_the_transport_follows_from_where_both_are(address: Address, host: str, device: str, transport: str) -> None:
    tensors = {"q": ((4, 5), "float32")}
    source, engine = simple(tensors, address), simple(tensors, PRIVATE, host, device)
    planned = plan({"t": source}, {"e": engine}, allow_alias=False)
    assert [link.transport for link in planned.links] == [transport]
    assert [t.transport for t in planned.programs["e"].receives] == [transport]


def test_a_replica_within_reach_is_preferred() -> None:
    tensors = {"q": ((4000, 5), "float32")}
    sources = {"far": simple(tensors, SHARED, "other"), "near": simple(tensors, SHARED, "host")}
    surveyed = survey(sources, {"e": simple(tensors, PRIVATE, "host")}, allow_alias=False, grain=1)
    assert surveyed.egress == {"near": 80000}


# --- aliases ---


def test_whole_storages_of_one_type_are_aliased_and_replicas_do_not_part_them() -> None:
    tensors = {"q": ((4, 5), "float32"), "k": ((7,), "float16")}
    sources = {name: simple(tensors) for name in ("t0", "t1")}
    planned = plan(sources, {"e": simple(tensors, PRIVATE)}, allow_alias=True, grain=1)
    assert {t.transport for t in planned.programs["e"].receives} == {"alias"}
    assert sum(link.num_bytes for link in planned.links) == 0


@pytest.mark.parametrize(
    ("source", "engine"),
    [
        (simple({"q": ((8, 5), "float32")}), simple({"q": ((8, 5), "bfloat16")}, PRIVATE)),
        (rows("q", (8, 5), [(4, 8), (0, 4)]), rows("q", (8, 5), [(0, 8)])),
        (rows("q", (8, 5), [(0, 8)], "other"), rows("q", (8, 5), [(0, 8)])),
        (simple({"q": ((8, 5), "float32")}, PRIVATE), simple({"q": ((8, 5), "float32")}, PRIVATE)),
        (simple({"q": ((8, 5), "float32")}), simple({"q": ((8, 5), "float32")}, PRIVATE, device="gpu-0")),
    ],
    ids=["another element type", "two ranges", "another host", "private memory", "a GPU"],
)
def test_what_is_not_one_shared_range_of_one_type_is_copied(source: Layout, engine: Layout) -> None:
    planned = plan({"t": source}, {"e": engine}, allow_alias=True)
    assert all(transfer.transport != "alias" for transfer in planned.programs["e"].receives)


# --- refusals ---


def test_overlapping_boxes_of_two_ranks_are_refused() -> None:
    sources = {"t0": rows("q", (8, 5), [(0, 5)]), "t1": rows("q", (8, 5), [(4, 8)])}
    with pytest.raises(RefitError, match=r"t0 holds q\[0:5, 0:5\] and t1 holds q\[4:8, 0:5\]"):
        plan(sources, {"e": rows("q", (8, 5), [(0, 8)])}, allow_alias=False)


@pytest.mark.parametrize(
    ("sources", "engines", "error", "message"),
    [
        ({"t": ((4,), "float32")}, {"e": ((5,), "float32")}, CoverageError, r"t holds w of shape \(4,\), e .* \(5,\)"),
        ({"t": ((4,), "int32")}, {"e": ((4,), "float32")}, RefitError, "e wants w as float32, t holds int32"),
        ({}, {"e": ((4,), "float32")}, CoverageError, r"e wants w\[0:4\], which no trainer holds"),
        (
            {"t": ((4,), "float32")},
            {"e": ((4,), "float32"), "f": ((4,), "float16")},
            RefitError,
            "e has w as float32, f as float16",
        ),
        ({"t": ((4,), "float32")}, {"t": ((4,), "float32")}, RefitError, "t is both a source and a destination"),
        ({"t": ((4,), "float32")}, {"e": ((4,), "float8_e4m3fn")}, RefitError, "there is no conversion"),
    ],
    ids=["shape", "conversion", "absent", "two types", "both sides", "float8 without blocks"],
)
def test_contradictions_are_refused(
    sources: dict[str, tuple[tuple[int, ...], str]],
    engines: dict[str, tuple[tuple[int, ...], str]],
    error: type[Exception],
    message: str,
) -> None:
    held = {member: simple({"w": tensor}) for member, tensor in sources.items()}
    wanted = {member: simple({"w": tensor}, PRIVATE) for member, tensor in engines.items()}
    with pytest.raises(error, match=message):
        plan(held, wanted, allow_alias=False)


def test_a_replica_on_the_engines_own_gpu_is_read_before_its_neighbours() -> None:
    sources = {f"t{i}": simple({"w": ((64, 8), "float32")}, CUDA, "a", f"gpu-{i}") for i in range(3)}
    engines = {f"e{i}": simple({"w": ((64, 8), "float32")}, PRIVATE, "a", f"gpu-{i}") for i in (2, 0, 3)}
    planned = plan(sources, engines, allow_alias=False, grain=1)
    links = {(link.source, link.destination): link.num_bytes for link in planned.links}
    assert links.pop(("t0", "e0")) == links.pop(("t2", "e2")) == 64 * 8 * 4
    assert {destination for _, destination in links} == {"e3"}, "on a GPU without a trainer: from any"
    assert sum(links.values()) == 64 * 8 * 4


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float64"])
def test_what_is_read_is_counted_in_the_sources_type(wanted: str) -> None:
    source, engine = (simple({"w": ((64, 8), t)}, a, "a", "gpu") for t, a in (("float32", CUDA), (wanted, PRIVATE)))
    (link,) = plan({"t": source}, {"e": engine}, allow_alias=False).links
    assert (link.num_read, link.num_bytes) == (64 * 8 * 4, 64 * 8 * min(4, ITEM_SIZES[wanted]))


def test_what_nobody_wants_is_not_verified() -> None:
    held = simple({"q": ((4,), "float32"), "optimizer": ((4,), "float32")})
    planned = plan({"t": held}, {"e": simple({"q": ((4,), "bfloat16")}, PRIVATE)}, allow_alias=False)
    assert planned.programs["t"].verification.dtypes == ("bfloat16", "")
    assert planned.programs["t"].verification.rows.tolist() == [0]


def test_replicas_digest_even_shares() -> None:
    tensors = {f"w{index}": ((100 + index, 4), "float32") for index in range(40)}
    sources = {f"t{index}": simple(tensors) for index in range(4)}
    planned = plan(sources, {"e": simple(tensors, PRIVATE)}, allow_alias=True)
    shares = [
        sum(layout.piece(row).box.num_elements for row in planned.programs[member].verification.rows.tolist())
        for member, layout in sources.items()
    ]
    assert max(shares) - min(shares) <= 2 * 140 * 4


def test_replicas_are_planned_once_as_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []

    def counted(engine: str, layout: Layout, tensors: PairedTensors, holdings: SourceShards) -> DestinationShards:
        resolved.append(engine)
        return resolve(engine, layout, tensors, holdings)

    monkeypatch.setattr(planner, "resolve", counted)
    tensors = {"q": ((4, 4), "float32")}
    engines = {f"e{index}": simple(tensors, PRIVATE, f"infer-{index // 2}") for index in range(6)}
    engines["other"] = simple(tensors, PRIVATE, boxes={"q": [Box((0, 0), (2, 4))]})
    plan({"t": simple(tensors)}, engines, allow_alias=False)
    assert resolved == ["e0", "other"]


def test_values_are_told_apart() -> None:
    """The comparisons above mean something only if no two elements are alike."""
    values: Values = number({"a": (3, 4), "b": (5,)})
    everything = np.concatenate([v.ravel() for v in values.values()])
    assert len(np.unique(everything.astype(np.float16))) == 17


def test_engines_cut_differently_share_what_they_have_in_common() -> None:
    """One engine wants all, two want halves; trainers hold quarters: every quarter is sent to the node once."""
    tensors = {"q": ((1024, 16), "float32")}
    quarters = [Box((start, 0), (256, 16)) for start in range(0, 1024, 256)]
    halves = [Box((start, 0), (512, 16)) for start in (0, 512)]
    sources = {f"t{i}": simple(tensors, PRIVATE, "train", boxes={"q": [box]}) for i, box in enumerate(quarters)}
    engines = {f"e{i}": simple(tensors, PRIVATE, "infer", boxes={"q": [box]}) for i, box in enumerate(halves)}
    engines["all"] = simple(tensors, PRIVATE, "infer")
    surveyed = survey(sources, engines, allow_alias=False, grain=64)
    assert sum(link.num_bytes for link in surveyed.links if link.round == 0) == 1024 * 64
    assert surveyed.ingress == {"e0": 512 * 64, "e1": 512 * 64, "all": 1024 * 64}
