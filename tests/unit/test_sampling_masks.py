"""Sampling masks as columns: what is kept, how it is written down, checked, recorded, and read on a device.

Min-p, top-k and top-p are compared with Transformers' own logits processors (5.x).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_harness import make_model, refit, request
from samples_harness import RUN_ID, recorded, scored

from tandem.common.errors import SamplesError, WireError
from tandem.common.messages import Problem, PromptGroup
from tandem.rollout.agents.episodes import _masks_of
from tandem.rollout.agents.session import EpisodeSession
from tandem.rollout.conversation import SampleConversation
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.sampling import masks_of, restrict
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.rollout.environments import Score
from tandem.rollout.openai_api.generator import ResponseChunk
from tandem.samples.batch import MASKS, SAMPLES, SampleBatch
from tandem.samples.recorded_shards import read_step
from tandem.samples.routed_experts import as_trained_on
from tandem.samples.sample_files import shard_path
from tandem.samples.sample_writing import table_of, write_shard
from tandem.samples.sampling_masks import MaskFormat, SamplingMasks, mask_columns
from tandem.trainer.batching.masks import masks_on
from tandem.trainer.batching.shard import pad
from tandem.trainer.fetching import SampleFormat
from tandem.trainer.scoring import score_tokens

CPU = torch.device("cpu")


def kept_sets(num: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Return random sets of tokens: of one, of few, of many, of nearly all, of all."""
    generator = torch.Generator().manual_seed(seed)
    shares_R1 = torch.tensor([0.0, 1 / vocabulary, 0.5, 1 - 1 / vocabulary, 1.0]).repeat(num)[:num, None]
    is_kept_RV = torch.rand(num, vocabulary, generator=generator) < shares_R1
    is_kept_RV[torch.arange(num), torch.randint(vocabulary, (num,), generator=generator)] = True
    return is_kept_RV


def batch_of(is_kept_RV: torch.Tensor, lengths: list[int]) -> SampleBatch:
    """Return sequences with a token out of each of these sets, all of which count but the first of each sequence."""
    masks = SamplingMasks.join(masks_of(is_kept_RV, MaskFormat(vocabulary=is_kept_RV.shape[1])))
    ends = np.cumsum(lengths)
    parts = []
    for end, length in zip(ends, lengths, strict=True):
        own = masks.slice_from(end - length)
        words = SamplingMasks(own.lengths_T[:length], own.words_W[: own.lengths_T[:length].sum()])
        parts.append(mask_columns(length, [(0, words)]))
    num_tokens = int(ends[-1])
    return SampleBatch(
        lengths_S=np.array(lengths, dtype=np.int32),
        token_ids_T=is_kept_RV.int().argmax(dim=1).numpy().astype(np.int32),
        loss_mask_T=np.ones(num_tokens, dtype=np.bool_),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        versions_T=np.zeros(num_tokens, dtype=np.int32),
        **{name: np.concatenate([part[name] for part in parts]) for name in MASKS},
    )


