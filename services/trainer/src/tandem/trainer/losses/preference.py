"""The losses of pairs: those of direct preference optimisation, and of reward models.

Shapes: ``B`` rows, ``T`` padded positions; ``P`` pairs: rows ``2 p`` and ``2 p + 1`` are the chosen and the rejected
response to one prompt.
"""

from __future__ import annotations

import torch

from tandem.config.schema import DpoConfig, RewardModelConfig
from tandem.trainer.losses import Counts, Report
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores, TokenValues


class PreferenceLoss:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7), as NeMo-RL computes it.

    The reward of a response is ``log pi(response) - log pi_reference(response)``, summed over its tokens or, with
    ``preference_average_log_probs``, averaged. The loss is the mean over the pairs of the global batch of
    ``preference_loss_weight * -log sigmoid(beta * (reward of chosen - reward of rejected))`` plus
    ``sft_loss_weight * -log pi(chosen)``, where beta is ``reference_policy_kl_penalty``. Reported rewards are without
    beta, as in NeMo-RL.
    """

    NAMES = ("preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean")

    def __init__(self, settings: DpoConfig, counts: Counts, device: torch.device) -> None:
        self._settings = settings
        self._num_pairs = max(1, counts.sequences // 2)
        self.report = Report(self.NAMES, self._num_pairs, device)

    def __call__(self, batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
        """Return the micro-batch's part of the loss."""
        settings = self._settings
        assert batch.reference_logprobs_BT is not None, "DPO needs the reference's log-probabilities"
        rewards_B = _of_responses(
            scores_BT.logprobs - batch.reference_logprobs_BT,
            batch.loss_mask_BT,
            average=settings.preference_average_log_probs,
        )
        logprobs_B = _of_responses(scores_BT.logprobs, batch.loss_mask_BT, average=settings.sft_average_log_probs)
        chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
        preference_P = -torch.nn.functional.logsigmoid(settings.reference_policy_kl_penalty * (chosen_P - rejected_P))
        sft_P = -logprobs_B[0::2]
        is_pair_P = batch.loss_mask_BT.any(dim=1)[0::2]
        self.report.add(is_pair_P, preference_P, sft_P, chosen_P > rejected_P, chosen_P, rejected_P)
        loss_P = settings.preference_loss_weight * preference_P + settings.sft_loss_weight * sft_P
        return torch.where(is_pair_P, loss_P, 0.0).sum() / self._num_pairs


class BradleyTerryLoss:
    """The negative log-likelihood of preferences under scores of responses (Bradley and Terry 1952).

    With r the score of a response, this is the mean over the pairs of the global batch of ``-log sigmoid(r(chosen) -
    r(rejected))`` (Ouyang et al. 2022, arXiv:2203.02155, equation 1). If the data give margins, it is the mean of
    ``-log sigmoid(r(chosen) - r(rejected) - margin)`` (Touvron et al. 2023, arXiv:2307.09288, equation 2). ``accuracy``
    is the share of pairs in which the chosen response has the higher score, without regard to margins.
    """

    NAMES = ("accuracy", "rewards_chosen_mean", "rewards_rejected_mean")

    def __init__(self, settings: RewardModelConfig, counts: Counts, device: torch.device) -> None:
        self._num_pairs = max(1, counts.sequences // 2)
        self.report = Report(self.NAMES, self._num_pairs, device)

    def __call__(self, batch: MicroBatch, scores_BT: TokenValues) -> torch.Tensor:
        """Return the micro-batch's part of the loss."""
        mask_BT = batch.loss_mask_BT  # one position in each row
        scores_B, margins_B = (
            _of_responses(each_BT, mask_BT, average=False) for each_BT in (scores_BT.values, batch.rewards_BT)
        )
        chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
        losses_P = -torch.nn.functional.logsigmoid(chosen_P - rejected_P - (margins_B[0::2] - margins_B[1::2]))
        is_pair_P = mask_BT.any(dim=1)[0::2]
        self.report.add(is_pair_P, chosen_P > rejected_P, chosen_P, rejected_P)
        return torch.where(is_pair_P, losses_P, 0.0).sum() / self._num_pairs


def _of_responses(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, average: bool) -> torch.Tensor:
    """Sum the valid tokens of each row, or average them."""
    sums_B = torch.where(mask_BT, values_BT, 0.0).sum(dim=1)
    return sums_B / mask_BT.sum(dim=1).clamp(min=1) if average else sums_B
