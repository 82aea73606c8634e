"""Meshes as trainers and engines have them: experts and stages on one side, tensor-parallel replicas on the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_harness import ADDRESSES, PRIVATE, SHARED, number, part, places, run

from tandem.refit.layout import Address, Box, Layout, LayoutBuilder, Tensor, whole
from tandem.refit.planner import plan, survey

LAYERS, EXPERTS, HIDDEN, WIDTH, HEADS = 4, 4, 4, 8, 8
VOCABULARY, PADDED = 13, 16

TENSORS = (
    Tensor("embed", (VOCABULARY, HIDDEN), "float32"),
    *(
        Tensor(f"{layer}.{name}", shape, "float32")
        for layer in range(LAYERS)
        for name, shape in (
            ("norm", (HIDDEN,)),
            ("q", (HEADS, HIDDEN)),
            ("k", (2, HIDDEN)),
            ("o", (HIDDEN, HEADS)),
            *((f"expert.{e}.{kind}", (WIDTH, HIDDEN)) for e in range(EXPERTS) for kind in ("gate", "up")),
        )
    ),
)
INDEX = {tensor.name: index for index, tensor in enumerate(TENSORS)}
ROW = HIDDEN * 4


def trainer(stage: int, num_stages: int, rank: int, num_ranks: int, host: str, address: Address) -> Layout:
    """Pipeline stages; experts over the ranks of a stage, fused and grouped; all else replicated among them."""
    builder = LayoutBuilder(host)
    builder.add_tensors(TENSORS)
    per_rank = EXPERTS // num_ranks
    for layer in range(stage * LAYERS // num_stages, (stage + 1) * LAYERS // num_stages):
        for name in ("norm", "q", "k", "o"):
            tensor = INDEX[f"{layer}.{name}"]
            shape = TENSORS[tensor].shape
            storage = builder.storage(f"{layer}.{name}", int(np.prod(shape)) * 4, address)
            builder.add(tensor, whole(shape), storage, 0, (shape[-1] * 4, 4)[-len(shape) :])
        grouped = builder.storage(f"{layer}.fc1", per_rank * 2 * WIDTH * ROW, address)
        experts = np.arange(rank * per_rank, (rank + 1) * per_rank)
        for index, kind in enumerate(("gate", "up")):
            tensors = [INDEX[f"{layer}.expert.{expert}.{kind}"] for expert in experts]
            offsets = (2 * np.arange(per_rank) + index) * WIDTH * ROW
            builder.add_many(tensors, (0, 0), (WIDTH, HIDDEN), grouped, offsets, (ROW, 4))
    if stage == 0:
        padded = builder.storage("embed", PADDED * ROW, address)
        builder.add(0, whole((VOCABULARY, HIDDEN)), padded, 0, (ROW, 4))
    return builder.build()


def engine(rank: int, num_ranks: int, host: str, device: str) -> Layout:
    """Tensor parallel: fused queries and keys, grouped experts, a padded vocabulary; keys replicated where too few."""
    builder = LayoutBuilder(host, device)
    builder.add_tensors(TENSORS)
    width, heads, rows = WIDTH // num_ranks, HEADS // num_ranks, PADDED // num_ranks
    keys = max(1, 2 // num_ranks)
    for layer in range(LAYERS):
        builder.add(INDEX[f"{layer}.norm"], whole((HIDDEN,)), builder.storage(f"{layer}.norm", ROW), 0, (4,))
        fused = builder.storage(f"{layer}.qk", (heads + keys) * ROW)
        builder.add(INDEX[f"{layer}.q"], Box((rank * heads, 0), (heads, HIDDEN)), fused, 0, (ROW, 4))
        first = rank * 2 // num_ranks
        builder.add(INDEX[f"{layer}.k"], Box((first, 0), (keys, HIDDEN)), fused, heads * ROW, (ROW, 4))
        o = builder.storage(f"{layer}.o", HIDDEN * heads * 4)
        builder.add(INDEX[f"{layer}.o"], Box((0, rank * heads), (HIDDEN, heads)), o, 0, (heads * 4, 4))
        w13 = builder.storage(f"{layer}.w13", EXPERTS * 2 * width * ROW)
        for index, kind in enumerate(("gate", "up")):
            tensors = [INDEX[f"{layer}.expert.{expert}.{kind}"] for expert in range(EXPERTS)]
            offsets = (2 * np.arange(EXPERTS) + index) * width * ROW
            builder.add_many(tensors, (rank * width, 0), (width, HIDDEN), w13, offsets, (ROW, 4))
    held = min(rows, max(0, VOCABULARY - rank * rows))
    builder.add(0, Box((rank * rows, 0), (held, HIDDEN)), builder.storage("embed", rows * ROW), 0, (ROW, 4))
    return builder.build()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mesh_to_any_mesh(data: st.DataObject) -> None:
    powers = st.sampled_from([1, 2, 4])
    stages, ranks, shards, replicas = (data.draw(powers) for _ in range(4))
    per_host, per_node = data.draw(powers), data.draw(powers)
    address, device = data.draw(st.sampled_from(ADDRESSES)), data.draw(st.sampled_from(["cpu", "GPU-1"]))
    shared_hosts = data.draw(st.booleans())
    sources = {
        f"t{n}": trainer(n // ranks, stages, n % ranks, ranks, f"train-{n // per_host}", address)
        for n in range(stages * ranks)
    }
    node = "train" if shared_hosts else "infer"
    engines = {f"e{n}": engine(n % shards, shards, f"{node}-{n // per_node}", device) for n in range(shards * replicas)}
    planned = plan(sources, engines, allow_alias=data.draw(st.booleans()), grain=data.draw(st.sampled_from([1, 64])))
    values = number({tensor.name: tensor.shape for tensor in TENSORS})
    memories = run(planned, sources, engines, values)
    for name, layout in engines.items():
        for tensor, box, place in places(layout, memories[name]):
            np.testing.assert_array_equal(place, part(values[tensor], box), err_msg=f"{name} {tensor}{box}")
    verified = [
        (layout.tensors[layout.pieces.tensor_P[row]].name, layout.piece(row).box)
        for member, layout in sources.items()
        for row in planned.programs[member].verification.rows.tolist()
    ]
    assert sorted(name for name, _ in verified) == sorted(INDEX)


def test_grouped_experts_of_a_rank_come_in_one_copy_a_layer() -> None:
    sources = {f"t{n}": trainer(0, 1, n, 2, "train", SHARED) for n in range(2)}
    planned = plan(sources, {"e": engine(1, 4, "train", "cpu")}, allow_alias=False)
    for transfer in planned.programs["e"].receives:
        experts = [
            transfer.copies.shape_CD[row].tolist()
            for row in range(len(transfer.copies))
            if "expert" in transfer.tensors[transfer.copies.tensor_C[row]]
        ]
        assert experts == [[EXPERTS // 2 * 2, WIDTH // 4 * HIDDEN]] * LAYERS


def test_stages_of_even_size_send_even_shares() -> None:
    """Two stages of four ranks to four engines of another host: the experts and what is replicated, even."""
    sources = {f"t{n}": trainer(n // 4, 2, n % 4, 4, "train", PRIVATE) for n in range(8)}
    engines = {f"e{n}": engine(n % 4, 4, f"infer-{n}", "cpu") for n in range(4)}
    surveyed = survey(sources, engines, allow_alias=False, grain=1)
    for stage in range(2):
        sent = [surveyed.egress[f"t{stage * 4 + rank}"] for rank in range(4)]
        assert max(sent) - min(sent) <= 2 * HEADS * 4
    wanted = [sum(s.num_bytes for s in layout.storages) for layout in engines.values()]
    padding = [rows * ROW for rows in (0, 0, 0, 3)]
    assert [surveyed.ingress[name] for name in engines] == [a - b for a, b in zip(wanted, padding, strict=True)]
