"""Scores of tokens over an output layer that is spread over ranks: the same as over the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tandem.samples.batch import SampleBatch
from tandem.trainer.batching.masks import TokenMasks, masks_on
from tandem.trainer.scoring import VocabularyShard, score_tokens
from tests.harness.trainers.masks_harness import kept_in, masked
from tests.harness.trainers.trainer_harness import run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

NUM_TOKENS, HIDDEN = 19, 8


def inputs(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_KH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VH = (0.4 * torch.randn(size, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    target_K = torch.randint(size, (NUM_TOKENS,), generator=generator)
    target_K[:2] = torch.tensor([0, size - 1])
    target_K[2:8] = (hidden_KH @ weight_VH.T)[2:8].argmax(dim=-1)
    return hidden_KH, weight_VH, target_K


def masks_for(target_K: torch.Tensor, size: int) -> TokenMasks:
    """Return a random mask for each token: none, a list or a bitmap."""
    vocabulary, batch = -(-size // 32), masked(tokens(target_K), size)
    return masks_on(torch.device("cpu"), batch, np.arange(len(target_K)), vocabulary)


def tokens(target_K: torch.Tensor) -> SampleBatch:
    """Return a sequence of these tokens, all of them counted."""
    return SampleBatch(
        lengths_S=np.array([len(target_K)], dtype=np.int32),
        token_ids_T=target_K.numpy().astype(np.int32),
        loss_mask_T=np.ones(len(target_K), dtype=np.bool_),
    )


def score(
    hidden_KH: torch.Tensor, weight_VH: torch.Tensor, target_K: torch.Tensor, **options: Any
) -> dict[str, torch.Tensor]:
    """Return scores, and the gradients of a weighted sum of them, as arrays that processes can hand over."""
    logprobs_K, entropy_K, is_likeliest_K = score_tokens(hidden_KH, weight_VH, target_K, temperature=0.7, **options)
    (logprobs_K * torch.linspace(-1, 1, NUM_TOKENS)).sum().backward()
    assert hidden_KH.grad is not None
    assert weight_VH.grad is not None
    found = {"logprobs": logprobs_K, "entropy": entropy_K, "likeliest": is_likeliest_K}
    found |= {"hidden": hidden_KH.grad, "weight": weight_VH.grad}
    return {name: tensor.detach().float().numpy() for name, tensor in found.items()}


def score_rows_of_a_rank(
    rank: int,
    size: int,
    padded: int,
    dtype: torch.dtype,
    chunk: int | None,
    undrawable: tuple[int, ...] = (),
    has_masks: bool = False,
) -> Any:
    """Score with this rank's part of the rows, which are `padded` with rows of anything."""
    assert dist.group.WORLD is not None
    hidden_KH, weight_VH, target_K = inputs(size, dtype)
    padding = torch.full((padded - size, HIDDEN), 50.0, dtype=dtype)
    whole_VH = torch.cat([weight_VH.detach(), padding])
    num_rows = padded // dist.get_world_size()
    own_VH = whole_VH[rank * num_rows : (rank + 1) * num_rows].clone().requires_grad_()
    shard = VocabularyShard(group=dist.group.WORLD, first_row=rank * num_rows, num_rows=size)
    masks = masks_for(target_K, size) if has_masks else None
    return score(hidden_KH, own_VH, target_K, vocabulary=shard, chunk=chunk, undrawable=undrawable, masks=masks)


@pytest.mark.parametrize(
    ("size", "padded"), [(40, 40), (37, 40), (19, 40)], ids=["no padding", "padding", "a rank of padding alone"]
)
@pytest.mark.parametrize(("chunk", "undrawable"), [(None, ()), (4, ()), (4, (1, 18)), (None, (1, 18))])
def test_scores_over_two_ranks_are_those_over_one(
    size: int, padded: int, chunk: int | None, undrawable: tuple[int, ...]
) -> None:
    hidden_KH, weight_VH, target_K = inputs(size, torch.float32)
    undrawable = tuple(token for token in undrawable if not (target_K == token).any())
    expected = score(hidden_KH, weight_VH, target_K, undrawable=undrawable)
    assert 6 <= expected["likeliest"].sum() < NUM_TOKENS
    ranks = run_ranks(2, score_rows_of_a_rank, size, padded, torch.float32, chunk, undrawable)
    for found in ranks:
        for name in ("logprobs", "entropy", "likeliest", "hidden"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
            assert (found[name] == ranks[0][name]).all(), "to the bit on every rank"
    weight_VH = torch.cat([torch.from_numpy(found["weight"]) for found in ranks])
    torch.testing.assert_close(weight_VH[:size], torch.from_numpy(expected["weight"]), rtol=0, atol=1e-6)
    assert not weight_VH[size:].any()


def rounding_of(tensor: torch.Tensor) -> float:
    """Return what sums of the tokens' or the vocabulary's terms in float32 may differ by, added in another order.

    Processors multiply matrices in different orders. The error of a sum grows as the root of the number of its terms,
    in units in the last place of the largest element: one near zero is a sum of larger terms.
    """
    return 4 * math.sqrt(NUM_TOKENS) * float(np.spacing(tensor.abs().max().numpy()))


@pytest.mark.parametrize(
    ("size", "padded"), [(40, 40), (37, 80), (19, 40)], ids=["no padding", "much padding", "a rank of padding alone"]
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_masks_hold_over_two_ranks(size: int, padded: int, chunk: int | None) -> None:
    hidden_KH, weight_VH, target_K = inputs(size, torch.float32)
    (is_kept_KV,) = kept_in(masked(tokens(target_K), size), size)
    assert is_kept_KV is not None
    logits_KV = (hidden_KH @ weight_VH.T / 0.7).masked_fill(~is_kept_KV, -torch.inf)
    logprobs_K = logits_KV.log_softmax(dim=-1).gather(1, target_K[:, None])[:, 0]
    (logprobs_K * torch.linspace(-1, 1, NUM_TOKENS)).sum().backward()
    expected = {
        "logprobs": logprobs_K.detach(),
        "entropy": torch.distributions.Categorical(logits=logits_KV.detach()).entropy(),
        "likeliest": (logits_KV.argmax(dim=-1) == target_K).float(),
        "hidden": hidden_KH.grad,
    }
    own = score(*inputs(size, torch.float32), chunk=chunk, masks=masks_for(target_K, size))
    ranks = run_ranks(2, score_rows_of_a_rank, size, padded, torch.float32, chunk, (), True)
    for found in (own, *ranks):
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), tensor, rtol=0, atol=rounding_of(tensor))
    for weights in (own["weight"], np.concatenate([found["weight"] for found in ranks])[:size]):
        torch.testing.assert_close(torch.from_numpy(weights), weight_VH.grad, rtol=0, atol=rounding_of(weight_VH.grad))


def test_bfloat16_over_two_ranks_stays_within_its_rounding() -> None:
    expected = score(*inputs(37, torch.bfloat16))
    for found in run_ranks(2, score_rows_of_a_rank, 37, 40, torch.bfloat16, 4):
        for name in ("logprobs", "entropy"):  # from the same rounded logits
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        error = torch.from_numpy(found["hidden"] - expected["hidden"]).norm()
        assert error <= 0.01 * torch.from_numpy(expected["hidden"]).norm()
