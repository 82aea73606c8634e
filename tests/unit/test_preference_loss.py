"""The losses of pairs against their closed forms, computed here with `math`, and DPO's against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tandem.config.schema import DpoConfig, RewardModelConfig
from tandem.trainer.losses import Counts
from tandem.trainer.losses.preference import BradleyTerryLoss, PreferenceLoss
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores, TokenValues

CPU = torch.device("cpu")
# Two pairs, chosen and rejected in turn; the responses have 2, 1, 3 and 2 tokens.
MASK_BT = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
LOGPROBS_BT = [[9.0, -1.0, -0.5, 9.0], [9.0, -2.0, 9.0, 9.0], [9.0, -1.5, -1.0, -0.25], [9.0, 9.0, -0.5, -0.75]]
REFERENCE_BT = [[7.0, -1.2, -0.9, 7.0], [7.0, -1.5, 7.0, 7.0], [7.0, -1.0, -1.0, -0.5], [7.0, 7.0, -1.5, -1.0]]
COUNTS = Counts(tokens=8, sequences=4)


def micro_batch(rows: slice = slice(None), *, num_empty: int = 0) -> MicroBatch:
    """These rows of the batch above, and empty ones behind them."""
    mask_BT = torch.cat([MASK_BT[rows], torch.zeros(num_empty, 4, dtype=torch.bool)])
    reference_BT = torch.cat([torch.tensor(REFERENCE_BT)[rows], torch.zeros(num_empty, 4)])
    num_rows = len(mask_BT)
    return MicroBatch(
        rows=tuple(range(num_rows)),
        lengths_B=torch.full((num_rows,), 4),
        token_ids_BT=torch.zeros(num_rows, 4, dtype=torch.int64),
        attention_mask_BT=torch.ones(num_rows, 4, dtype=torch.bool),
        loss_mask_BT=mask_BT,
        columns={"reference_logprobs": reference_BT},
    )


def run(loss: PreferenceLoss, batch: MicroBatch, logprobs_BT: torch.Tensor) -> torch.Tensor:
    zeros_BT = torch.zeros_like(logprobs_BT)
    return loss(batch, TokenScores(logprobs_BT, zeros_BT, zeros_BT))


def of_row(table: list[list[float]], row: int, *, average: bool) -> float:
    """Sum or mean of a row's counted tokens."""
    values = [value for value, counts in zip(table[row], MASK_BT[row], strict=True) if counts]
    return sum(values) / (len(values) if average else 1)


