"""Changes of a message, as bytes: exact for every share of changed integers, small, and refused if they are none."""

from __future__ import annotations

import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit.transports.encoding import INTEGERS, EncodingKind, MessageDifference, advance, apply, num_bytes, wrap

LENGTH = 300_001


def messages(share: float, dtype: torch.dtype, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a message and one of which this share of integers has changed."""
    generator = torch.Generator().manual_seed(int(share * 1e6))
    old = torch.randint(0, 100, (length,), generator=generator).to(dtype)
    new = old + (torch.rand(length, generator=generator) < share)
    return old, new.to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS.values(), ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.01, 0.1, 0.3, 0.8, 0.97, 1.0])
def test_every_share_arrives_to_the_bit(share: float, dtype: torch.dtype) -> None:
    old, new = messages(share, dtype)
    target, meant = old.clone(), new.clone()
    change = advance(old, new)
    assert torch.equal(new, meant)
    assert torch.equal(old, new), "the sender has the new one, too"
    size = new.element_size()
    assert change.bytes_.numel() == num_bytes(change.kind, change.num_changed, change.num_gaps, size, LENGTH)
    assert change.bytes_.numel() <= new.nbytes
    apply(change, target)
    assert torch.equal(target, new)


@pytest.mark.parametrize(
    ("share", "kind", "at_most"),
    [
        (0.0, EncodingKind.NOTHING, 0.0),
        (1e-3, EncodingKind.GAPS_16, 0.0025),
        (0.01, EncodingKind.GAPS_8, 0.018),
        (0.05, EncodingKind.GAPS_8, 0.08),
        (0.1, EncodingKind.BITMAP, 0.17),
        (0.3, EncodingKind.BITMAP, 0.38),
        (1.0, EncodingKind.WHOLE, 1.0),
    ],
)
def test_the_smallest_kind_is_taken(share: float, kind: EncodingKind, at_most: float) -> None:
    old, new = messages(share, torch.int16)
    change = advance(old, new)
    assert change.kind is kind
    assert change.bytes_.numel() <= at_most * new.nbytes


@pytest.mark.parametrize("share", [0.05, 0.1, 0.19, 0.5, 1.0])
def test_changes_that_are_larger_than_wanted_are_whole(share: float) -> None:
    old, new = messages(share, torch.int16)
    change = advance(old, new, 1 / 16)
    assert (change.kind is EncodingKind.WHOLE) == (share > 1 / 16)
    assert torch.equal(old, new)
    if change.kind is EncodingKind.WHOLE:
        assert torch.equal(change.bytes_.view(torch.int16), new)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 9, 255, 256, 257])
def test_every_length(length: int) -> None:
    for changed in (torch.zeros(length, dtype=torch.bool), torch.arange(length) % 5 == 4, torch.arange(length) >= 0):
        old = torch.arange(length, dtype=torch.int16)
        new, target = torch.where(changed, old + 1, old), old.clone()
        apply(advance(old, new), target)
        assert torch.equal(target, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131071])
@pytest.mark.parametrize("num_others", [0, 1000])
def test_every_gap(gap: int, num_others: int) -> None:
    """Gaps just below and above what a byte, two bytes, and several of them hold; alone, and among small ones."""
    old = torch.zeros(200_000, dtype=torch.int16)
    new = old.clone()
    new[gap] = 1
    new[200_000 - 20 * num_others :: 20] = 2
    target = old.clone()
    apply(advance(old, new), target)
    assert torch.equal(target, new)


@pytest.mark.parametrize("num", range(20_000, 20_008))
def test_long_gaps_are_found_among_many(num: int) -> None:
    """Also behind the last that are looked at eight at a time."""
    old = torch.zeros(17 * num + 1000, dtype=torch.int16)
    new, target = old.clone(), old.clone()
    new[: 17 * num : 17] = 1
    new[17 * num + 400] = 1
    change = advance(old, new)
    assert (change.kind, change.num_changed, change.num_gaps) == (EncodingKind.GAPS_8, num + 1, num + 2)
    apply(change, target)
    assert torch.equal(target, new)


def test_messages_that_begin_between_words() -> None:
    """A message in place begins wherever the parameter does."""
    old, new = messages(0.01, torch.int16)
    for first in range(5):
        held, target = old.clone()[first:], old.clone()[first:]
        apply(advance(held, new[first:]), target)
        assert torch.equal(target, new[first:])


@pytest.mark.parametrize("share", [0.0, 0.003, 0.05, 0.5, 1.0])
def test_threads_give_what_one_does(share: float) -> None:
    """Each thread looks at a part of a long message; a share of changed ones is larger in one part than in others."""
    old, new = messages(share, torch.int16, 3_500_001)
    new[:1000] = -1
    before, both = torch.get_num_threads(), []
    try:
        for num in (1, 3):
            torch.set_num_threads(num)
            held, target = old.clone(), old.clone()
            change = advance(held, new)
            apply(change, target)
            assert torch.equal(held, new)
            assert torch.equal(target, new)
            both.append(change)
    finally:
        torch.set_num_threads(before)
    assert both[0][:3] == both[1][:3]
    assert torch.equal(both[0].bytes_, both[1].bytes_)


def test_bits_count_and_not_numbers() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0]).view(torch.int32)
    new = torch.tensor([-0.0, float("nan"), 1.0]).view(torch.int32)
    target = old.clone()
    change = advance(old, new)
    assert change.num_changed == 1
    apply(change, target)
    assert torch.equal(target, new)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3])
def test_a_change_that_cannot_be_is_refused(share: float) -> None:
    old, new = messages(share, torch.int16)
    target = old.clone()
    change = advance(old, new)
    for wrong in (
        change._replace(bytes_=change.bytes_[:-1]),
        change._replace(num_changed=change.num_changed + 8),
        change._replace(kind=EncodingKind.WHOLE, num_changed=0, num_gaps=0),
    ):
        with pytest.raises(RefitError, match="another number of bytes"):
            apply(wrong, target)
    damaged = change.bytes_.clone()
    damaged[-2:] ^= 0xFF  # of the positions
    with pytest.raises(RefitError, match="positions that its message has not"):
        apply(change._replace(bytes_=damaged), target)
    assert torch.equal(target, messages(share, torch.int16)[0]), "nothing was written"


def test_a_gap_that_became_the_number_for_long_ones_is_refused() -> None:
    old = torch.zeros(10_000, dtype=torch.int16)
    new, target = old.clone(), old.clone()
    new[::100] = 1
    change = advance(old, new)
    assert change.num_gaps == change.num_changed
    change.bytes_[-50] = 0xFF
    with pytest.raises(RefitError, match="positions that its message has not"):
        apply(change, target)


def test_a_whole_message_is_one_too() -> None:
    old, new = messages(0.5, torch.int32)
    apply(wrap(new), old)
    assert torch.equal(old, new)
    apply(MessageDifference(EncodingKind.NOTHING, 0, 0, torch.empty(0, dtype=torch.uint8)), old)
    assert torch.equal(old, new)
