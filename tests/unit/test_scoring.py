"""Scores of tokens without their logits, against all the logits and `log_softmax`."""

from __future__ import annotations

import math

import pytest
import torch
from scoring_harness import NUM_TOKENS, VOCABULARY, LargestTensor, inputs, of_full_logits

from tandem.trainer import scoring
from tandem.trainer.scorers.likeliest import top_tokens
from tandem.trainer.scorers.scorer import exclude_tokens, scores_of_logits
from tandem.trainer.scores import StudentScores
from tandem.trainer.scoring import score_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [None, 1, 8, NUM_TOKENS - 1, NUM_TOKENS, 1000])
@pytest.mark.parametrize("cached", [scoring._CACHED, 4 * VOCABULARY, VOCABULARY - 1])
def test_scores_and_gradients_are_those_of_all_logits(
    cached: int, chunk: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a core's cache holds but few tokens' logits, or not those of one."""
    monkeypatch.setattr(scoring, "_CACHED", cached)
    found, expected = inputs(), inputs()
    logprobs_K, entropy_K, is_likeliest_K = score_tokens(*found, temperature=temperature, chunk=chunk)
    expected_logprobs_K, expected_entropy_K, expected_likeliest_K = of_full_logits(*expected, temperature)
    torch.testing.assert_close(logprobs_K, expected_logprobs_K, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy_K, expected_entropy_K, rtol=0, atol=1e-6)
    assert torch.equal(is_likeliest_K, expected_likeliest_K)
    assert 0 < is_likeliest_K.sum() < NUM_TOKENS
    assert not entropy_K.requires_grad
    assert not is_likeliest_K.requires_grad
    weights_K = torch.linspace(-1, 1, NUM_TOKENS)
    (logprobs_K * weights_K).sum().backward()
    (expected_logprobs_K * weights_K).sum().backward()
    for tensor, other in zip(found[:2], expected[:2], strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [5, NUM_TOKENS])
def test_bfloat16_rounds_no_more_than_all_logits_do(chunk: int) -> None:
    found, exact = inputs(torch.bfloat16), inputs(torch.bfloat16)
    whole = tuple(tensor.detach().float().requires_grad_() for tensor in exact[:2])
    logprobs_K, entropy_K, _ = score_tokens(*found, temperature=0.8, chunk=chunk)
    rounded_logprobs_K, rounded_entropy_K, _ = of_full_logits(*exact, 0.8)
    assert logprobs_K.dtype == entropy_K.dtype == torch.float32
    torch.testing.assert_close(logprobs_K, rounded_logprobs_K, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy_K, rounded_entropy_K, rtol=0, atol=1e-6)
    exact_logprobs_K, *_ = of_full_logits(*whole, exact[2], 0.8)
    for scores_K in (logprobs_K, rounded_logprobs_K, exact_logprobs_K):
        scores_K.sum().backward()
    for tensor, rounded, true in zip(found[:2], exact[:2], whole, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.bfloat16
        assert rounded.grad is not None
        error = (tensor.grad.float() - true.grad).norm()
        assert error <= 1.2 * (rounded.grad.float() - true.grad).norm(), "not worse than with all logits"
        assert error <= 0.02 * true.grad.norm()


def test_a_second_backward_over_logits_that_were_used_up_is_an_error() -> None:
    hidden_KH, weight_VH, target_K = inputs()
    logprobs_K, *_ = score_tokens(hidden_KH, weight_VH, target_K, temperature=1.0)
    torch.autograd.backward(logprobs_K.sum(), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(logprobs_K.sum())


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_what_is_frozen_has_no_gradient(needs: tuple[bool, bool]) -> None:
    hidden_KH, weight_VH, target_K = inputs()
    hidden_KH.requires_grad_(needs[0])
    weight_VH.requires_grad_(needs[1])
    logprobs_K, *_ = score_tokens(hidden_KH, weight_VH, target_K, temperature=1.0, chunk=8)
    assert logprobs_K.requires_grad == any(needs)
    if any(needs):
        logprobs_K.sum().backward()
    assert [tensor.grad is not None for tensor in (hidden_KH, weight_VH)] == list(needs)


def test_no_token_has_no_score() -> None:
    hidden_KH, weight_VH, target_K = inputs()
    logprobs_K, entropy_K, is_likeliest_K = score_tokens(hidden_KH[:0], weight_VH, target_K[:0], temperature=1.0)
    logprobs_K.sum().backward()
    assert logprobs_K.shape == entropy_K.shape == is_likeliest_K.shape == (0,)
    assert weight_VH.grad is not None
    assert not weight_VH.grad.any()


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_all_logits_never_exist_at_once(chunk: int) -> None:
    hidden_KH, weight_VH, target_K = inputs()
    allowed = max(chunk * VOCABULARY, hidden_KH.numel(), weight_VH.numel())
    with LargestTensor() as forward:
        logprobs_K, *_ = score_tokens(hidden_KH, weight_VH, target_K, temperature=0.5, chunk=chunk)
    with LargestTensor() as backward:
        logprobs_K.sum().backward()
    assert 0 < forward.num_elements <= allowed
    assert 0 < backward.num_elements <= allowed
    with LargestTensor() as full:
        of_full_logits(hidden_KH, weight_VH, target_K, 0.5)[0].sum().backward()
    assert full.num_elements == NUM_TOKENS * VOCABULARY > allowed, "the measure sees all logits where they exist"


def of_others(
    logits_KV: torch.Tensor, target_K: torch.Tensor, others_KN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets and of others, and the entropy, all with gradient."""
    logprobs_KV = logits_KV.log_softmax(dim=-1)
    entropy_K = -(logprobs_KV.exp() * logprobs_KV).sum(dim=-1)
    return logprobs_KV.gather(1, target_K[:, None])[:, 0], entropy_K, logprobs_KV.gather(1, others_KN)


@pytest.mark.parametrize("learns_entropy", [True, False])
@pytest.mark.parametrize("chunk", [5, NUM_TOKENS])
def test_other_tokens_and_the_entropy_have_the_gradients_of_all_logits(chunk: int, learns_entropy: bool) -> None:
    """Also where the others have the target among them, or one token twice."""
    found, expected = inputs(), inputs()
    others_KN = torch.randint(VOCABULARY, (NUM_TOKENS, 6), generator=torch.Generator().manual_seed(1))
    others_KN[:, 2], others_KN[3, :] = found[2], 7
    scores = score_tokens(*found, temperature=0.7, chunk=chunk, others_KN=others_KN, learns_entropy=learns_entropy)
    assert isinstance(scores, StudentScores)
    logits_KV = (expected[0] @ expected[1].T) / 0.7
    others = of_others(logits_KV, expected[2], others_KN)
    totals = []
    for logprobs_K, entropy_K, others_KN in ((scores.logprobs, scores.entropy, scores.other_logprobs), others):
        weights_KN = torch.linspace(-1, 2, others_KN.numel()).view(others_KN.shape)
        total = (logprobs_K * torch.linspace(-1, 1, NUM_TOKENS)).sum() + (others_KN * weights_KN).sum()
        totals.append(total + 3 * entropy_K.sum() if learns_entropy else total)
        totals[-1].backward()
    torch.testing.assert_close(totals[0], totals[1])
    torch.testing.assert_close(scores.entropy, others[1], rtol=0, atol=1e-5)
    assert scores.entropy.requires_grad == learns_entropy
    for tensor, other in zip(found[:2], expected[:2], strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [5, NUM_TOKENS])
def test_the_likeliest_tokens_are_those_of_all_logits(chunk: int) -> None:
    hidden_KH, weight_VH, _ = inputs()
    logits_KN, token_KN = top_tokens(hidden_KH, weight_VH, 4, temperature=0.7, chunk=chunk)
    expected = ((hidden_KH @ weight_VH.T) / 0.7).topk(4, dim=-1)
    torch.testing.assert_close(logits_KN, expected.values)
    assert torch.equal(token_KN, expected.indices.int())


@pytest.mark.parametrize("learns_entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 8, 1000])
def test_tokens_that_are_never_drawn_have_no_probability(chunk: int | None, learns_entropy: bool) -> None:
    undrawable = (3, 4, VOCABULARY - 2)
    hidden_KH, weight_VH, target_K = inputs()
    other_KH, other_VH = (tensor.detach().double().requires_grad_() for tensor in (hidden_KH, weight_VH))
    target_K = torch.where(torch.isin(target_K, torch.tensor(undrawable)), 5, target_K)
    scores = score_tokens(
        hidden_KH,
        weight_VH,
        target_K,
        temperature=0.7,
        chunk=chunk,
        undrawable=undrawable,
        learns_entropy=learns_entropy,
    )
    left = torch.tensor([token for token in range(VOCABULARY) if token not in undrawable])
    logprobs_KV = ((other_KH @ other_VH[left].T) / 0.7).log_softmax(dim=-1)
    expected_K = logprobs_KV.gather(1, torch.searchsorted(left, target_K)[:, None])[:, 0]
    entropy_K = -(logprobs_KV.exp() * logprobs_KV).sum(dim=-1)
    torch.testing.assert_close(scores.logprobs.double(), expected_K, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.entropy.double(), entropy_K, rtol=0, atol=1e-6)
    weights_K = torch.linspace(-1, 1, NUM_TOKENS)
    of_entropy = 0.3 if learns_entropy else 0.0
    (scores.logprobs * weights_K + of_entropy * scores.entropy).sum().backward()
    (expected_K * weights_K.double() + of_entropy * entropy_K).sum().backward()
    for tensor, other in ((hidden_KH, other_KH), (weight_VH, other_VH)):
        assert tensor.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=0, atol=5e-6)
    best = top_tokens(hidden_KH, weight_VH, VOCABULARY - 3, temperature=0.7, chunk=chunk, undrawable=undrawable)
    assert not torch.isin(best.token_ids, torch.tensor(undrawable)).any()
    whole = exclude_tokens(hidden_KH @ weight_VH.T, undrawable).log_softmax(dim=-1)
    assert (whole[:, list(undrawable)].exp() == 0).all()


def test_the_entropy_of_whole_logits_has_a_gradient_where_a_model_rules_tokens_out() -> None:
    """PyTorch's categorical distribution of the tokens that are left."""
    logits_KV = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left_KV = logits_KV[:, 1:].clone().requires_grad_()
    logits_KV[:, 0] = -math.inf
    logits_KV.requires_grad_()
    scores = scores_of_logits(logits_KV, torch.arange(1, 6), None, learns_entropy=True)
    expected_K = torch.distributions.Categorical(logits=left_KV).entropy()
    torch.testing.assert_close(scores.entropy, expected_K)
    (gradient_KV,) = torch.autograd.grad(scores.entropy.sum(), logits_KV)
    (expected_KV,) = torch.autograd.grad(expected_K.sum(), left_KV)
    torch.testing.assert_close(gradient_KV[:, 1:], expected_KV)
    assert not gradient_KV[:, 0].any()