@pytest.mark.parametrize("average_preference", [False, True])
@pytest.mark.parametrize("average_sft", [False, True])
@pytest.mark.parametrize(("preference_weight", "sft_weight"), [(1.0, 0.0), (0.5, 0.25), (0.0, 1.0)])
def test_the_loss_and_its_parts_are_the_closed_form(
    average_preference: bool, average_sft: bool, preference_weight: float, sft_weight: float
) -> None:
    settings = DpoConfig(
        reference_policy_kl_penalty=0.3,
        preference_average_log_probs=average_preference,
        sft_average_log_probs=average_sft,
        preference_loss_weight=preference_weight,
        sft_loss_weight=sft_weight,
    )
    rewards = [
        of_row(LOGPROBS_BT, row, average=average_preference) - of_row(REFERENCE_BT, row, average=average_preference)
        for row in range(4)
    ]
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    expected = {
        "preference_loss": sum(math.log(1 + math.exp(-0.3 * margin)) for margin in margins) / 2,
        "sft_loss": -sum(of_row(LOGPROBS_BT, row, average=average_sft) for row in (0, 2)) / 2,
        "accuracy": sum(margin > 0 for margin in margins) / 2,
        "rewards_chosen_mean": (rewards[0] + rewards[2]) / 2,
        "rewards_rejected_mean": (rewards[1] + rewards[3]) / 2,
    }
    loss = PreferenceLoss(settings, COUNTS, CPU)
    value = float(run(loss, micro_batch(), torch.tensor(LOGPROBS_BT)))
    found = dict(zip(loss.report.names, (loss.report.sums / loss.report.count).tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-6)
    weighted = preference_weight * expected["preference_loss"] + sft_weight * expected["sft_loss"]
    assert value == pytest.approx(weighted, rel=1e-6)
    assert expected["accuracy"] == 0.5, "one pair is right, the other is not"


def test_the_gradient_is_the_papers() -> None:
    """Equation after (7): beta * sigma(reward of rejected - reward of chosen), up on the chosen, down on the other."""
    beta = 0.3
    logprobs_BT = torch.tensor(LOGPROBS_BT, requires_grad=True)
    loss = PreferenceLoss(DpoConfig(reference_policy_kl_penalty=beta), COUNTS, CPU)
    run(loss, micro_batch(), logprobs_BT).backward()
    assert logprobs_BT.grad is not None
    for pair in range(2):
        chosen, rejected = (
            of_row(LOGPROBS_BT, row, average=False) - of_row(REFERENCE_BT, row, average=False)
            for row in (2 * pair, 2 * pair + 1)
        )
        pull = beta / (1 + math.exp(-beta * (rejected - chosen))) / 2
        for row, sign in ((2 * pair, -1.0), (2 * pair + 1, 1.0)):
            expected_T = torch.where(MASK_BT[row], sign * pull, 0.0)
            torch.testing.assert_close(logprobs_BT.grad[row], expected_T)


def test_micro_batches_add_up_and_empty_pairs_count_nothing() -> None:
    settings = DpoConfig(sft_loss_weight=0.5)
    logprobs_BT = torch.tensor(LOGPROBS_BT)
    whole, split = (PreferenceLoss(settings, COUNTS, CPU) for _ in range(2))
    expected = run(whole, micro_batch(), logprobs_BT)
    empty_BT = torch.zeros(2, 4)
    first = run(split, micro_batch(slice(0, 2), num_empty=2), torch.cat([logprobs_BT[:2], empty_BT]))
    second = run(split, micro_batch(slice(2, 4)), logprobs_BT[2:])
    torch.testing.assert_close(first + second, expected)
    torch.testing.assert_close(split.report.sums, whole.report.sums)


def test_at_the_reference_the_loss_is_log_two_and_no_pair_is_right() -> None:
    loss = PreferenceLoss(DpoConfig(), COUNTS, CPU)
    value = float(run(loss, micro_batch(), torch.tensor(REFERENCE_BT)))
    assert value == pytest.approx(math.log(2))
    means: dict[str, Any] = dict(zip(loss.report.names, (loss.report.sums / loss.report.count).tolist(), strict=True))
    assert (means["accuracy"], means["rewards_chosen_mean"], means["rewards_rejected_mean"]) == (0.0, 0.0, 0.0)


def test_the_loss_of_a_reward_model_is_the_closed_form() -> None:
    """Two pairs, one score a response; the second pair should be ahead by 0.5. An empty pair adds nothing."""
    scores, margin = [1.5, 0.25, -0.5, -0.25], 0.5
    mask_BT = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]], dtype=torch.bool)
    values_BT = torch.full(mask_BT.shape, 7.0).masked_scatter(mask_BT, torch.tensor(scores)).requires_grad_()
    rewards_BT = torch.zeros(mask_BT.shape)
    rewards_BT[2] = margin
    batch = MicroBatch(
        rows=tuple(range(6)),
        lengths_B=torch.full((6,), 3),
        token_ids_BT=torch.zeros(6, 3, dtype=torch.int64),
        attention_mask_BT=torch.ones(6, 3, dtype=torch.bool),
        loss_mask_BT=mask_BT,
        columns={"rewards": rewards_BT},
    )
    loss = BradleyTerryLoss(RewardModelConfig(), Counts(tokens=4, sequences=4), CPU)
    value = loss(batch, TokenValues(values_BT))
    ahead = [scores[0] - scores[1], scores[2] - scores[3] - margin]
    assert float(value.detach()) == pytest.approx(sum(math.log(1 + math.exp(-each)) for each in ahead) / 2, rel=1e-6)
    assert dict(zip(loss.report.names, (loss.report.sums / 2).tolist(), strict=True)) == pytest.approx(
        {"accuracy": 0.5, "rewards_chosen_mean": 0.5, "rewards_rejected_mean": 0.0}
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert values_BT.grad is not None
    pulls = [-1 / (1 + math.exp(each)) / 2 for each in ahead]
    assert values_BT.grad[mask_BT].tolist() == pytest.approx([pulls[0], -pulls[0], pulls[1], -pulls[1]], rel=1e-6)
    assert not values_BT.grad[~mask_BT].any()
