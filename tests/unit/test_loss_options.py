"""GSPO, CISPO, REINFORCE, the correction for the sampler and the KL penalty, each against its equation."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from loss_harness import COUNTS, CPU, CURRENT_BT, ENTROPY_BT, MASK_BT, micro_batch, scores, settings

from tandem.config.schema import LossFn
from tandem.trainer.losses import Counts, finite_ratio, kl_penalty, weighted_kl_penalty
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss, importance_weights, surrogate
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores

PLACES = [(int(row), int(position)) for row, position in MASK_BT.nonzero()]
ROWS = [[place for place in PLACES if place[0] == row] for row in range(2)]


def loss_and_gradient(config: LossFn, batch: MicroBatch) -> tuple[float, torch.Tensor]:
    logprobs_BT = CURRENT_BT.clone().requires_grad_()
    loss = PolicyGradientLoss(config, COUNTS, CPU)(batch, scores(logprobs_BT))
    loss.backward()
    assert logprobs_BT.grad is not None
    assert not logprobs_BT.grad[~MASK_BT].any(), "what does not count moves nothing"
    return float(loss.detach()), logprobs_BT.grad


def report_of(config: LossFn, batch: MicroBatch) -> dict[str, float]:
    loss = PolicyGradientLoss(config, COUNTS, CPU)
    loss(batch, scores(CURRENT_BT))
    return dict(zip(loss.report.names, loss.report.sums.tolist(), strict=True))


def test_an_entropy_bonus_is_a_mean_over_all_tokens_however_the_loss_is_one() -> None:
    """PPO's equation 9 (arXiv:1707.06347) with the mean over tokens, as in TRL 1.16's `entropy_coef`."""
    for token_level in (True, False):
        plain = settings(token_level_loss=token_level)
        rewarded = settings(token_level_loss=token_level, entropy_coef=0.25)
        entropy_BT = ENTROPY_BT.clone().requires_grad_()
        given = scores(CURRENT_BT)._replace(entropy=entropy_BT)
        loss = PolicyGradientLoss(rewarded, COUNTS, CPU)(micro_batch(), given)
        loss.backward()
        bonus = sum(float(ENTROPY_BT[place]) for place in PLACES) / len(PLACES)
        assert float(loss.detach()) == pytest.approx(loss_and_gradient(plain, micro_batch())[0] - 0.25 * bonus)
        torch.testing.assert_close(entropy_BT.grad, torch.where(MASK_BT, -0.25 / len(PLACES), 0.0).double())


def log_ratios(batch: MicroBatch, row: int) -> list[float]:
    assert batch.previous_logprobs_BT is not None
    return [float(CURRENT_BT[place] - batch.previous_logprobs_BT[place]) for place in ROWS[row]]


# --- the mean over tokens ---------------------------------------------------------------------------------------------


def token_losses(batch: MicroBatch) -> list[list[float]]:
    """The loss of each counted token, by row: -min(r A, clip(r, 0.8, 1.2) A)."""
    rows = []
    for row, advantage in enumerate((1.5, -0.5)):
        ratios = [math.exp(log_ratio) for log_ratio in log_ratios(batch, row)]
        rows.append([-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) for ratio in ratios])
    return rows


def test_the_loss_of_dr_grpo_divides_by_a_constant_length() -> None:
    # arXiv:2503.20783, listing 1: the masked sum over the constant, then the mean over sequences.
    batch = micro_batch()
    config = settings(loss_type="dr_grpo", loss_scale_factor=5)
    expected = sum(sum(row) / 5 for row in token_losses(batch)) / 2
    assert loss_and_gradient(config, batch)[0] == pytest.approx(expected, rel=1e-9)


def test_bnpo_is_a_mean_over_the_tokens_of_a_micro_batch() -> None:
    # TRL 1.16, GRPOTrainer._compute_loss: (per_token_loss * mask).sum() / mask.sum(), a mean over micro-batches.
    batch = micro_batch()
    first, second = token_losses(batch)
    bnpo = settings(loss_type="bnpo")
    whole, _ = loss_and_gradient(bnpo, batch)
    assert whole == pytest.approx(sum([*first, *second]) / 4, rel=1e-9)
    assert whole == pytest.approx(loss_and_gradient(settings(token_level_loss=True), batch)[0], rel=1e-9)
    loss = PolicyGradientLoss(bnpo, COUNTS, CPU)
    total = 0.0
    for row in range(2):
        mask_BT = MASK_BT & (torch.arange(2) == row)[:, None]
        total += float(loss(msgspec.structs.replace(batch, loss_mask_BT=mask_BT), scores(CURRENT_BT)))
    assert total == pytest.approx((sum(first) / len(first) + sum(second) / len(second)) / 2, rel=1e-9)


# --- one ratio a sequence --------------------------------------------------------------------------------------------


def gspo(**changes: Any) -> LossFn:
    return settings(**{"sequence_level_importance_ratios": True, "token_level_loss": False} | changes)


def test_gspo_by_hand() -> None:
    # arXiv:2507.18071, equations 5 and 7: the mean over sequences of -min(s A, clip(s) A), s = exp(mean log-ratio).
    batch = micro_batch()
    config = gspo(ratio_clip_min=0.1, ratio_clip_max=0.3)
    expected = 0.0
    for row, advantage in enumerate((1.5, -0.5)):
        ratio = math.exp(sum(log_ratios(batch, row)) / len(ROWS[row]))
        clipped = min(max(ratio, 0.9), 1.3)
        expected -= min(ratio * advantage, clipped * advantage) / 2
    assert loss_and_gradient(config, batch)[0] == pytest.approx(expected, rel=1e-9)


def test_the_gradient_of_gspo_is_shared_by_the_tokens_of_a_sequence() -> None:
    # d/dlogp_t of -s A is -s A / |y|: equation 10 of arXiv:2507.18071. Bounds so wide that none clips.
    batch = micro_batch()
    _, gradient_BT = loss_and_gradient(gspo(ratio_clip_min=1.0, ratio_clip_max=99.0), batch)
    for row, advantage in enumerate((1.5, -0.5)):
        ratio = math.exp(sum(log_ratios(batch, row)) / len(ROWS[row]))
        for place in ROWS[row]:
            assert float(gradient_BT[place]) == pytest.approx(-ratio * advantage / len(ROWS[row]) / 2, rel=1e-9)


def test_uncounted_positions_do_not_enter_the_ratio_of_a_sequence() -> None:
    batch = micro_batch()
    noise_BT = torch.where(MASK_BT, CURRENT_BT, -7.0)
    found = PolicyGradientLoss(gspo(), COUNTS, CPU)(batch, scores(noise_BT))
    assert float(found) == loss_and_gradient(gspo(), batch)[0]


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens() -> None:
    batch = micro_batch()
    assert batch.previous_logprobs_BT is not None
    config = gspo(use_importance_sampling_correction=True)
    weights_BT, _ = importance_weights(batch.previous_logprobs_BT, batch.generation_logprobs_BT, MASK_BT, config)
    for row in range(2):
        product = math.prod(
            math.exp(float(batch.previous_logprobs_BT[place] - batch.generation_logprobs_BT[place]))
            for place in ROWS[row]
        )
        assert weights_BT[row].tolist() == pytest.approx([product] * 4, rel=1e-9)


# --- without a ratio, or with one that is no gradient ----------------------------------------------------------------


def test_reinforce_is_minus_advantage_times_log_probability() -> None:
    loss, gradient_BT = loss_and_gradient(settings(disable_ppo_ratio=True), micro_batch())
    expected = -sum((1.5, -0.5)[place[0]] * float(CURRENT_BT[place]) for place in PLACES) / 4
    assert loss == pytest.approx(expected, rel=1e-9)
    expected_BT = torch.where(MASK_BT, -micro_batch().advantages_BT / 4, 0.0)
    torch.testing.assert_close(gradient_BT, expected_BT)
    assert report_of(settings(disable_ppo_ratio=True), micro_batch())["clip_fraction"] == 0


def test_cispo_weights_the_policy_gradient_by_the_clipped_ratio() -> None:
    # arXiv:2506.13585, equations 4 and 5: also a token whose ratio is clipped has a gradient.
    config = settings(use_cispo=True, ratio_clip_min=0.1, ratio_clip_max=0.2)
    batch = micro_batch()
    loss, gradient_BT = loss_and_gradient(config, batch)
    ratios = dict(zip(PLACES, [math.exp(r) for row in range(2) for r in log_ratios(batch, row)], strict=True))
    weights = {place: min(max(ratio, 0.9), 1.2) * (1.5, -0.5)[place[0]] for place, ratio in ratios.items()}
    assert loss == pytest.approx(-sum(w * float(CURRENT_BT[place]) for place, w in weights.items()) / 4, rel=1e-9)
    for place, weight in weights.items():
        assert float(gradient_BT[place]) == pytest.approx(-weight / 4, rel=1e-9)
    num_clipped = sum(not 0.9 <= ratio <= 1.2 for ratio in ratios.values())
    assert report_of(config, batch)["clip_fraction"] == num_clipped
    assert 0 < num_clipped < 4, "the example clips some tokens and not others"


def test_where_the_clip_stops_ppo_cispo_goes_on() -> None:
    ratio_BT, advantage_BT = torch.tensor([[1.5]]), torch.tensor([[2.0]])
    for use_cispo, expected in ((False, 0.0), (True, -2.0 * 1.2)):
        logprobs_BT = ratio_BT.log().requires_grad_()
        surrogate(logprobs_BT, logprobs_BT.exp(), advantage_BT, settings(use_cispo=use_cispo))[0].sum().backward()
        assert float(logprobs_BT.grad) == pytest.approx(expected)  # type: ignore[arg-type]


def test_a_forced_ratio_is_one_whatever_the_previous_policy_says() -> None:
    forced = loss_and_gradient(settings(force_on_policy_ratio=True), micro_batch())
    on_policy = loss_and_gradient(settings(), micro_batch(previous_logprobs_BT=None))
    assert forced[0] == on_policy[0] != loss_and_gradient(settings(), micro_batch())[0]
    assert torch.equal(forced[1], on_policy[1])
    assert report_of(settings(force_on_policy_ratio=True), micro_batch())["probs_ratio"] == 4.0


# --- weights for samples that the engine drew ------------------------------------------------------------------------

RATIOS = [[9.0, 0.25, 1.5, 4.0], [9.0, 9.0, 0.5, 9.0]]
"""Probability in training over that in generation, where it counts: 0.25, 1.5 and 4; 0.5."""


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected", "outside"),
    [
        (None, None, None, [0.25, 1.5, 4.0, 0.5], []),
        ("tis", None, 2.0, [0.25, 1.5, 2.0, 0.5], [2]),
        ("tis", 0.4, 2.0, [0.4, 1.5, 2.0, 0.5], [0, 2]),
        ("icepop", 0.4, 2.0, [0.0, 1.5, 0.0, 0.5], [0, 2]),
        ("icepop", 0.2, 4.5, [0.25, 1.5, 4.0, 0.5], []),
        # The geometric means are 1.5^(1/3) = 1.14 and 0.5.
        ("seq-mask-tis", 0.9, 1.2, [0.25, 1.5, 4.0, 0.0], [3]),
        ("seq-mask-tis", 0.4, 1.1, [0.0, 0.0, 0.0, 0.5], [0, 1, 2]),
    ],
)
def test_weights_out_of_bounds(
    kind: Any, low: float | None, high: float | None, expected: list[float], outside: list[int]
) -> None:
    config = settings(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
    )
    previous_BT = torch.tensor(RATIOS, dtype=torch.float64).log() - 5.0
    batch = micro_batch(previous_logprobs_BT=previous_BT, generation_logprobs_BT=torch.full((2, 4), -5.0))
    weights_BT, is_outside_BT = importance_weights(previous_BT, batch.generation_logprobs_BT, MASK_BT, config)
    assert weights_BT[MASK_BT].tolist() == pytest.approx(expected)
    assert is_outside_BT[MASK_BT].nonzero().flatten().tolist() == outside
    assert report_of(config, batch)["is_oob_ratio"] == len(outside)
    # The loss is that of each token times its weight.
    plain = settings()
    token_losses, _ = surrogate(CURRENT_BT, (CURRENT_BT - previous_BT).exp(), batch.advantages_BT, plain)
    weighted = sum(w * float(token_losses[place]) for w, place in zip(expected, PLACES, strict=True))
    assert loss_and_gradient(config, batch)[0] == pytest.approx(weighted / 4, rel=1e-9)


def test_bounds_on_the_weight_of_a_sequence() -> None:
    # The products are 1.5 and 0.5.
    config = gspo(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.25)
    previous_BT = torch.tensor(RATIOS, dtype=torch.float64).log()
    weights_BT, is_outside_BT = importance_weights(previous_BT, torch.zeros(2, 4), MASK_BT, config)
    assert weights_BT[MASK_BT].tolist() == pytest.approx([1.25] * 3 + [0.5])
    assert is_outside_BT[MASK_BT].tolist() == [True] * 3 + [False]


def test_an_engine_that_gave_a_token_no_probability_spoils_no_gradient() -> None:
    log_ratio = torch.tensor([0.0, math.inf, -math.inf, math.nan, 1e4], requires_grad=True)
    ratio = finite_ratio(log_ratio)
    ratio.sum().backward()
    assert ratio.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


# --- the KL penalty --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "log_ratio", "clamps", "expected"),
    [
        ("k1", 3.0, {"kl_input_clamp_value": 2.0}, -2.0),
        ("k1", -3.0, {"kl_output_clamp_value": 2.5}, 2.5),
        ("k1", 3.0, {"kl_output_clamp_value": 2.5}, -2.5),
        ("k2", -4.0, {"kl_input_clamp_value": 2.0}, 2.0),
        ("k3", 3.0, {"kl_input_clamp_value": 2.0}, math.exp(2.0) - 3.0),
        ("k3", 3.0, {"kl_output_clamp_value": 10.0}, 10.0),
        ("k3", 3.0, {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 100.0}, math.exp(3.0) - 4.0),
        ("k3", 3.0, {}, math.exp(3.0) - 4.0),
    ],
)
def test_the_clamps_of_the_kl_penalty(kind: str, log_ratio: float, clamps: dict[str, float], expected: float) -> None:
    config = settings(reference_policy_kl_type=kind, **clamps)
    policy = torch.tensor([-5.0], dtype=torch.float64)
    assert float(kl_penalty(policy, policy + log_ratio, config)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_gradient_of_the_penalty_in_the_loss_is_that_of_its_mean(kind: str) -> None:
    """In the mean over the policy's own tokens; of k1 and k3 that mean is the divergence. The loss itself is asked."""
    logits_V = torch.tensor([0.7, -0.2, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.2, 0.5, 0.1], dtype=torch.float64).log()
    config = settings(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
    logprobs_V = logits_V.log_softmax(0)
    probabilities_V = logprobs_V.exp()
    mean = (probabilities_V * kl_penalty(logprobs_V, reference_V, config)).sum()
    (exact_gradient,) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    if kind != "k2":
        divergence = (probabilities_V * (logprobs_V - reference_V)).sum()
        (of_divergence,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
        torch.testing.assert_close(exact_gradient, of_divergence, rtol=1e-12, atol=1e-12)
    # Each token of the vocabulary once, in a row of its own, without an advantage: what is left is the penalty.
    batch = micro_batch(
        rows=(0, 1, 2, 3),
        loss_mask_BT=torch.ones(4, 1, dtype=torch.bool),
        generation_logprobs_BT=logprobs_V.detach()[:, None],
        advantages_BT=torch.zeros(4, 1, dtype=torch.float64),
        previous_logprobs_BT=None,
        reference_logprobs_BT=reference_V[:, None],
    )
    penalties = []
    for token in range(4):
        chosen_BT = torch.where(torch.arange(4)[:, None] == token, logprobs_V[:, None], logprobs_V.detach()[:, None])
        zeros_BT = torch.zeros_like(chosen_BT)
        loss = PolicyGradientLoss(config, Counts(tokens=1, sequences=1), CPU)
        whole = loss(batch, TokenScores(chosen_BT, zeros_BT, zeros_BT))
        penalties.append(torch.autograd.grad(whole, logits_V, retain_graph=True)[0])
    gradient = sum(p * each for p, each in zip(probabilities_V.detach(), penalties, strict=True))
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)
    plain = (probabilities_V.detach() * kl_penalty(logprobs_V, reference_V, config)).sum()
    (without,) = torch.autograd.grad(plain, logits_V, retain_graph=True)
    assert not torch.allclose(without, exact_gradient, atol=1e-2), "the example tells the two apart"
    if kind == "k1":
        assert without.abs().max() < 1e-12, "alone it pulls nowhere"


def test_past_the_bound_on_the_log_ratio_no_penalty_pulls() -> None:
    log_ratio = torch.tensor([3.0, -3.0, 1.0], dtype=torch.float64)
    logprobs = torch.full((3,), -5.0, dtype=torch.float64, requires_grad=True)
    config = settings(kl_input_clamp_value=2.0, reference_policy_kl_type="k1")
    for sampler in (logprobs.detach(), logprobs.detach() - 0.5):
        penalty = weighted_kl_penalty(logprobs, logprobs.detach() + log_ratio, sampler, config)
        (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
        weight = float((logprobs - sampler).detach()[0].exp())
        # Of p / g times -log(reference / p): p / g times (1 - the log-ratio).
        assert gradient.tolist()[:2] == [0.0, 0.0]
        penalty = weighted_kl_penalty(logprobs, logprobs.detach() + log_ratio / 2, sampler, config)
        (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
        assert gradient.tolist() == pytest.approx((weight * (1.0 - log_ratio / 2)).tolist(), rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_reweighted_the_penalty_has_value_and_gradient_of_the_divergence(kind: str) -> None:
    """Over all tokens that another policy may draw, weighted by its probabilities; the gradient is autograd's."""
    logits_V = torch.tensor([0.7, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    generation_V = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    config = settings(reference_policy_kl_type=kind)
    logprobs_V = logits_V.log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - reference_V.log())).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits_V, retain_graph=True)
    estimates_V = weighted_kl_penalty(logprobs_V, reference_V.log(), generation_V.log(), config)
    estimate = (generation_V * estimates_V).sum()
    (gradient,) = torch.autograd.grad(estimate, logits_V, retain_graph=True)
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)
    (plain,) = torch.autograd.grad((generation_V * kl_penalty(logprobs_V, reference_V.log(), config)).sum(), logits_V)
    assert not torch.allclose(plain, exact_gradient, atol=1e-2), "the example tells the two apart"


def test_the_weighted_penalty_is_added_to_the_loss() -> None:
    config = settings(reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=True)
    batch = micro_batch()
    assert batch.reference_logprobs_BT is not None
    kl = 0.0
    for place in PLACES:
        current, reference = float(CURRENT_BT[place]), float(batch.reference_logprobs_BT[place])
        weight = math.exp(current - float(batch.generation_logprobs_BT[place]))
        kl += weight * (math.exp(reference - current) - 1 - (reference - current))
    without = loss_and_gradient(settings(), batch)[0]
    assert loss_and_gradient(config, batch)[0] == pytest.approx(without + 0.1 * kl / 4, rel=1e-9)
    assert report_of(config, batch)["kl"] == pytest.approx(kl, rel=1e-9)


def test_a_penalty_in_the_reward_is_reported_and_not_in_the_loss() -> None:
    config = settings(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    batch = micro_batch()
    assert loss_and_gradient(config, batch)[0] == loss_and_gradient(settings(), batch)[0]
    assert report_of(config, batch)["kl"] > 0


# --- likelihood of what had a reward --------------------------------------------------------------------------------


@pytest.mark.parametrize("token_level", [True, False])
def test_the_likelihood_of_positive_examples_is_a_mean_over_their_tokens(token_level: bool) -> None:
    """arXiv:2504.05118, equation 10: of the three tokens of the first row, whatever the mean of the rest."""
    without = loss_and_gradient(settings(token_level_loss=token_level), micro_batch())
    config = settings(token_level_loss=token_level, positive_example_nll_weight=0.3)
    loss, gradient_BT = loss_and_gradient(config, micro_batch())
    nll = -sum(float(CURRENT_BT[place]) for place in ROWS[0]) / 3
    assert loss == pytest.approx(without[0] + 0.3 * nll, rel=1e-12)
    assert report_of(config, micro_batch())["positive_example_nll"] == pytest.approx(4 * nll, rel=1e-12)
    added_BT = gradient_BT - without[1]
    for place in PLACES:
        assert float(added_BT[place]) == pytest.approx(-0.3 / 3 if place in ROWS[0] else 0.0, abs=1e-12)


def test_a_batch_without_a_positive_example_has_no_likelihood_to_raise() -> None:
    batch = micro_batch(is_positive_BT=torch.zeros(2, 4, dtype=torch.bool))
    counts = Counts(tokens=4, sequences=2)
    config = settings(positive_example_nll_weight=0.3)
    found = PolicyGradientLoss(config, counts, CPU)(batch, scores(CURRENT_BT))
    assert float(found) == loss_and_gradient(settings(), batch)[0]


# --- any micro-batching ----------------------------------------------------------------------------------------------

OPTIONS = [
    settings(reference_policy_kl_penalty=0.1),
    settings(positive_example_nll_weight=0.3),
    settings(token_level_loss=False, ratio_clip_max=0.28, ratio_clip_c=3.0),
    gspo(use_importance_sampling_correction=True),
    gspo(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.5,
        truncated_importance_sampling_ratio_min=0.5,
    ),
    settings(use_cispo=True, reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=True),
    settings(
        disable_ppo_ratio=True,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.2,
        truncated_importance_sampling_ratio_min=0.8,
    ),
    settings(entropy_coef=0.3),
    settings(loss_type="dr_grpo", loss_scale_factor=5, entropy_coef=0.3),
]


@pytest.mark.parametrize("config", OPTIONS, ids=range(len(OPTIONS)))
def test_rows_one_by_one_and_wider_give_the_same_loss_and_gradient(config: LossFn) -> None:
    batch = micro_batch()
    expected, expected_BT = loss_and_gradient(config, batch)
    logprobs_BT = CURRENT_BT.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    loss = PolicyGradientLoss(config, COUNTS, CPU)
    for row in range(2):
        part = MicroBatch(
            rows=(row,),
            lengths_B=batch.lengths_B[row : row + 1],
            **{
                name: torch.nn.functional.pad(getattr(batch, name)[row : row + 1], (0, 3))
                for name in MicroBatch.__struct_fields__
                if name.endswith("_BT")
            },
            columns={
                name: torch.nn.functional.pad(values_BT[row : row + 1], (0, 3))
                for name, values_BT in batch.columns.items()
            },
        )
        pad = torch.nn.functional.pad
        total = total + loss(
            part, TokenScores(*(pad(each_BT[row : row + 1], (0, 3)) for each_BT in scores(logprobs_BT)))
        )
    total.backward()
    assert float(total.detach()) == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(logprobs_BT.grad, expected_BT, rtol=0, atol=1e-12)
