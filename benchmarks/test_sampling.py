"""How fast are logits cut by top-k and top-p, beside sorting the whole vocabulary of every row?

The rows are those of a decoding step of 32 sequences. Their logits are normal: at a deviation of 4 a share of 0.95 is
a few hundred tokens, as a trained model has fewer; at 2 it is a sixth of the vocabulary, and nothing decides it but a
sort. Both ways give the same bits (`tests/unit/test_sampling_masks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from measure import Turns, keep_ratios, seconds_of
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.rollout.engines.sampling import restrict

NUM_ROWS, NUM_TOKENS, NUM_ROUNDS = sized(32, 2), sized(262_208, 10_000), sized(5, 1)
CUTS = {"top-p 0.95": (0, 0.95, 4.0), "top-k 50, top-p 0.95": (50, 0.95, 2.0), "top-p 0.95, flat": (0, 0.95, 2.0)}
"""By name: top-k, top-p and the deviation of the logits."""


def sort_all(logits_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Sort every row, and put what is left back in its place."""
    num_tokens = logits_BV.shape[-1]
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    limit_B1 = torch.where(top_k_B > 0, top_k_B, num_tokens)[:, None]
    sorted_BV = sorted_BV.masked_fill(torch.arange(num_tokens) >= limit_B1, -torch.inf)
    probability_BV = sorted_BV.softmax(dim=-1)
    is_beyond_BV = probability_BV.cumsum(dim=-1) - probability_BV >= top_p_B[:, None]
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV.masked_fill(is_beyond_BV, -torch.inf))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cut", CUTS)
def test_cuts(benchmark: BenchmarkFixture, cut: str) -> None:
    top_k, top_p, deviation = CUTS[cut]
    logits_BV = torch.randn(NUM_ROWS, NUM_TOKENS, generator=torch.Generator().manual_seed(0)) * deviation
    limits = torch.full((NUM_ROWS,), top_k), torch.full((NUM_ROWS,), top_p)
    ways = {
        "among the likeliest": lambda: seconds_of(lambda: restrict(logits_BV, *limits)),
        "full sort": lambda: seconds_of(lambda: sort_all(logits_BV, *limits)),
    }
    turns = Turns(ways)
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
    seconds = {way: min(times) for way, times in turns.last(NUM_ROUNDS).items()}
    kept = (restrict(logits_BV, *limits) > -torch.inf).sum(dim=-1).float().mean().item()
    benchmark.extra_info.update({"best seconds": seconds, "tokens left of a row": kept})
    keep_ratios(
        benchmark,
        "cut of top-k and top-p, times as fast as a full sort",
        {cut: seconds["full sort"] / seconds["among the likeliest"]},
    )
    print(f"\n{cut}: {kept:.0f} of {NUM_TOKENS} tokens left; {seconds}")
