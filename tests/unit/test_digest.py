"""The digest of a box does not depend on sharding, notices every kind of damage, and is the sum its docstring says."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from digest_harness import boxes_between, part, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.digests import kernels as digest_kernels
from tandem.refit.digests.comparison import combine
from tandem.refit.digests.kernels import MAX_COLUMNS, Span, is_exact
from tandem.refit.digests.task import digest_box
from tandem.refit.digests.terms import multipliers, salt, signed_digits
from tandem.refit.layout import Box, whole

NAME = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def digest_of(values: torch.Tensor, name: str = NAME) -> int:
    return digest_box(name, tuple(values.shape), whole(values.shape), values)


def signed_bytes(element: torch.Tensor) -> int:
    """Return ``e``: the bytes of an element as signed digits to base 256."""
    return sum(b * 256**j for j, b in enumerate(element.reshape(1).view(torch.int8).tolist()))


def reference(name: str, values: torch.Tensor) -> int:
    """Return the sum in the docstring, one element at a time, with Python's integers."""
    shape = tuple(values.shape) or (1,)
    elements = values.reshape(shape).contiguous()
    total = 0
    for index in itertools.product(*map(range, shape)):
        term = signed_bytes(elements[index])
        for dim, i in enumerate(index):
            term *= int(multipliers(len(shape) - dim, i + 1)[i])
        total += term
    return total * salt(name, tuple(values.shape), str(values.dtype).removeprefix("torch.")) % 2**64


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_it_is_the_sum_in_the_docstring(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    values = random_tensor(shape, dtype, seed)
    assert digest_of(values) == reference(NAME, values)


def test_rows_longer_than_a_slab_and_tables_that_grow() -> None:
    num_columns = 3 * MAX_COLUMNS + 17
    long = random_tensor((3, num_columns), torch.bfloat16)
    cuts = [[0, 1, 3], [0, 5, MAX_COLUMNS + 1, num_columns]]
    shares = [digest_box(NAME, (3, num_columns), box, part(long, box)) for box in boxes_between(cuts)]
    bytes_RCB = long.view(torch.int8).view(3, num_columns, 2).numpy().astype(np.int64)
    elements_RC = bytes_RCB[..., 0] + 256 * bytes_RCB[..., 1]
    with np.errstate(over="ignore"):
        total = int(
            ((elements_RC * multipliers(1, num_columns)[:num_columns]).sum(axis=1) * multipliers(2, 3)[:3]).sum()
        )
    expected = total * salt(NAME, (3, num_columns), "bfloat16") % 2**64
    assert digest_of(long) == combine(*shares) == expected


def test_tall_tensors_are_cut_into_slabs() -> None:
    tall = random_tensor((5000, 2, 300), torch.float32)
    cuts = [[0, 4999, 5000], [0, 1, 2], [0, 7, 300]]
    assert combine(*(digest_box(NAME, (5000, 2, 300), box, part(tall, box)) for box in boxes_between(cuts))) == (
        digest_of(tall)
    )


def test_multipliers_are_odd_distinct_and_do_not_change_as_the_table_grows() -> None:
    before = multipliers(1, 10)[:10].tolist()
    grown = multipliers(1, 5000)
    assert grown[:10].tolist() == before
    assert all(m % 2 for m in grown.tolist())
    assert len(set(grown.tolist())) == len(grown)
    assert set(multipliers(2, 10)[:10].tolist()).isdisjoint(before)


def test_every_pattern_of_bits_is_another_number() -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert len({signed_bytes(pattern) for pattern in patterns}) == 2**16


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), item_size=st.sampled_from([1, 2, 4]))
def test_signed_digits_make_the_number_again(numbers: list[int], item_size: int) -> None:
    digits_KJ = signed_digits(np.array(numbers, np.int64), item_size).astype(object)
    for row, digits_J in enumerate(digits_KJ):
        number = sum(digit * 256**j for j, digit in enumerate(digits_J))
        assert (number - numbers[row // item_size] * 256 ** (row % item_size)) % 2**64 == 0


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    item_size=st.sampled_from([1, 2, 4]),
    step=st.integers(1, 9),
    extreme=st.booleans(),
)
def test_all_kernels_give_the_same_sums(rows: int, columns: int, item_size: int, step: int, extreme: bool) -> None:
    """Those for a GPU too, run on the CPU."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[item_size]
    words_RC = random_tensor((rows, columns), integers)
    if extreme:
        words_RC.view(torch.int8).fill_(-128)
    spans: tuple[Span, ...] = ((1, 3, columns, step),)
    sums_R = digest_kernels._wide_sums(words_RC, spans)
    assert torch.equal(digest_kernels._device_sums(words_RC, spans), sums_R)
    if is_exact(digest_kernels._byte_sums, digest_kernels._wide_sums):
        assert torch.equal(digest_kernels._byte_sums(words_RC, spans), sums_R)
    m = multipliers(1, 3 + columns * step)
    exact = sum(signed_bytes(words_RC[0, c]) * int(m[3 + c * step]) for c in range(columns))
    assert (int(sums_R[0]) - exact) % 2**64 == 0


_CHOSEN = """
import torch
from tandem.refit.digests import kernels

words_RC = torch.randint(-(2**31), 2**31, (64, 4096), generator=torch.Generator().manual_seed(0)).to(torch.int32)
columns = ((1, 0, 4096, 1),)
right = torch.equal(kernels._byte_sums(words_RC, columns), kernels._wide_sums(words_RC, columns))
assert kernels.is_exact(kernels._byte_sums, kernels._wide_sums) == right
assert right or kernels._cpu_kernel() is kernels._wide_sums
"""


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE", "DEFAULT"])
def test_a_kernel_that_saturates_on_this_processor_is_not_chosen(instructions: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "CC": "no-such-compiler"}
    subprocess.run([sys.executable, "-c", _CHOSEN], env=environment, check=True)


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


def test_shares_add_up_modulo_two_to_the_64() -> None:
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


def test_wide_elements_are_refused() -> None:
    with pytest.raises(RefitError, match="digests are of elements of 1, 2 or 4 bytes"):
        digest_of(torch.zeros(3, dtype=torch.float64))


def test_what_compares_digests_imports_no_torch() -> None:
    code = "import sys; from tandem.refit.digests import comparison, task; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
