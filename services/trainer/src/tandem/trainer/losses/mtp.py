"""The loss of multi-token prediction layers, added to the policy's.

It is that of DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Shapes: ``B`` rows, ``T`` padded positions, ``D`` predictions of each token apart from the policy's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.common.user_code import named
from tandem.config import Config
from tandem.trainer.losses import Counts, Loss, Report
from tandem.trainer.losses.custom import CustomLoss
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores

_NAMES = ("mtp_loss", "mtp_accuracy")


class MtpScores(NamedTuple):
    """A policy's scores of tokens, and those of the layers that predict them from further back."""

    logprobs: torch.Tensor
    """The policy's log-probabilities, where a caller that keeps them looks."""
    policy: Scores
    """All of the policy's scores."""
    further_logprobs_BTD: torch.Tensor
    """Log-probabilities by each of these layers, at temperature 1, with gradient; zero where a sequence has no token
    that far back.
    """
    is_likeliest_BTD: torch.Tensor
    """One if the layer gives no token a larger logit, else zero."""


class MtpLoss:
    """The policy's loss, to whose gradient is added that of `MtpScores`. The value stays the policy's own.

    It is ``loss_scaling_factor / D`` times the sum over the layers of the mean cross entropy, over the valid tokens of
    the global batch. Scores without gradient are only the policy's, and so is then the report.
    """

    def __init__(self, config: Config, counts: Counts, device: torch.device) -> None:
        if config.loss_fn.class_path is None:
            section = getattr(config, config.declaration.loss_section)
            self._policy_loss: Loss = named(config.declaration.loss)(section, counts, device)
        else:
            self._policy_loss = CustomLoss(config, counts, device)
        self._num_tokens = max(1, counts.tokens)
        self._factor = config.policy.mtp.loss_scaling_factor
        self._sums = torch.zeros(len(_NAMES), dtype=torch.float64, device=device)
        self._has_scores = False

    @property
    def report(self) -> Report:
        """The means that the policy's loss reports and, of these layers, the loss and the share of likeliest tokens.

        Tokens without a prediction count as zeros in both.
        """
        policy = self._policy_loss.report
        if not self._has_scores:
            return policy
        report = Report((*policy.names, *_NAMES), policy.count, policy.sums.device)
        report.sums = torch.cat([policy.sums, self._sums * (policy.count / self._num_tokens)])
        return report

    def __call__(self, batch: MicroBatch, scores_BT: Scores | MtpScores) -> torch.Tensor:
        """Return the policy's loss of a micro-batch, with the gradient of both."""
        if not isinstance(scores_BT, MtpScores):
            return self._policy_loss(batch, scores_BT)
        value = self._policy_loss(batch, scores_BT.policy)
        num_layers = scores_BT.further_logprobs_BTD.shape[2]
        cross_entropy = -scores_BT.further_logprobs_BTD.sum(dtype=torch.float64)
        self._has_scores = True
        likeliest = scores_BT.is_likeliest_BTD.sum(dtype=torch.float64)
        self._sums += torch.stack([cross_entropy.detach(), likeliest]) / num_layers
        scaled = (self._factor / (num_layers * self._num_tokens) * cross_entropy).to(value.dtype)
        return value + (scaled - scaled.detach())
