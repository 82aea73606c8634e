"""The digest does not depend on sharding, notices every kind of damage, and is the sum that its docstring says."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit import digest
from tandem.refit.digest import combine, digest_box, digest_layout
from tandem.refit.layout import Box, Layout, Piece, PrivateMemory, Storage, TensorLayout, whole

NAME = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bits, so that every one of them counts: negative, subnormal, infinite and NaN elements too."""
    item_size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, item_size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def digest_of(values: torch.Tensor, name: str = NAME) -> int:
    return digest_box(name, tuple(values.shape), whole(values.shape), values)


def part(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values[tuple(itertools.starmap(slice, zip(box.start, box.stop, strict=True)))]


def boxes_between(cuts: list[list[int]]) -> list[Box]:
    spans = [[(a, b - a) for a, b in itertools.pairwise(edges)] for edges in cuts]
    return [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*spans)]


def reference(name: str, values: torch.Tensor) -> int:
    """Return the sum in the docstring, one element at a time, with Python's integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    shape = tuple(values.shape) or (1,)
    bits = values.reshape(shape).contiguous().view(integers)
    total = 0
    for index in itertools.product(*map(range, shape)):
        term = int(bits[index])
        for dim, i in enumerate(index):
            term *= int(digest._multipliers(len(shape) - dim, i + 1)[i])
        total += term
    return total * digest._salt(name, tuple(values.shape), str(values.dtype).removeprefix("torch.")) % 2**64


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_it_is_the_sum_in_the_docstring(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    values = random_tensor(shape, dtype, seed)
    assert digest_of(values) == reference(NAME, values)


def test_rows_longer_than_a_block_and_tables_that_grow() -> None:
    long = random_tensor((3, digest._BLOCK_ELEMENTS + 17), torch.bfloat16)
    num_columns = long.shape[1]
    cuts = [[0, 1, 3], [0, 5, digest._BLOCK_ELEMENTS, num_columns]]
    shares = [digest_box(NAME, tuple(long.shape), box, part(long, box)) for box in boxes_between(cuts)]
    bits = long.view(torch.int16).numpy().astype(np.int64)
    rows, columns = digest._multipliers(2, 3)[:3], digest._multipliers(1, num_columns)[:num_columns]
    with np.errstate(over="ignore"):
        total = int(((bits * columns).sum(axis=1) * rows).sum())
    expected = total * digest._salt(NAME, (3, num_columns), "bfloat16") % 2**64
    assert digest_of(long) == combine(*shares) == expected


def test_multipliers_are_odd_distinct_and_do_not_change_as_the_table_grows() -> None:
    before = digest._multipliers(1, 10)[:10].tolist()
    grown = digest._multipliers(1, 5000)
    assert grown[:10].tolist() == before
    assert all(m % 2 for m in grown.tolist())
    assert len(set(grown.tolist())) == len(grown)
    assert set(digest._multipliers(2, 10)[:10].tolist()).isdisjoint(before)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_sharding_gives_the_same_number(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    values = random_tensor(shape, dtype)
    cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n - 1)))), n] if n > 1 else [0, n] for n in shape]
    boxes = data.draw(st.permutations(boxes_between(cuts)))
    shares = []
    for box in boxes:
        shard = part(values, box)
        if data.draw(st.booleans()):  # in memory of its own, columns first
            backwards = tuple(reversed(range(len(shape))))
            shard = shard.permute(backwards).contiguous().permute(backwards)
        shares.append(digest_box(NAME, shape, box, shard))
    assert combine(*shares) == digest_of(values)


def test_an_empty_shard_adds_nothing() -> None:
    assert digest_box(NAME, (4, 3), Box((4, 0), (0, 3)), torch.empty(0, 3)) == 0
    assert combine() == 0


def test_shares_add_up_lane_by_lane() -> None:
    assert combine(2**64 - 1, 2) == 1
    assert combine(5, 7) == combine(7, 5) == 12


# --- damage ---


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_flipped_bit_changes_it(data: st.DataObject, dtype: torch.dtype) -> None:
    values = random_tensor((5, 7), dtype)
    before = digest_of(values)
    raw = values.view(torch.uint8).view(-1)
    position = data.draw(st.integers(0, 8 * raw.numel() - 1))
    raw[position // 8] ^= 1 << (position % 8)
    assert digest_of(values) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_sign_bits_change_it(dtype: torch.dtype) -> None:
    """An even number of flips of the highest bit: it would cancel in a sum that has no room above."""
    values = random_tensor((16, 16), dtype)
    before = digest_of(values)
    integers = values.view({4: torch.int32, 2: torch.int16}[values.element_size()])
    sign = torch.iinfo(integers.dtype).min
    seen = {before}
    for rows in (slice(0, 8), slice(8, 16), slice(0, 16), slice(3, 5)):
        integers[rows] ^= sign
        seen.add(digest_of(values))
        integers[rows] ^= sign
    assert len(seen) == 5
    assert digest_of(values) == before


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), dim=st.integers(0, 1))
def test_two_exchanged_rows_or_columns_change_it(data: st.DataObject, dtype: torch.dtype, dim: int) -> None:
    values = random_tensor((12, 12), dtype)
    one, other = data.draw(st.sets(st.integers(0, 11), min_size=2, max_size=2))
    order = list(range(12))
    order[one], order[other] = other, one
    assert digest_of(values.index_select(dim, torch.tensor(order))) != digest_of(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_shifted_shard_changes_it(dim: int, dtype: torch.dtype) -> None:
    values = random_tensor((8, 6), dtype)
    assert digest_of(values.roll(1, dim)) != digest_of(values)
    first, second = values.chunk(2, dim)
    start = [0, 0]
    start[dim] = first.shape[dim]
    swapped = combine(
        digest_box(NAME, (8, 6), Box((0, 0), tuple(second.shape)), second),
        digest_box(NAME, (8, 6), Box(tuple(start), tuple(first.shape)), first),
    )
    assert swapped != digest_of(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_and_stale_tensors_change_it(dtype: torch.dtype) -> None:
    q, k, old_q = (random_tensor((6, 6), dtype, seed) for seed in range(3))
    whole_model = combine(digest_of(q, "q"), digest_of(k, "k"))
    assert combine(digest_of(k, "q"), digest_of(q, "k")) != whole_model
    assert combine(digest_of(old_q, "q"), digest_of(k, "k")) != whole_model
    assert combine(digest_of(q, "q"), digest_of(q, "k")) != whole_model
    assert digest_of(q, "q") != whole_model


def test_transposing_a_square_and_reading_bytes_as_another_type_change_it() -> None:
    square = random_tensor((6, 6), torch.bfloat16)
    assert digest_of(square.T) != digest_of(square)
    assert digest_of(square.view(torch.float16)) != digest_of(square)
    assert digest_of(square.reshape(4, 9)) != digest_of(square)


# --- where a layout says that it lies ---


def test_a_layout_is_read_from_where_it_says_that_it_lies() -> None:
    q, k, scale = (random_tensor(shape, torch.bfloat16, seed) for seed, shape in enumerate([(4, 6), (2, 6), ()]))
    fused = torch.cat((random_tensor((1, 6), torch.bfloat16, 9), q, k))  # a row of something else comes first
    flat = torch.empty(fused.numel() + 3, dtype=torch.bfloat16)
    held = flat[3:].view_as(fused).copy_(fused)  # a parameter need not lie at the start of its storage
    layout = Layout(
        "host",
        {
            "q": TensorLayout(
                (4, 6),
                "bfloat16",
                (Piece(Box((0, 0), (4, 2)), "qk", 12, (12, 2)), Piece(Box((0, 2), (4, 4)), "qk", 16, (12, 2))),
            ),
            "k": TensorLayout((2, 6), "bfloat16", (Piece(whole((2, 6)), "qk", 60, (12, 2)),)),
            "scale": TensorLayout((), "bfloat16", (Piece(whole(()), "scale", 0, ()),)),
        },
        {"qk": Storage(84, PrivateMemory()), "scale": Storage(2, PrivateMemory())},
    )
    layout.check("test")
    expected = combine(digest_of(q, "q"), digest_of(k, "k"), digest_of(scale, "scale"))
    assert digest_layout(layout, {"qk": held, "scale": scale}) == expected
    held[0] += 1  # outside both tensors
    assert digest_layout(layout, {"qk": held, "scale": scale}) == expected
    held[1, 2] = 1.0
    assert digest_layout(layout, {"qk": held, "scale": scale}) != expected


def test_wide_elements_are_refused() -> None:
    with pytest.raises(RefitError, match="digests are of elements of 1, 2 or 4 bytes"):
        digest_of(torch.zeros(3, dtype=torch.float64))


def test_combining_imports_no_torch() -> None:
    code = "import sys; from tandem.refit.digest import combine; combine(1, 2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
