"""Scores by fused kernels, against all the logits and `log_softmax`."""

from __future__ import annotations

import pytest
import torch
from scoring_harness import NUM_TOKENS, VOCABULARY, inputs, of_full_logits

from tandem.trainer.backends import compiling

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates


@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("at_once", [7, NUM_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, at_once: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_LOGITS", at_once * VOCABULARY)
    found, expected = inputs(dtype), inputs(dtype)
    logprobs_K, entropy_K, is_likeliest_K = compiling.score_tokens(*found, temperature=temperature)
    assert logprobs_K.grad_fn is not None
    assert "Fused" in type(logprobs_K.grad_fn).__name__
    expected_logprobs_K, expected_entropy_K, expected_likeliest_K = of_full_logits(*expected, temperature)
    torch.testing.assert_close(logprobs_K, expected_logprobs_K, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy_K, expected_entropy_K, rtol=0, atol=2e-6)
    assert torch.equal(is_likeliest_K, expected_likeliest_K)
    weights_K = torch.linspace(-1, 1, NUM_TOKENS)
    (logprobs_K * weights_K).sum().backward()
    (expected_logprobs_K * weights_K).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2  # gradients are rounded to eight bits
    for tensor, other in zip(found[:2], expected[:2], strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad, rtol=tolerance, atol=tolerance)