@pytest.mark.parametrize("vocabulary", [5, 32, 33, 61, 64, 257, 1000])
def test_what_an_engine_keeps_is_what_a_trainer_reads(vocabulary: int) -> None:
    is_kept_RV = kept_sets(25, vocabulary)
    batch = batch_of(is_kept_RV, [7, 1, 17])
    mask_format = MaskFormat(vocabulary=vocabulary)
    mask_format.check(batch)
    num_kept_R, most = is_kept_RV.sum(dim=1).numpy(), -(-vocabulary // 32)
    expected = np.minimum(np.minimum(num_kept_R, vocabulary - num_kept_R), most)
    assert batch.mask_lengths_T.tolist() == expected.tolist(), "words a token, as the module says"
    chosen = np.array([24, 3, 4, 5, 0, 10, 11, 12, 13, 14])
    masks = masks_on(CPU, batch, chosen, mask_format.bitmap_words)
    assert len(masks.words_W) == batch.mask_lengths_T[chosen].sum()
    for first, last in ((0, vocabulary), (1, vocabulary // 2), (vocabulary // 3, vocabulary - 1), (33, 900)):
        columns = slice(first, min(last, vocabulary))
        is_outside = masks.is_outside(max(0, columns.stop - first), first)
        assert torch.equal(is_outside, ~is_kept_RV[chosen][:, columns])
    beyond = masks.is_outside(40, 32 * most + 64)
    names_kept_R = (expected > 0) & ((num_kept_R * 2 <= vocabulary) | (expected == most))
    assert torch.equal(beyond, torch.from_numpy(names_kept_R[chosen])[:, None].expand(-1, 40)), (
        "of those left out, none"
    )


@pytest.mark.parametrize("chunk", [None, 1, 6])
def test_scores_and_gradients_are_of_masked_logits(chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    is_kept_RV = kept_sets(15, 101)
    batch, mask_format = batch_of(is_kept_RV, [15]), MaskFormat(vocabulary=101)
    target_K = torch.from_numpy(batch.token_ids_T.astype(np.int64))
    tensors = [torch.randn(15, 8, generator=generator), torch.randn(101, 8, generator=generator)]
    found, expected = ([each.clone().requires_grad_() for each in tensors] for _ in range(2))
    masks = masks_on(CPU, batch, np.arange(15), mask_format.bitmap_words)
    scores = score_tokens(*found, target_K, temperature=0.8, chunk=chunk, masks=masks, learns_entropy=True)
    logits_KV = (expected[0] @ expected[1].T / 0.8).masked_fill(~is_kept_RV, -torch.inf)
    logprobs_KV = logits_KV.log_softmax(dim=-1)
    logprobs_K = logprobs_KV.gather(1, target_K[:, None])[:, 0]
    entropy_K = -torch.where(is_kept_RV, logprobs_KV.exp() * logprobs_KV.masked_fill(~is_kept_RV, 0.0), 0.0).sum(dim=1)
    torch.testing.assert_close(scores.logprobs, logprobs_K, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy_K, rtol=0, atol=1e-5)
    weights_K = torch.linspace(-1, 1, 15)
    (scores.logprobs * weights_K + scores.entropy).sum().backward()
    (logprobs_K * weights_K + entropy_K).sum().backward()
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_micro_batches_have_the_masks_of_their_valid_tokens() -> None:
    is_kept_RV = kept_sets(12, 70)
    batch = batch_of(is_kept_RV, [5, 3, 4])
    micro_batch = pad(batch, [2, -1, 0], divisible_by=1, device=CPU, mask_format=MaskFormat(vocabulary=70))
    assert micro_batch.masks is not None
    expected_KV = is_kept_RV[[9, 10, 11, 1, 2, 3, 4]]  # nothing predicts the first token of a sequence
    assert torch.equal(micro_batch.masks.is_outside(70, 0), ~expected_KV)
    assert pad(batch, [0], divisible_by=1, device=CPU).masks is None


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mask_lengths_T", {0: 4}, "mask_lengths_T: must be from 0 to 3"),
        ("mask_lengths_T", {0: 2, 1: 0}, "mask_lengths_T: must add up to num_mask_words_S"),
        ("mask_words_W", {0: 50}, "mask_words_W: must have the token that was drawn"),
        ("token_ids_T", {2: 69}, "mask_words_W: must have the token that was drawn"),
    ],
)
def test_impossible_masks_are_refused(name: str, changes: dict[int, int], expected: str) -> None:
    is_kept_RV = torch.zeros(3, 70, dtype=torch.bool)
    is_kept_RV[0, 7] = is_kept_RV[1, 8] = True
    is_kept_RV[2, :40] = True
    batch, mask_format = batch_of(is_kept_RV, [1, 2]), MaskFormat(vocabulary=70)
    mask_format.check(batch)
    array = batch.columns[name].copy()
    for place, value in changes.items():
        array[place] = value
    with pytest.raises(WireError, match=expected):
        mask_format.check(batch.replace(**{name: array}))


def test_samples_travel_with_masks() -> None:
    batch = batch_of(kept_sets(9, 70), [4, 5])
    sample_format = SampleFormat(vocabulary=70, masks=MaskFormat(vocabulary=70))
    joined = SampleBatch.concatenate([sample_format.nothing(), batch, batch]).take([3, 0])
    received = SampleBatch.parse_frames(joined.columns, (*SAMPLES, *MASKS))
    sample_format.masks.check(received)  # type: ignore[union-attr]
    assert received.mask_words_W.tolist() == batch.take([1, 0]).mask_words_W.tolist()
    assert SampleFormat(vocabulary=2**20, masks=MaskFormat(vocabulary=2**20)).max_tokens == 2**28 // 2**17


def test_masks_are_recorded(tmp_path: Path) -> None:
    samples = [
        recorded(scored(0, place), batch_of(kept_sets(20, 70, seed), [20]), command_id=4)
        for place, seed in enumerate((1, 2))
    ]
    write_shard(shard_path(tmp_path, 12, "rollout-0"), RUN_ID, table_of(samples))
    for read, sample in zip(read_step(tmp_path, 12, RUN_ID), samples, strict=True):
        for name in MASKS:
            assert read.arrays.columns[name].tolist() == sample.arrays.columns[name].tolist()
        assert MASKS[0] in as_trained_on(read.arrays, None, keeps_masks=True).columns
        without = as_trained_on(read.arrays, None)
        assert MASKS[0] not in without.columns
        with pytest.raises(SamplesError, match="the rollout log has no sampling masks"):
            as_trained_on(without, None, keeps_masks=True)


@pytest.mark.parametrize("changes", [{"min_p": 0.2}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 6}])
def test_tokens_that_are_kept_are_those_of_transformers(changes: dict[str, Any]) -> None:
    logits_BV = torch.randn(50, 40, generator=torch.Generator().manual_seed(2)) * 2
    expected_BV, no_ids = logits_BV.clone(), torch.zeros(50, 0)
    if "min_p" in changes:
        expected_BV = transformers.MinPLogitsWarper(changes["min_p"])(no_ids, expected_BV)
    if "top_k" in changes:
        expected_BV = transformers.TopKLogitsWarper(changes["top_k"])(no_ids, expected_BV)
    if "top_p" in changes:
        expected_BV = transformers.TopPLogitsWarper(changes["top_p"])(no_ids, expected_BV)
    limits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    found_BV = restrict(logits_BV, *(torch.tensor([limit]).expand(50) for limit in limits.values()))
    assert torch.equal(found_BV, expected_BV)


def test_tokens_that_tie_with_the_likeliest_pass_any_min_p() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ones = torch.tensor([0]), torch.tensor([1.0]), torch.tensor([1.0])
    assert (restrict(logits_BV, *ones) > -torch.inf).tolist() == [[False, True, True, False]]


def restrict_by_full_sort(logits_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """The definition: a stable sort of all tokens of each row, as if nothing were known to be unlikely."""
    num_tokens = logits_BV.shape[-1]
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    cumulative_BV = logits_BV.softmax(dim=-1).gather(-1, order_BV).cumsum(dim=-1, dtype=torch.float64)
    limit_B1 = torch.where(top_k_B > 0, top_k_B, num_tokens).clamp(max=num_tokens)[:, None]
    total_B1 = torch.where(limit_B1 < num_tokens, cumulative_BV.gather(-1, limit_B1 - 1), 1.0)
    before_BV = torch.cat([torch.zeros(len(logits_BV), 1), cumulative_BV[:, :-1] / total_B1], dim=-1).float()
    is_beyond_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    is_beyond_BV |= torch.arange(num_tokens) >= limit_B1
    sorted_BV = sorted_BV.masked_fill(is_beyond_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)


def adversarial_logits(num_tokens: int) -> torch.Tensor:
    """Return rows that are peaked, ordinary, flat, full of ties, flat but for one token, ruled out, and rounded."""
    generator = torch.Generator().manual_seed(num_tokens)
    random_BV = torch.randn(3, num_tokens, generator=generator)
    flat_V = torch.zeros(num_tokens)
    one_likely_V = flat_V.clone()
    one_likely_V[num_tokens // 2] = 9.0
    few_left_V = torch.full((num_tokens,), -torch.inf)
    few_left_V[num_tokens // 4 : num_tokens // 2] = random_BV[0, num_tokens // 4 : num_tokens // 2]
    signed_zeros_V = torch.where(random_BV[0] > 0, 0.0, -0.0)
    rows = [*(random_BV * torch.tensor([[8.0], [2.0], [0.01]])), flat_V, one_likely_V, few_left_V, signed_zeros_V]
    rows += [(random_BV[1] * 2).round(), (random_BV[2] * 3).bfloat16().float(), random_BV[0].round() * 1e-6]
    return torch.stack(rows)


NEARLY_ONE = 1 - 2.0**-24
TOP_PS = (1e-6, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9999, 0.9999999, NEARLY_ONE, 1.0)


@pytest.mark.parametrize("num_tokens", [12, 1_024, 8_192, 9_001, 70_003])
def test_a_cut_among_the_likeliest_is_the_full_sorts_bit_for_bit(num_tokens: int) -> None:
    logits_BV = adversarial_logits(num_tokens)
    is_long = num_tokens > 9_000  # rounds among 1,024 and 8,192 candidates come before the sort there
    top_ks = {0, 1, 1_024, 1_025, num_tokens - 1, num_tokens, num_tokens + 5} if num_tokens < 70_000 else {0, 8_193}
    for top_k in sorted(top_ks):
        limits = torch.full((len(logits_BV),), top_k), torch.tensor(TOP_PS)
        for shift in range(2 if is_long else len(TOP_PS)):
            shifted = limits[0], limits[1].roll(shift)
            restricted_BV = restrict(logits_BV, *shifted)
            expected_BV = restrict_by_full_sort(logits_BV, *shifted)
            assert torch.equal(restricted_BV.view(torch.int32), expected_BV.view(torch.int32)), (top_k, shift)


def test_ties_at_the_cut_go_to_the_lowest_ids() -> None:
    logits_BV = torch.zeros(4, 50_000)
    logits_BV[:, 40_000] = 1.0
    limits = torch.tensor([3, 1, 0, 2_000]), torch.tensor([1.0, 1.0, 1e-7, 0.5])
    kept = [row.nonzero()[:, 0].tolist() for row in restrict(logits_BV, *limits) > -torch.inf]
    assert kept[:3] == [[0, 1, 40_000], [40_000], [40_000]]
    # (e + n) / (e + 1,999) >= 0.5 from n = 999 on
    assert kept[3] == [*range(999), 40_000]


def test_rows_that_are_not_finite_stay_as_they_are() -> None:
    logits_BV = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0))
    logits_BV[0, 5], logits_BV[1, 6], logits_BV[2] = torch.nan, torch.inf, -torch.inf
    restricted_BV = restrict(logits_BV, torch.tensor([5, 5, 5]), torch.tensor([0.5, 0.5, 0.5]))
    assert torch.equal(restricted_BV.view(torch.int32), logits_BV.view(torch.int32))


def test_a_row_is_cut_as_it_is_alone() -> None:
    logits_BV = torch.randn(9, 20_000, generator=torch.Generator().manual_seed(4)) * 2
    limits = torch.arange(9) * 300, torch.linspace(0.5, 1, 9)
    rows = [restrict(row_V[None], k[None], p[None])[0] for row_V, k, p in zip(logits_BV, *limits, strict=True)]
    assert torch.equal(restrict(logits_BV, *limits), torch.stack(rows))


GROUP = PromptGroup(
    group=0,
    problem=Problem(problem_id="p", question="", answer="", metadata={}),
    prompt_ids=(5, 6),
    seeds=(1,),
)


class Texts:
    """As much of a tokenizer as a session needs to show what was said."""

    takes_media = False

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return " ".join(map(str, token_ids))


def completion_of(*token_ids: int, is_cut: bool = True) -> EngineCompletion:
    """Return a response whose tokens were each drawn from two: itself and the next."""
    words = [np.array([token, token + 1], dtype=np.int32) for token in token_ids]
    return EngineCompletion(
        request_id=0,
        token_ids_T=np.array(token_ids, dtype=np.int32),
        logprobs_T=np.full(len(token_ids), -0.5, dtype=np.float32),
        versions_T=np.zeros(len(token_ids), dtype=np.int32),
        finish_reason="stop",
        masks=SamplingMasks.join(words) if is_cut else None,
    )


def test_conversations_have_masks_where_the_policy_drew() -> None:
    conversation = SampleConversation(GROUP, 0, keeps_masks=True)
    conversation.add_response(completion_of(7, 8), {"role": "assistant", "content": ""})
    conversation.add_answer([{"role": "user", "content": "no"}], [9, 10])
    conversation.take_back_answer()
    conversation.add_answer([{"role": "user", "content": "go on"}], [9])
    conversation.add_response(completion_of(20), {"role": "assistant", "content": ""})
    _, arrays = conversation.finish(Score(1.0, correct=True), "score")
    assert arrays.token_ids_T.tolist() == [5, 6, 7, 8, 9, 20]
    assert arrays.mask_lengths_T.tolist() == [0, 0, 2, 2, 0, 2]
    assert arrays.mask_words_W.tolist() == [7, 8, 8, 9, 20, 21]
    MaskFormat(vocabulary=128).check(arrays)
    _, arrays = SampleConversation(GROUP, 0, keeps_masks=True).finish(Score(0.0, correct=False), "score")
    assert (arrays.mask_lengths_T.tolist(), arrays.num_mask_words_S.tolist()) == ([0, 0], [0])


def test_an_agents_branches_have_masks_where_they_count() -> None:
    session = EpisodeSession(GROUP, 0, Texts(), keeps_masks=True)  # type: ignore[arg-type]
    session.add([5, 6], completion_of(7, 8))
    session.add([5, 6, 7, 8, 9], completion_of(10))
    session.add([5, 6, 7, 8, 3], completion_of(4, is_cut=False))
    _, arrays = session.finish(Score(1.0, correct=True), 0)
    assert arrays.lengths_S.tolist() == [6, 6]
    assert arrays.num_mask_words_S.tolist() == [6, 0], "what both begin with counts in the first"
    assert arrays.mask_lengths_T.tolist() == [0, 0, 2, 2, 0, 2, *[0] * 6]
    MaskFormat(vocabulary=128).check(arrays)


def test_an_agents_response_has_the_masks_of_its_pieces() -> None:
    whole = completion_of(7, 8, 9).masks
    assert whole is not None
    first = SamplingMasks(whole.lengths_T[:1], whole.words_W[:2])
    pieces = [([7], first), ([], None), ([4, 4], None), ([8, 9], whole.slice_from(1))]
    chunks = [
        ResponseChunk(token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), masks=masks)
        for ids, masks in pieces
    ]
    joined = _masks_of(chunks)
    assert joined is not None
    assert joined.lengths_T.tolist() == [2, 0, 0, 2, 2]
    assert joined.words_W.tolist() == whole.words_W.tolist()
    assert _masks_of(chunks[1:3]) is None


def test_an_engine_tells_the_masks_of_what_it_has_made_so_far(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    sizes: dict[str, Any] = {"num_slots": 2, "max_total_sequence_length": 64, "dtype": "float32"}
    engine = TransformersEngine(tmp_path, **sizes, mask_format=MaskFormat(vocabulary=model.config.vocab_size))
    refit(engine, model, 0)
    engine.add_request(request(0, (1, 2), top_k=1, max_new_tokens=3))
    engine.add_request(request(1, (1, 2), top_p=0.5, min_p=0.01))
    engine.add_request(request(2, (3,), max_new_tokens=4))
    for _ in range(3):
        engine.step()
    masks = engine.made({1: 1})[1].masks
    assert masks is not None
    assert len(masks.lengths_T) == 2
    engine.step()  # the first has left its slot to the second, and the third has joined
    left = engine.abort(1)
    assert left is not None
    assert left.masks is not None
    assert left.masks.slice_from(1).words_W[: len(masks.words_W)].tolist() == masks.words_W.tolist()
    assert len(left.masks.lengths_T) == len(left.token_ids_T) == 4
    plain = [completion for _ in range(5) for completion in engine.step()]
    assert [completion.masks for completion in plain] == [None], "nothing was cut off"
    engine.close()
