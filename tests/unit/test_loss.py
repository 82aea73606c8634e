"""The losses against their closed forms, computed here token by token with `math`, and against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_harness import COUNTS, CPU, CURRENT_BT, ENTROPY_BT, MASK_BT, micro_batch, scores, settings

from tandem.config.schema import LossFn, SftConfig
from tandem.trainer.losses import Counts, aggregate, kl_penalty
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss, importance_weights, surrogate
from tandem.trainer.losses.supervised import NegativeLogLikelihood
from tandem.trainer.micro_batches import MicroBatch


def ratio_loss(ratio: float, advantage: float, **changes: Any) -> tuple[float, bool]:
    ratio_BT = torch.tensor([[ratio]], dtype=torch.float64)
    loss_BT, is_clipped_BT = surrogate(ratio_BT.log(), ratio_BT, torch.tensor([[advantage]]), settings(**changes))
    return float(loss_BT), bool(is_clipped_BT)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.0 * 1.28, True),  # a good token may not gain more than the upper bound
        (0.5, 2.0, -1.0, False),  # one that has lost too much may come back
        (1.5, -2.0, 3.0, False),
        (0.5, -2.0, 2.0 * 0.8, True),  # a bad token may not lose more than the lower bound
        (9.0, -2.0, 18.0, False),  # unbounded without the dual clip
    ],
)
def test_the_clip_has_a_lower_and_an_upper_bound(
    ratio: float, advantage: float, expected: float, clipped: bool
) -> None:
    loss, is_clipped = ratio_loss(ratio, advantage, ratio_clip_min=0.2, ratio_clip_max=0.28)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert is_clipped is clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(9.0, -2.0, 6.0), (2.0, -2.0, 4.0), (9.0, 2.0, -2.4), (0.1, 2.0, -0.2)]
)
def test_the_dual_clip_bounds_negative_advantages_only(ratio: float, advantage: float, expected: float) -> None:
    assert ratio_loss(ratio, advantage, ratio_clip_c=3.0)[0] == pytest.approx(expected, rel=1e-6)


KL: dict[str, Callable[[float, float], float]] = {
    "k1": lambda policy, reference: policy - reference,
    "k2": lambda policy, reference: (reference - policy) ** 2 / 2,
    "k3": lambda policy, reference: math.exp(reference - policy) - 1 - (reference - policy),
}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("policy", "reference"), [(-1.0, -1.0), (-0.5, -2.0), (-3.0, -0.1)])
def test_kl_estimators(kind: Any, policy: float, reference: float) -> None:
    logprobs, reference_logprobs = torch.tensor([policy, reference], dtype=torch.float64)
    found = kl_penalty(logprobs, reference_logprobs, settings(reference_policy_kl_type=kind))
    assert float(found) == pytest.approx(KL[kind](policy, reference), rel=1e-12, abs=1e-12)


def test_k1_and_k3_are_unbiased_estimates_of_the_divergence() -> None:
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((policy_V * (policy_V / reference_V).log()).sum())
    for kind in ("k1", "k3"):
        estimate_V = kl_penalty(policy_V.log(), reference_V.log(), settings(reference_policy_kl_type=kind))
        expected = (policy_V * estimate_V).sum()
        assert float(expected) == pytest.approx(exact, rel=1e-12)


def test_importance_weights_are_ratios_and_never_infinite() -> None:
    previous = torch.tensor([[-1.0, -1.0, 0.0, -math.inf, -1.0]])
    generation = torch.tensor([[-2.0, -1.0, -math.inf, -math.inf, math.nan]])
    weights, is_outside = importance_weights(previous, generation, torch.ones(1, 5, dtype=torch.bool), settings())
    assert not is_outside.any()
    assert weights.tolist()[0] == pytest.approx([math.e, 1.0, 0.0, 0.0, 0.0])


def test_token_level_and_sequence_level_means() -> None:
    values_BT = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 9.0, 10.0, 9.0]])
    assert float(aggregate(values_BT, MASK_BT, COUNTS, token_level=True)) == pytest.approx((1 + 2 + 3 + 10) / 4)
    assert float(aggregate(values_BT, MASK_BT, COUNTS, token_level=False)) == pytest.approx((2 + 10) / 2)


def test_uncounted_positions_do_not_matter_whatever_they_hold() -> None:
    values_BT = torch.where(MASK_BT, 2.0, math.nan)
    assert float(aggregate(values_BT, MASK_BT, COUNTS, token_level=True)) == 2.0
    assert float(aggregate(values_BT, MASK_BT, COUNTS, token_level=False)) == 2.0


def test_a_batch_in_which_nothing_counts_has_no_loss() -> None:
    nothing_BT = torch.zeros_like(MASK_BT)
    none = Counts(tokens=0, sequences=0)
    for token_level in (True, False):
        assert float(aggregate(torch.ones(2, 4), nothing_BT, none, token_level=token_level)) == 0.0


def by_hand(batch: MicroBatch, config: LossFn) -> float:
    """The loss of the micro-batch, token by token."""
    assert batch.previous_logprobs_BT is not None
    assert batch.reference_logprobs_BT is not None
    sequences = []
    for row in range(2):
        losses = []
        for position in MASK_BT[row].nonzero().flatten().tolist():
            current = float(CURRENT_BT[row, position])
            previous = float(batch.previous_logprobs_BT[row, position])
            advantage = float(batch.advantages_BT[row, position])
            ratio = math.exp(current - previous)
            clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
            loss = max(-advantage * ratio, -advantage * clipped)
            if config.ratio_clip_c is not None and advantage < 0:
                loss = min(loss, -advantage * config.ratio_clip_c)
            if config.use_importance_sampling_correction:
                loss *= math.exp(previous - float(batch.generation_logprobs_BT[row, position]))
            reference = float(batch.reference_logprobs_BT[row, position])
            losses.append(
                loss + config.reference_policy_kl_penalty * KL[config.reference_policy_kl_type](current, reference)
            )
        sequences.append(losses)
    if config.token_level_loss:
        return sum(map(sum, sequences)) / 4
    return sum(sum(losses) / len(losses) for losses in sequences) / 2


@pytest.mark.parametrize("token_level_loss", [True, False])
@pytest.mark.parametrize("use_importance_sampling_correction", [True, False])
@pytest.mark.parametrize("ratio_clip_c", [None, 1.1])
@pytest.mark.parametrize(("kl_type", "penalty"), [("k1", 0.1), ("k2", 0.1), ("k3", 0.1), ("k3", 0.0)])
def test_the_whole_loss_by_hand(
    token_level_loss: bool,
    use_importance_sampling_correction: bool,
    ratio_clip_c: float | None,
    kl_type: str,
    penalty: float,
) -> None:
    config = settings(
        token_level_loss=token_level_loss,
        use_importance_sampling_correction=use_importance_sampling_correction,
        ratio_clip_c=ratio_clip_c,
        reference_policy_kl_type=kl_type,
        reference_policy_kl_penalty=penalty,
    )
    batch = micro_batch()
    found = PolicyGradientLoss(config, COUNTS, CPU)(batch, scores(CURRENT_BT))
    assert float(found) == pytest.approx(by_hand(batch, config), rel=1e-9)


def test_the_gradient_on_policy_is_the_policy_gradient() -> None:
    # Ratio one everywhere: d loss / d logprob = -advantage / number of tokens.
    logprobs_BT = CURRENT_BT.clone().requires_grad_()
    batch = micro_batch(previous_logprobs_BT=None)
    PolicyGradientLoss(settings(), COUNTS, CPU)(batch, scores(logprobs_BT)).backward()
    assert logprobs_BT.grad is not None
    expected_BT = torch.where(MASK_BT, -batch.advantages_BT / 4, 0.0)
    torch.testing.assert_close(logprobs_BT.grad, expected_BT)


def test_no_gradient_flows_through_weights_that_correct_for_the_sampler() -> None:
    logprobs_BT = CURRENT_BT.clone().requires_grad_()
    batch = micro_batch(previous_logprobs_BT=None)
    config = settings(use_importance_sampling_correction=True)
    PolicyGradientLoss(config, COUNTS, CPU)(batch, scores(logprobs_BT)).backward()
    weights_BT, _ = importance_weights(CURRENT_BT, batch.generation_logprobs_BT, MASK_BT, config)
    expected_BT = torch.where(MASK_BT, -batch.advantages_BT * weights_BT / 4, 0.0)
    torch.testing.assert_close(logprobs_BT.grad, expected_BT)


def test_the_report_sums_over_counted_tokens() -> None:
    config = settings(reference_policy_kl_penalty=0.1, ratio_clip_min=0.1, ratio_clip_max=0.2)
    batch = micro_batch()
    loss = PolicyGradientLoss(config, COUNTS, CPU)
    for _ in range(2):  # sums add up over micro-batches
        loss(batch, scores(CURRENT_BT))
    assert batch.previous_logprobs_BT is not None
    assert batch.reference_logprobs_BT is not None
    current, previous, generation, reference, entropy = (
        tensor[MASK_BT]
        for tensor in (
            CURRENT_BT,
            batch.previous_logprobs_BT,
            batch.generation_logprobs_BT,
            batch.reference_logprobs_BT,
            ENTROPY_BT,
        )
    )
    ratios = [math.exp(a - b) for a, b in zip(current, previous, strict=True)]
    advantages = [1.5, 1.5, 1.5, -0.5]
    expected = {
        "kl": sum(KL["k3"](float(a), float(b)) for a, b in zip(current, reference, strict=True)),
        "approx_kl": sum(KL["k3"](float(a), float(b)) for a, b in zip(previous, current, strict=True)),
        "entropy": float(entropy.sum()),
        "clip_fraction": sum(
            (a > 0 and r > 1.2) or (a < 0 and r < 0.9) for a, r in zip(advantages, ratios, strict=True)
        ),
        "probs_ratio": sum(ratios),
        "probs_ratio_clamped": sum(min(max(ratio, 0.9), 1.2) for ratio in ratios),
        "token_mult_prob_error": sum(math.exp(abs(a - b)) for a, b in zip(generation, previous, strict=True)),
        "sampling_importance_ratio": sum(math.exp(a - b) for a, b in zip(previous, generation, strict=True)),
        "is_oob_ratio": 0.0,
    }
    assert dict(zip(loss.report.names, (loss.report.sums / 2).tolist(), strict=True)) == pytest.approx(expected)
    assert 0 < expected["clip_fraction"] < 4, "the example clips some tokens and not others"


def test_negative_log_likelihood() -> None:
    loss = NegativeLogLikelihood(SftConfig(), Counts(tokens=8, sequences=4), CPU)
    assert float(loss(micro_batch(), scores(CURRENT_BT))) == pytest.approx((1.0 + 2.0 + 0.3 + 1.7) / 8)
    assert loss.report.names == ("entropy", "token_accuracy")
    assert loss.report.sums.tolist() == [5.0, 2.0]
