"""The loss of distillation: the divergence of the policy's distribution of each token from a teacher's.

This is generalised knowledge distillation (Agarwal et al. 2023, arXiv:2306.13649, section 3), on the teacher's
likeliest tokens alone, as in NeMo-RL.

Shapes: ``B`` rows, ``T`` padded positions; ``N`` likeliest tokens of the teacher.
"""

from __future__ import annotations

import math

import torch

from tandem.config.schema import LossFn
from tandem.config.schema.columns import TEACHER_WEIGHTS
from tandem.trainer.losses import Counts, Report, aggregate
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import StudentScores

LOG_NOTHING = -100.0
"""The teacher's log-probability of a token that it treats as impossible."""


def divergence(teacher_BTN: torch.Tensor, student_BTN: torch.Tensor, settings: LossFn) -> torch.Tensor:
    """Return the part of the divergence at each position that comes from tokens with these log-probabilities.

    Let P be the teacher's distribution, Q the student's, and b ``mixed_kl_weight``. Forward is KL(P|Q), reverse
    KL(Q|P), and mixed ``b KL(P|Q) + (1 - b) KL(Q|P)``. The jsd is the generalised divergence of Jensen and Shannon, ``b
    KL(P|M) + (1 - b) KL(Q|M)`` with ``M = b P + (1 - b) Q`` (arXiv:2306.13649, equation 1).
    """
    weight = settings.mixed_kl_weight
    match settings.kl_type:
        case "forward":
            return _kl(teacher_BTN, student_BTN)
        case "reverse":
            return _kl(student_BTN, teacher_BTN)
        case "mixed":
            return weight * _kl(teacher_BTN, student_BTN) + (1 - weight) * _kl(student_BTN, teacher_BTN)
        case "jsd":
            middle_BTN = torch.logaddexp(teacher_BTN + math.log(weight), student_BTN + math.log(1 - weight))
            return weight * _kl(teacher_BTN, middle_BTN) + (1 - weight) * _kl(student_BTN, middle_BTN)


def of_the_rest(student_BTN: torch.Tensor, entropy_BT: torch.Tensor, settings: LossFn) -> torch.Tensor:
    """Return the part of all other tokens, which the teacher treats as impossible.

    Its log-probability of them is `LOG_NOTHING` where it is compared with the student's. In the jsd it only contributes
    to the mixture.
    """
    probability_BTN = student_BTN.exp()
    rest_BT = 1 - probability_BTN.sum(dim=-1)
    if settings.kl_type == "jsd":
        return -(1 - settings.mixed_kl_weight) * math.log(1 - settings.mixed_kl_weight) * rest_BT
    if settings.kl_type == "forward":
        return torch.zeros_like(rest_BT)
    reverse_BT = -entropy_BT - (probability_BTN * student_BTN).sum(dim=-1) - LOG_NOTHING * rest_BT
    return reverse_BT if settings.kl_type == "reverse" else (1 - settings.mixed_kl_weight) * reverse_BT


def scaled(divergence_BT: torch.Tensor, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the divergence scaled to the size of the negative log-likelihood of the tokens, plus the latter.

    The scale is the ratio of their sums over the micro-batch's valid tokens, or 1 where the divergence is zero, and
    carries no gradient. NeMo-RL forms it for each micro-batch too.
    """
    nll_BT = -logprobs_BT
    with torch.no_grad():
        sums = [torch.where(mask_BT, each, 0.0).sum().abs() for each in (nll_BT, divergence_BT)]
        scale = torch.where(sums[1] > 0, sums[0] / sums[1], 1.0)
    return scale * divergence_BT + nll_BT


class DistillationLoss:
    """The mean over the valid tokens of the global batch of the divergence, and of the tokens' own loss.

    The loss is ``kl_loss_weight`` times the divergence, minus ``ce_loss_scale`` times the log-probability of each
    token. With ``dynamic_loss_scaling`` it is `scaled` instead. Teacher and student are normalised distributions over
    the teacher's likeliest tokens. With ``zero_outside_topk``, the student's distribution is over all tokens.
    ``topk_probability`` is the student's probability of these tokens. Of several teachers of each sequence, the
    divergence is the sum by their weights, and what is reported the mean.
    """

    NAMES = ("entropy", "teacher_entropy", "topk_probability")

    def __init__(self, settings: LossFn, counts: Counts, device: torch.device) -> None:
        self._settings = settings
        self._counts = counts
        self.report = Report(self.NAMES, counts.tokens, device)

    def __call__(self, batch: MicroBatch, scores_BT: StudentScores) -> torch.Tensor:
        """Return the micro-batch's part of the loss."""
        weights_BTM = batch.columns.get(TEACHER_WEIGHTS.name)  # None if each sequence has one teacher
        num_teachers = 1 if weights_BTM is None else weights_BTM.shape[-1]
        logits, logprobs = (
            each_BTN.chunk(num_teachers, dim=-1)
            for each_BTN in (batch.teacher_topk_logits_BTN, scores_BT.other_logprobs)
        )
        teachers = [logits_BTN.log_softmax(dim=-1) for logits_BTN in logits]
        parts = [
            self._divergence(teacher_BTN, student_BTN, scores_BT.entropy)
            for teacher_BTN, student_BTN in zip(teachers, logprobs, strict=True)
        ]
        losses_BT = parts[0] if weights_BTM is None else (torch.stack(parts, dim=-1) * weights_BTM).sum(dim=-1)
        if self._settings.dynamic_loss_scaling:
            losses_BT = scaled(losses_BT, scores_BT.logprobs, batch.loss_mask_BT)
        else:
            losses_BT = self._settings.kl_loss_weight * losses_BT
            if self._settings.ce_loss_scale:
                losses_BT = losses_BT - self._settings.ce_loss_scale * scores_BT.logprobs
        entropies = [-(teacher_BTN.exp() * teacher_BTN).sum(dim=-1) for teacher_BTN in teachers]
        entropy_BT = torch.stack(entropies).mean(dim=0)
        probability_BT = scores_BT.other_logprobs.detach().exp().sum(dim=-1) / num_teachers
        self.report.add(batch.loss_mask_BT, scores_BT.entropy, entropy_BT, probability_BT)
        return aggregate(losses_BT, batch.loss_mask_BT, self._counts, token_level=True)

    def _divergence(
        self, teacher_BTN: torch.Tensor, student_BTN: torch.Tensor, entropy_BT: torch.Tensor
    ) -> torch.Tensor:
        """Return the divergence from one teacher at each position."""
        if self._settings.zero_outside_topk:
            losses_BT = divergence(teacher_BTN, student_BTN, self._settings)
            return losses_BT + of_the_rest(student_BTN, entropy_BT, self._settings)
        return divergence(teacher_BTN, student_BTN.log_softmax(dim=-1), self._settings)


def _kl(logprobs_BTN: torch.Tensor, others_BTN: torch.Tensor) -> torch.Tensor:
    return (logprobs_BTN.exp() * (logprobs_BTN - others_BTN)).sum(dim=-1)
