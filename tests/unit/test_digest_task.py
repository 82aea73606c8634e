"""Digests of what a layout describes: read from where it says, converted, staged, sampled, and a little at a time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from digest_harness import Weights, boxes_between, hold, part, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit import weights as held
from tandem.refit.digests import slices as digest_slices
from tandem.refit.digests import task as digest_task
from tandem.refit.digests.slices import ElementSampling, everything
from tandem.refit.digests.task import DigestTask, digest_box, digest_layout
from tandem.refit.layout import Box, LayoutBuilder, whole
from tandem.refit.planner import plan
from tandem.refit.program import NOTHING, ProcessVerification, Quantisation, QuantisedRegions, QuantizedDestinations

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def finite(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def digests_of(weights: Weights) -> list[int]:
    return [digest_box(name, tuple(values.shape), whole(values.shape), values) for name, values in weights.items()]


def test_a_layout_is_read_from_where_it_says_that_it_lies() -> None:
    q, k, scale = (random_tensor(shape, BFLOAT16, seed) for seed, shape in enumerate([(4, 6), (2, 6), ()]))
    fused = torch.cat((random_tensor((1, 6), BFLOAT16, 9), q, k))  # a row of something else comes first
    held = torch.empty(fused.numel() + 3, dtype=BFLOAT16)[3:].view_as(fused).copy_(fused)  # not at its storage's start
    builder = LayoutBuilder("host")
    of_q, of_k, of_scale = (
        builder.tensor(name, x.shape, "bfloat16") for name, x in zip("qks", (q, k, scale), strict=True)
    )
    builder.tensor("held by nobody here", (3,), "bfloat16")
    qk, alone = builder.storage("qk", 84), builder.storage("scale", 2)
    builder.add(of_q, Box((0, 0), (4, 2)), qk, 12, (12, 2))
    builder.add(of_q, Box((0, 2), (4, 4)), qk, 16, (12, 2))
    builder.add(of_k, whole((2, 6)), qk, 60, (12, 2))
    builder.add(of_scale, whole(()), alone, 0, ())
    layout, storages = builder.build(), {"qk": held, "scale": scale}
    expected = [*digests_of({"q": q, "k": k, "s": scale}), 0]
    assert digest_layout(layout, storages).tolist() == expected
    held[0] += 1  # outside both tensors
    assert digest_layout(layout, storages).tolist() == expected
    held[1, 2] = 1.0
    differs = digest_layout(layout, storages) != np.array(expected, np.uint64)
    assert differs.tolist() == [True, False, False, False]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([FLOAT32, BFLOAT16, torch.int8]), margin=st.integers(0, 2))
def test_any_sharding_and_any_strides_give_the_same_numbers(
    data: st.DataObject, dtype: torch.dtype, margin: int
) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 7), max_size=4), min_size=1, max_size=3))
    weights = {f"tensor {n}": random_tensor(shape, dtype, n) for n, shape in enumerate(shapes)}
    held: list[dict[str, list[Box]]] = [{}, {}, {}]
    for name, values in weights.items():
        cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n - 1)))), n] if n > 1 else [0, n] for n in values.shape]
        for box in boxes_between(cuts):
            data.draw(st.sampled_from(held)).setdefault(name, []).append(box)
    one_in = data.draw(st.integers(1, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_slices, "_SMALL_TENSOR", 8)
        for sampling in (None, ElementSampling(data.draw(st.integers(0, 99)), one_in)):
            total = sum(digest_layout(*hold(weights, boxes, margin=margin), sampling=sampling) for boxes in held)
            assert np.array_equal(total, digest_layout(*hold(weights), sampling=sampling))


def test_a_trainer_digests_its_weights_as_engines_hold_them() -> None:
    weights = {"a": finite((300, 700)), "b": finite((2, 3, 5), 1), "c": finite((7,), 2), "unwanted": finite((4,), 3)}
    layout, storages = hold(weights, margin=1)
    held = {name: values.to(BFLOAT16) for name, values in weights.items()}
    verification = ProcessVerification(np.arange(4), ("bfloat16", "bfloat16", "float32", ""))
    expected = digests_of({"a": held["a"], "b": held["b"], "c": weights["c"]})
    assert digest_layout(layout, storages, verification).tolist() == [*expected, 0]


def test_only_the_rows_of_the_verification_are_digested() -> None:
    weights = {"a": random_tensor((6, 4), FLOAT32)}
    top, bottom = boxes_between([[0, 2, 6], [0, 4]])
    layout, storages = hold(weights, {"a": [top, bottom]})
    share = digest_layout(layout, storages, ProcessVerification(np.array([1]), ("float32",)))
    assert share.tolist() == [digest_box("a", (6, 4), bottom, part(weights["a"], bottom))]
    assert digest_layout(layout, storages, NOTHING).tolist() == [0]


# --- quantised on the way ---


def staged_member() -> tuple[LayoutBuilder, Weights, Quantisation]:
    """Hold columns 3 to 8 of a 5 × 8 tensor as float8 in blocks of 2 × 2; its scales; and another tensor."""
    source = random_tensor((5, 8), BFLOAT16)
    builder = LayoutBuilder("host")
    plain = builder.tensor("plain", (4,), "bfloat16")
    value = builder.tensor("w", (5, 8), "float8_e4m3fn", block=(2, 2), scales="w_scale_inv")
    scale = builder.tensor("w_scale_inv", (3, 4), "float32")
    values, scales = builder.storage("values", 25), builder.storage("scales", 36)
    builder.add(plain, whole((4,)), builder.storage("plain", 8), 0, (2,))
    builder.add(value, Box((0, 3), (5, 5)), values, 0, (5, 1))
    builder.add(scale, Box((0, 1), (3, 3)), scales, 0, (12, 4))
    staging = torch.zeros(64 + 60, dtype=torch.uint8)
    staging[64:].view(BFLOAT16).view(5, 6).copy_(source[:, 2:])  # from where the first block starts
    no_places = QuantizedDestinations(
        *(np.zeros((0, 2) if name.endswith("D") else 0, int) for name in QuantizedDestinations.__struct_fields__)
    )
    regions = QuantisedRegions(np.array([0]), np.array([[0, 2]]), np.array([[5, 6]]), np.array([64]))
    quantisation = Quantisation(
        dtype="float8_e4m3fn",
        block=(2, 2),
        scales_dtype="float32",
        staging="staging",
        staging_dtype="bfloat16",
        tensors=("w",),
        storages=("values", "scales", "plain"),
        regions=regions,
        values=no_places,
        scales=no_places,
    )
    memory = {
        "plain": random_tensor((4,), BFLOAT16, 1),
        "values": torch.zeros(25, dtype=torch.uint8),
        "scales": torch.ones(9),
        "staging": staging,
        "source": source,
    }
    return builder, memory, quantisation


def test_quantised_tensors_are_read_before_quantisation() -> None:
    builder, memory, quantisation = staged_member()
    layout, source = builder.build(), memory["source"]
    box = Box((0, 3), (5, 5))
    expected = [*digests_of({"plain": memory["plain"]}), digest_box("w", (5, 8), box, part(source, box)), 0]
    assert digest_layout(layout, memory, quantisations=[quantisation]).tolist() == expected
    sampled = digest_layout(layout, memory, quantisations=[quantisation], sampling=ElementSampling(1, 3))
    assert sampled.tolist() == expected  # small tensors are sampled whole
    memory["staging"][-1] ^= 1
    assert digest_layout(layout, memory, quantisations=[quantisation])[1] != expected[1]


def test_a_piece_that_is_not_staged_is_named() -> None:
    builder, memory, quantisation = staged_member()
    builder.add(1, Box((0, 0), (5, 1)), 0, 0, (5, 1))
    with pytest.raises(RefitError, match=r"w\[0:5, 0:1\] is quantised but not staged"):
        digest_layout(builder.build(), memory, quantisations=[quantisation])


def test_values_that_were_copied_with_their_scales_are_digested_as_they_are() -> None:
    builder, memory, _ = staged_member()
    before = digest_layout(builder.build(), memory)
    memory["scales"][4] += 1
    memory["values"][7] += 1
    assert (digest_layout(builder.build(), memory) != before).tolist() == [False, True, True]


# --- sampling ---


def test_versions_in_succession_read_every_element() -> None:
    weights = {"large": random_tensor((67, 90), FLOAT32), "small": random_tensor((3,), FLOAT32)}
    weights |= {"deep": random_tensor((3, 41, 50), FLOAT32), "vector": random_tensor((5003,), BFLOAT16)}
    layout, storages = hold(weights)
    everywhere = digest_layout(layout, storages)
    for first in (0, 11):
        samples = [digest_layout(layout, storages, sampling=ElementSampling(first + n, 8)) for n in range(8)]
        is_small = np.array([False, True, False, False])
        assert np.array_equal(sum(samples)[~is_small], everywhere[~is_small])
        # the large ones are touched at every version, the small one is read whole each time
        assert [sum(sample[n] != 0 for sample in samples) for n in range(4)] == [8, 8, 8, 8]
        assert all(sample[is_small] == everywhere[is_small] for sample in samples)
    assert np.array_equal(digest_layout(layout, storages, sampling=ElementSampling(3, 1)), everywhere)


def test_a_sample_is_read_alone_and_the_same_each_time() -> None:
    layout, storages = hold({"w": random_tensor((1024, 512), FLOAT32)})
    tasks = [DigestTask(layout, storages, sampling=ElementSampling(5, 16)) for _ in range(2)]
    assert [task.expected_s for task in tasks] == [tasks[0].seconds_for(1024 * 512 * 4 // 16)] * 2
    assert tasks[0].result() == tasks[1].result()
    first = ElementSampling(5, 16).first("w")
    rows = torch.arange(first, 1024, 16)
    before = digest_layout(layout, storages, sampling=ElementSampling(5, 16))
    others = torch.ones(1024, dtype=torch.bool).index_fill_(0, rows, False)
    storages["w 0"][others] += 1.0
    assert digest_layout(layout, storages, sampling=ElementSampling(5, 16)) == before
    storages["w 0"].view(torch.int32)[first + 16, 3] ^= 1
    assert digest_layout(layout, storages, sampling=ElementSampling(5, 16)) != before


def test_samples_of_more_than_a_slab_do_not_depend_on_sharding() -> None:
    weights = {"tall": random_tensor((6000, 300), FLOAT32), "vector": random_tensor((50_000,), BFLOAT16)}
    cuts = {"tall": [[0, 1001, 6000], [0, 300]], "vector": [[0, 7, 50_000]]}
    shards = hold(weights, {name: boxes_between(edges) for name, edges in cuts.items()})
    everywhere = digest_layout(*hold(weights))
    samples = [digest_layout(*hold(weights), sampling=ElementSampling(version, 2)) for version in range(2)]
    assert np.array_equal(samples[0] + samples[1], everywhere)
    assert np.array_equal(digest_layout(*shards, sampling=ElementSampling(1, 2)), samples[1])


def test_no_sample_is_smaller_than_nothing() -> None:
    with pytest.raises(RefitError, match="cannot sample one row in 0"):
        digest_layout(*hold({"w": finite((4, 4))}), sampling=ElementSampling(0, 0))


# --- a little at a time ---


def test_advance_returns_soon_after_its_time() -> None:
    layout, storages = hold({f"w{n}": finite((2048, 2048), n) for n in range(4)})  # 64 MB
    expected = digest_layout(layout, storages)
    task = DigestTask(layout, storages)
    calls, longest = 0, 0.0
    done = False
    while not done:
        started = time.thread_time()
        done = task.advance(0.002)
        longest = max(longest, time.thread_time() - started)
        calls += 1
    assert calls > 2
    assert longest < 0.05  # the time of a slab, on a machine that does much else
    assert np.array_equal(task.result(), expected)
    assert task.advance(0.0)


def test_no_time_is_a_slab_each() -> None:
    layout, storages = hold({"a": finite((2048, 512)), "b": finite((3,))})  # 4 MiB, two slabs, and one
    task = DigestTask(layout, storages)
    assert [task.advance(0.0) for _ in range(4)] == [False, False, False, True]
    assert np.array_equal(task.result(), digest_layout(layout, storages))


def test_a_result_can_be_had_at_once() -> None:
    layout, storages = hold({"a": finite((2048, 512))})
    assert np.array_equal(DigestTask(layout, storages, everything(layout)).result(), digest_layout(layout, storages))


def test_wide_elements_are_refused() -> None:
    with pytest.raises(RefitError, match="digests are of elements of 1, 2 or 4 bytes"):
        digest_layout(*hold({"w": torch.zeros(3, dtype=torch.float64)}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_gpu_gives_the_same_numbers(dtype: torch.dtype) -> None:
    weights = {"w": random_tensor((300, 5000), dtype), "deep": random_tensor((3, 7, 90), dtype, 1)}
    layout, storages = hold(weights, margin=1)
    there = {name: storage.cuda() for name, storage in storages.items()}
    for sampling in (None, ElementSampling(2, 4)):
        expected = digest_layout(layout, storages, sampling=sampling)
        assert np.array_equal(digest_layout(layout, there, sampling=sampling), expected)
    # How long an engine puts a digest off follows from where the weights are.
    assert DigestTask(layout, there).expected_s < 0.1 * DigestTask(layout, storages).expected_s


def test_a_list_of_slices_serves_every_version() -> None:
    layout, storages = hold({"w": random_tensor([128, 64], FLOAT32, 1), "b": random_tensor([64], FLOAT32, 2)})
    first = DigestTask(layout, storages)
    for sampling in (None, ElementSampling(3, 16), ElementSampling(4, 16)):
        again = DigestTask(layout, storages, sampling=sampling, digest_list=first.digest_list)
        assert again.digest_list is first.digest_list
        assert again.result().tolist() == DigestTask(layout, storages, sampling=sampling).result().tolist()


def test_weights_list_what_they_digest_once_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = 0

    class Counted(digest_slices.DigestList):
        def __init__(self, *arguments: Any) -> None:
            nonlocal listed
            listed += 1
            super().__init__(*arguments)

    values = random_tensor([128, 64], FLOAT32, 1)
    layout, storages = hold({"w": values})
    full, sampled = (digest_layout(layout, storages, sampling=each).tolist() for each in (None, ElementSampling(0, 16)))
    monkeypatch.setattr(digest_task, "DigestList", Counted)
    wanted, _ = hold({"w": values})
    programs = plan({"t": layout}, {"e": msgspec.structs.replace(wanted, host="b")}, allow_alias=False).programs
    weights = held.Weights(layout, storages)
    for expected in (1, 2):
        weights.install([programs["t"]])
        found = [weights.digest_task(sampling).result().tolist() for sampling in (None, ElementSampling(0, 16), None)]
        assert listed == expected
        assert found == [full, sampled, full]
