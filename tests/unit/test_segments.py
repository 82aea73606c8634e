"""Attention within segments against the formula: softmax of the scaled scores of the keys that a token may see."""

from __future__ import annotations

import pytest
import torch

from tandem.common.attention import segments
from tandem.common.attention.segments import attend
from tests.harness.attention_formula import SEGMENTS, formula


@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_each_token_sees_its_segment_up_to_itself(segments: list[tuple[int, int]], num_key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = (sum(pair[index] for pair in segments) for index in (0, 1))
    shapes = [(num_queries, 4, 6), (num_keys, num_key_heads, 6), (num_keys, num_key_heads, 6)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    found_LHD, expected_LHD = attend(*inputs, segments, 0.3), formula(*inputs, segments)
    torch.testing.assert_close(found_LHD, expected_LHD, rtol=0, atol=2e-6)
    weights_LHD = torch.randn(found_LHD.shape, generator=generator)
    for found, expected in zip(
        torch.autograd.grad((found_LHD * weights_LHD).sum(), inputs),
        torch.autograd.grad((expected_LHD * weights_LHD).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.4])
@pytest.mark.parametrize(
    ("window", "has_sinks"), [(1, False), (3, False), (3, True), (300, False), (None, True), (None, False)]
)
@pytest.mark.parametrize("segments", [SEGMENTS["more keys than queries"], [(300, 310)]], ids=["few", "many"])
def test_a_window_hides_what_is_before_it_a_sink_takes_its_share_and_a_cap_limits_scores(
    segments: list[tuple[int, int]], window: int | None, has_sinks: bool, cap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = (sum(pair[index] for pair in segments) for index in (0, 1))
    shapes = [(num_queries, 4, 6), (num_keys, 2, 6), (num_keys, 2, 6), *([(4,)] if has_sinks else [])]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    query_LHD, key_MGD, value_MGD, sinks_H = (*inputs, None)[:4]
    assert query_LHD is not None
    assert key_MGD is not None
    assert value_MGD is not None
    found_LHD = attend(query_LHD, key_MGD, value_MGD, segments, 0.3, window, sinks_H, cap)
    expected_LHD = formula(query_LHD, key_MGD, value_MGD, segments, window, sinks_H, cap)
    torch.testing.assert_close(found_LHD, expected_LHD, rtol=0, atol=2e-6)
    weights_LHD = torch.randn(found_LHD.shape, generator=generator)
    for found, expected in zip(
        torch.autograd.grad((found_LHD * weights_LHD).sum(), inputs),
        torch.autograd.grad((expected_LHD * weights_LHD).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


ONE_MASK = 1.6
"""What attention with a window keeps for its backward pass, over its inputs and output: the mask of a block besides."""


@pytest.mark.parametrize(
    ("window", "has_sinks", "cap"), [(512, False, None), (512, True, None), (None, True, None), (None, False, 0.4)]
)
def test_a_long_sequence_keeps_no_scores_and_one_mask(window: int | None, has_sinks: bool, cap: float | None) -> None:
    """Scores and masks of every block would take 7 to 200 times as much as the queries, keys and values."""
    generator, length = torch.Generator().manual_seed(0), 4096
    shapes = [(length, 4, 32), (length, 2, 32), (length, 2, 32), *([(4,)] if has_sinks else [])]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    query_LHD, key_MGD, value_MGD, sinks_H = (*inputs, None)[:4]
    assert query_LHD is not None
    assert key_MGD is not None
    assert value_MGD is not None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended_LHD = attend(query_LHD, key_MGD, value_MGD, [(length, length)], 0.3, window, sinks_H, cap)
    num_bytes = sum(each.nbytes for each in (*inputs, attended_LHD)) + 4 * 256 * (256 + (window or length))
    assert sum(storages.values()) < ONE_MASK * num_bytes


@pytest.mark.parametrize("cap", [None, 0.4])
@pytest.mark.parametrize("window", [None, 300])
def test_scores_that_are_computed_again_change_no_bit(
    window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, length = torch.Generator().manual_seed(0), 600
    shapes = [(length, 4, 6), (length, 2, 6), (length, 2, 6), (4,)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    query_LHD, key_MGD, value_MGD, sinks_H = inputs
    results = []
    for num_kept_blocks in (4, 1):
        monkeypatch.setattr(segments, "_KEPT_BLOCKS", num_kept_blocks)
        attended_LHD = attend(query_LHD, key_MGD, value_MGD, [(length, length)], 0.3, window, sinks_H, cap)
        results.append([attended_LHD, *torch.autograd.grad(attended_LHD.square().sum(), inputs)])
    for kept, computed_again in zip(*results, strict=True):
        assert torch.equal(kept, computed_again)
