"""Comparing digests: engines that hold the version pass, and damage at the receiver is caught and named."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from digest_harness import Member, Weights, even, hold, part, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.digests import comparison as digest_compare
from tandem.refit.digests.comparison import DigestVerdict, Held, compare, is_unchanged
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.digests.task import digest_layout
from tandem.refit.layout import Box, LayoutBuilder, whole
from tandem.refit.program import ProcessVerification

NUM_RANKS = 2
SAMPLED_ONE_IN = 4
Q, K, UP, NORM = "q_proj", "k_proj", "up_proj", "norm"


def make_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {Q: (96, 64), K: (96, 64), UP: (128, 64), NORM: (64,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def as_held(weights: Weights) -> Weights:
    return {name: values.to(torch.bfloat16) for name, values in weights.items()}


def digest(member: Member, sampling: ElementSampling | None = None, dtype: str = "bfloat16") -> Held:
    layout, storages = member
    verification = ProcessVerification(np.arange(len(layout.pieces)), (dtype,) * len(layout.tensors))
    return layout, digest_layout(layout, storages, verification, sampling=sampling)


def trainers(weights: Weights, sampling: ElementSampling | None = None) -> dict[str, Held]:
    """Two ranks with float32 shards: rows of each tensor, the norm on the first alone."""
    held = {}
    for rank in range(NUM_RANKS):
        boxes = {name: [even(values, 0, rank, NUM_RANKS)] for name, values in weights.items() if name != NORM}
        boxes[NORM] = [] if rank else [whole(weights[NORM].shape)]
        held[f"trainer-{rank}"] = digest(hold(weights, boxes), sampling)
    return held


def tensor_parallel(weights: Weights, cut: int = 1) -> dict[str, Member]:
    """Return an engine of two members: columns of each tensor, the norm on both; and a tensor of nobody else."""
    members = {}
    for rank in range(NUM_RANKS):
        boxes = {name: [even(values, cut, rank, NUM_RANKS)] for name, values in weights.items() if name != NORM}
        boxes[NORM] = [whole(weights[NORM].shape)]
        members[f"rank-{rank}"] = hold(weights, boxes, margin=1)
    return members


def test_an_engine_of_any_sharding_that_holds_the_version_passes() -> None:
    weights = make_weights()
    held = as_held(weights)
    engines = {
        "one": {"one": digest(hold(held))},
        "two": {name: digest(member) for name, member in tensor_parallel(held).items()},
        "part": {"part": digest(hold({Q: held[Q]}))},  # wants no more
    }
    verdict = compare(trainers(weights), engines)
    assert verdict == DigestVerdict((), digest=digest_compare.combine(*digest(hold(held))[1].tolist()))
    assert verdict.differing == {}


# --- damage at the receiver ---


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


def swap_q_and_k(held: Weights) -> None:
    held[Q], held[K] = held[K], held[Q]


def exchange_two_rows(held: Weights) -> None:
    held[Q][[17, 58]] = held[Q][[58, 17]]


def shift_a_shard(held: Weights) -> None:
    shard = held[UP][:64]
    shard.copy_(shard.roll(1, 0))


def exchange_shards(held: Weights) -> None:
    held[UP].copy_(held[UP].roll(64, 0))


def keep_a_stale_tensor(held: Weights) -> None:
    held[NORM] = as_held(make_weights(1))[NORM]


def negate_halves(held: Weights) -> None:
    bits(held[K])[:48] ^= -(2**15)


def negate_everything(held: Weights) -> None:
    bits(held[K]).bitwise_xor_(-(2**15))


def forget_a_row(held: Weights) -> None:
    held[UP][77] = 0.0


DAMAGE: list[tuple[Callable[[Weights], None], set[str]]] = [
    (swap_q_and_k, {Q, K}),
    (exchange_two_rows, {Q}),
    (shift_a_shard, {UP}),
    (exchange_shards, {UP}),
    (keep_a_stale_tensor, {NORM}),
    (negate_halves, {K}),
    (negate_everything, {K}),
    (forget_a_row, {UP}),
]


@pytest.mark.parametrize(("damage", "tensors"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damage_is_caught_and_named(damage: Callable[[Weights], None], tensors: set[str]) -> None:
    weights = make_weights()
    good, bad = as_held(weights), as_held(weights)
    damage(bad)
    engines = {
        "good": {"good": digest(hold(good))},
        "bad": {"bad": digest(hold(bad))},
        "bad in two": {name: digest(member) for name, member in tensor_parallel(bad).items()},
    }
    verdict = compare(trainers(weights), engines)
    assert {d.engine: set(d.tensors) for d in verdict.differences} == {"bad": tensors, "bad in two": tensors}
    assert set(verdict.differing["bad"].split(", ")) == tensors


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from([Q, K, UP, NORM]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 15))
def test_one_flipped_bit_is_caught_wherever_it_is(name: str, place: float, bit: int) -> None:
    weights = make_weights()
    held = as_held(weights)
    flat = bits(held[name]).view(-1)
    flat[int(place * len(flat))] ^= (1 << bit) if bit < 15 else -(2**15)
    verdict = compare(trainers(weights), {"engine": {"engine": digest(hold(held))}})
    assert verdict.differing == {"engine": name}


@pytest.mark.parametrize(("damage", "tensors"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_samples_catch_it_within_their_period(damage: Callable[[Weights], None], tensors: set[str]) -> None:
    weights = make_weights()
    held = as_held(weights)
    damage(held)
    caught = []
    for version in range(SAMPLED_ONE_IN):
        sampling = ElementSampling(version, SAMPLED_ONE_IN)
        members = {name: digest(member, sampling) for name, member in tensor_parallel(held).items()}
        verdict = compare(trainers(weights, sampling), {"engine": members})
        caught.append({name for d in verdict.differences for name in d.tensors})
    assert set().union(*caught) == tensors
    if damage in (swap_q_and_k, shift_a_shard, exchange_shards, negate_halves):  # of much more than a few rows
        assert all(names == tensors for names in caught)


def test_one_bad_member_is_enough() -> None:
    weights = make_weights()
    members = tensor_parallel(as_held(weights))
    storages = members["rank-1"][1]
    storages[f"{NORM} 0"][9] += 1.0
    storages[f"{UP} 0"][5, 5] += 1.0
    verdict = compare(trainers(weights), {"e": {name: digest(member) for name, member in members.items()}})
    assert verdict.differing == {"e": f"{UP}, {NORM}"}
    assert verdict.differences[0].num_tensors == 2


def test_a_missing_or_exchanged_member_is_caught() -> None:
    weights = make_weights()
    held = as_held(weights)
    members = {name: digest(member) for name, member in tensor_parallel(held).items()}
    with pytest.raises(RefitError, match="engine-7 holds some elements of q_proj more often than others"):
        compare(trainers(weights), {"engine-7": {"rank-0": members["rank-0"]}})
    layouts = {name: layout for name, (layout, _) in members.items()}
    exchanged = {}
    for rank, other in ((0, 1), (1, 0)):  # each has the other's columns where its own belong
        storages = tensor_parallel(held)[f"rank-{other}"][1]
        exchanged[f"rank-{rank}"] = digest((layouts[f"rank-{rank}"], storages))
    assert compare(trainers(weights), {"e": exchanged}).differences[0].tensors == (Q, K, UP)


def test_another_rounding_is_caught() -> None:
    weights = make_weights()
    truncated = {
        name: (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16) for name, values in weights.items()
    }
    assert compare(trainers(weights), {"e": {"e": digest(hold(truncated))}}).differences[0].num_tensors == 4


def test_the_first_few_of_many_are_named() -> None:
    weights = {f"layer {n}": random_tensor((4, 4), torch.float32, n) for n in range(9)}
    stale = {name: values + 1 for name, values in weights.items()}
    source = {"trainer": digest(hold(weights), dtype="float32")}
    verdict = compare(source, {"e": {"e": digest(hold(stale), dtype="float32")}})
    assert verdict.differing == {"e": "layer 0, layer 1, layer 2 and 6 more"}


def test_what_no_source_has_is_caught() -> None:
    weights = make_weights()
    held = as_held(weights) | {"extra": torch.ones(3, dtype=torch.bfloat16)}
    assert compare(trainers(weights), {"e": {"e": digest(hold(held))}}).differing == {"e": "extra"}


def test_digests_for_another_layout_are_refused() -> None:
    layout, digests_T = digest(hold(as_held(make_weights())))
    with pytest.raises(RefitError, match="trainer sent 3 digests for 4 tensors"):
        compare({"trainer": (layout, digests_T[:-1])}, {})


# --- the source itself ---


def test_a_source_that_did_not_change_is_noticed() -> None:
    def digests(weights: Weights) -> dict[str, digest_compare.Digests]:
        return {name: digests_T for name, (_, digests_T) in trainers(weights).items()}

    weights = make_weights()
    before = digests(weights)
    assert is_unchanged(before, digests(make_weights()))
    weights[UP][127, 63] += 1.0  # on the second rank
    assert not is_unchanged(before, digests(weights))
    assert not is_unchanged(before, {"trainer-0": before["trainer-0"]})


def test_digests_travel_as_bytes() -> None:
    digests_T = np.array([0, 1, 2**64 - 1], np.uint64)
    assert digest_compare.encode_digests(digests_T) == bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8
    assert np.array_equal(digest_compare.decode_digests(digest_compare.encode_digests(digests_T)), digests_T)
    with pytest.raises(RefitError, match="9 bytes are not digests"):
        digest_compare.decode_digests(bytes(9))


def test_many_members_are_compared_in_little_time() -> None:
    """As many pieces as DeepSeek-V3 has on 64 engines' ranks, over layouts that share their tensors."""
    num_tensors, num_members = 20_000, 32
    shared = hold({f"expert {n}": torch.zeros(1, 1) for n in range(2)})[0].tensors
    tensors = tuple(type(shared[0])(f"expert {n}", (num_members, 8), "bfloat16") for n in range(num_tensors))
    digests_T = np.arange(num_tensors, dtype=np.uint64)
    members = {}
    for rank in range(num_members):
        builder = LayoutBuilder("host")
        builder.add_tensors(tensors)
        at = np.arange(num_tensors)
        builder.add_many(at, (rank, 0), (1, 8), builder.storage("all", 16 * num_tensors), 16 * at, (16, 2))
        members[f"rank-{rank}"] = builder.build(), digests_T
    started = time.process_time()
    source = {"trainer": (members["rank-0"][0], digests_T * np.uint64(num_members))}
    assert compare(source, {"engine": members}).differences == ()
    assert time.process_time() - started < 3.0


def test_part_and_box_agree() -> None:
    """The harness's shards are what they claim."""
    values = make_weights()[UP]
    assert torch.equal(part(values, even(values, 0, 1, 2)), values[64:])
    assert even(values, 1, 1, 2) == Box((0, 32), (128, 32))
