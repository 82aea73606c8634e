"""The policy-gradient losses: GRPO, DAPO, GSPO, CISPO, REINFORCE and RLOO, by options of ``loss_fn``.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

import torch

from tandem.common.numeric import LARGEST_LOG_RATIO
from tandem.config.schema import LossFn
from tandem.trainer.losses import Counts, Report, aggregate, finite_ratio, weighted_kl_penalty
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import MaskedScores, TokenScores


def probability_ratios(
    logprobs_BT: torch.Tensor, previous_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, settings: LossFn
) -> torch.Tensor:
    """Return the ratio of each token's probability to that under the policy before the step.

    With `sequence_level_importance_ratios` it is the geometric mean over the valid tokens of the sequence: GSPO (Zheng
    et al. 2025, arXiv:2507.18071, equation 7).
    """
    log_ratios_BT = logprobs_BT - previous_logprobs_BT
    if settings.sequence_level_importance_ratios:
        return sequence_means(log_ratios_BT, mask_BT).exp().expand_as(log_ratios_BT)
    return log_ratios_BT.exp()


def surrogate(
    logprobs_BT: torch.Tensor, ratios_BT: torch.Tensor, advantages_BT: torch.Tensor, settings: LossFn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, before KL penalty and sampler correction, and a mask of tokens that were clipped.

    * `disable_ppo_ratio`: -A log p, the policy gradient itself: REINFORCE (Williams 1992), RLOO with its baseline
      (Ahmadian et al. 2024, arXiv:2402.14740, section 2.2).
    * `use_cispo`: -A sg(clip(r, 1 - low, 1 + high)) log p, with sg for "no gradient" (MiniMax 2025, arXiv:2506.13585,
      equations 4 and 5).
    * Else max(-A r, -A clip(r, 1 - low, 1 + high)): PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) with
    separate lower and upper bounds (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 10). For negative advantages this
    is unbounded in r. The dual clip (Ye et al. 2020, arXiv:1912.09729, equation 5) bounds it by -A c.
    """
    if settings.disable_ppo_ratio:
        return -advantages_BT * logprobs_BT, torch.zeros_like(ratios_BT, dtype=torch.bool)
    within_BT = clip(ratios_BT, settings)
    if settings.use_cispo:
        return -advantages_BT * within_BT.detach() * logprobs_BT, within_BT != ratios_BT
    unclipped_BT, clipped_BT = -advantages_BT * ratios_BT, -advantages_BT * within_BT
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    if settings.ratio_clip_c is not None:
        bound_BT = -advantages_BT * settings.ratio_clip_c
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)
    return loss_BT, clipped_BT > unclipped_BT


def sequence_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean over the valid tokens of each row, ``[B, 1]``; zero for rows without valid tokens."""
    masked_BT = torch.where(mask_BT, values_BT, 0.0)
    return masked_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def importance_weights(
    previous_logprobs_BT: torch.Tensor,
    generation_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    settings: LossFn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight w of each token, which corrects for the sampler, and a mask of weights out of bounds.

    Even with the same weights, engine and trainer give a token slightly different probabilities, and with older weights
    very different ones. The weight w is a token's probability in training over its probability in generation. With
    `sequence_level_importance_ratios`, it is the product of these over the sequence. A weight that is not finite
    becomes zero. Outside the bounds ``[low, high]`` of `truncated_importance_sampling_ratio_min` and
    `truncated_importance_sampling_ratio`,

    * ``tis`` makes it the bound: min(w, high) (Yao et al. 2025, fengyao.notion.site/off-policy-rl);
    * ``icepop`` makes it zero (Ling team 2025, arXiv:2510.18855);
    * ``seq-mask-tis`` makes all weights of a sequence zero if their geometric mean is out of bounds, and leaves other
    sequences unchanged (Liu et al. 2025, yingru.notion.site).
    """
    log_weights_BT = previous_logprobs_BT - generation_logprobs_BT
    if settings.sequence_level_importance_ratios:
        sums_B1 = torch.where(mask_BT, log_weights_BT, 0.0).sum(dim=1, keepdim=True)
        weights_BT = finite_ratio(sums_B1).expand_as(log_weights_BT)
    else:
        weights_BT = finite_ratio(log_weights_BT)
    high, low = settings.truncated_importance_sampling_ratio, settings.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return weights_BT, torch.zeros_like(mask_BT)
    measured_BT = weights_BT
    if settings.truncated_importance_sampling_type == "seq-mask-tis":
        finite_BT = torch.nan_to_num(log_weights_BT, nan=0.0, posinf=0.0, neginf=0.0)
        measured_BT = sequence_means(finite_BT, mask_BT).exp().expand_as(log_weights_BT)
    is_outside_BT = (measured_BT < low) | (measured_BT > high)
    if settings.truncated_importance_sampling_type == "tis":
        return weights_BT.clamp(low, high), is_outside_BT
    return torch.where(is_outside_BT, 0.0, weights_BT), is_outside_BT


def clip(ratios_BT: torch.Tensor, settings: LossFn) -> torch.Tensor:
    """Return the ratios within their bounds."""
    return ratios_BT.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)


class PolicyGradientLoss:
    """The surrogate, weighted for the sampler, plus a KL penalty: GRPO (arXiv:2402.03300, equation 3) and its kin.

    With `positive_example_nll_weight` mu, the loss also has mu times the mean of -log p over the tokens of the global
    batch from samples with a reward above zero (VAPO, Yue et al. 2025, arXiv:2504.05118, equations 9 and 10). With
    `entropy_coef` c, it has minus c times the mean entropy over the tokens of the global batch (PPO, Schulman et al.
    2017, arXiv:1707.06347, equation 9).

    An object is for one optimizer step. Called with a micro-batch and its scores under the policy in training, it
    returns a scalar.
    """

    NAMES = (
        "kl",
        "approx_kl",
        "entropy",
        "clip_fraction",
        "probs_ratio",
        "probs_ratio_clamped",
        "token_mult_prob_error",
        "sampling_importance_ratio",
        "is_oob_ratio",
    )

    def __init__(self, settings: LossFn, counts: Counts, device: torch.device) -> None:
        self._settings = settings
        self._counts = counts
        names = self.NAMES if settings.positive_example_nll_weight == 0 else (*self.NAMES, "positive_example_nll")
        self.report = Report(names, counts.tokens, device)

    def __call__(self, batch: MicroBatch, scores_BT: TokenScores | MaskedScores) -> torch.Tensor:
        """Return the micro-batch's part of the loss. With sampling masks, only the penalty is without them."""
        settings, mask_BT, logprobs_BT = self._settings, batch.loss_mask_BT, scores_BT.logprobs
        current_BT = logprobs_BT.detach()
        # Before the first optimizer step on a rollout batch, the previous policy is the current one, to the bit.
        is_current = batch.previous_logprobs_BT is None or settings.force_on_policy_ratio
        previous_BT = current_BT if is_current else batch.previous_logprobs_BT
        assert previous_BT is not None
        ratios_BT = probability_ratios(logprobs_BT, previous_BT, mask_BT, settings)
        loss_BT, is_clipped_BT = surrogate(logprobs_BT, ratios_BT, batch.advantages_BT, settings)
        weights_BT, is_outside_BT = importance_weights(previous_BT, batch.generation_logprobs_BT, mask_BT, settings)
        if settings.use_importance_sampling_correction:
            loss_BT = weights_BT * loss_BT
        kl_BT = torch.zeros_like(logprobs_BT)
        if settings.reference_policy_kl_penalty > 0:
            whole_BT = scores_BT.whole_logprobs if isinstance(scores_BT, MaskedScores) else logprobs_BT
            kl_BT = self._kl(batch, whole_BT)
            if not settings.use_kl_in_reward:
                loss_BT = loss_BT + settings.reference_policy_kl_penalty * kl_BT
        # The divergence from the policy before the step, by estimator k3, finite however far the two are apart.
        apart_BT = torch.minimum(current_BT, previous_BT + LARGEST_LOG_RATIO) - previous_BT
        nll = [] if settings.positive_example_nll_weight == 0 else [self._positive_nll(batch, logprobs_BT)]
        self.report.add(
            mask_BT,
            kl_BT,
            apart_BT.exp() - 1 - apart_BT,
            scores_BT.entropy,
            is_clipped_BT,
            ratios_BT,
            clip(ratios_BT, settings),
            (batch.generation_logprobs_BT - previous_BT).abs().clamp(max=LARGEST_LOG_RATIO).exp(),
            weights_BT,
            is_outside_BT,
            *nll,
        )
        if settings.loss_type in ("bnpo", "dr_grpo"):
            loss = _aggregate_by_type(loss_BT, mask_BT, self._counts, settings)
        else:
            loss = aggregate(loss_BT, mask_BT, self._counts, token_level=settings.token_level_loss)
        for nll_BT in nll:
            loss = loss + settings.positive_example_nll_weight * aggregate(
                nll_BT, mask_BT, self._counts, token_level=True
            )
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * aggregate(scores_BT.entropy, mask_BT, self._counts, token_level=True)
        return loss

    def _kl(self, batch: MicroBatch, logprobs_BT: torch.Tensor) -> torch.Tensor:
        """Return the divergence from the reference at each token."""
        settings, reference_BT = self._settings, batch.reference_logprobs_BT
        assert reference_BT is not None, "a KL penalty needs the reference's log-probabilities"
        sampler_BT = batch.generation_logprobs_BT if settings.use_on_policy_kl_approximation else logprobs_BT.detach()
        return weighted_kl_penalty(logprobs_BT, reference_BT, sampler_BT, settings)

    def _positive_nll(self, batch: MicroBatch, logprobs_BT: torch.Tensor) -> torch.Tensor:
        """Return -log p for samples with a reward above zero, scaled so that the mean over all tokens is theirs."""
        scale = self._counts.tokens / max(1, self._counts.positive_tokens)
        assert batch.is_positive_BT is not None, "the algorithm declares that it reads rewards"
        return torch.where(batch.is_positive_BT, -logprobs_BT * scale, 0.0)


def _aggregate_by_type(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, settings: LossFn
) -> torch.Tensor:
    """Return this micro-batch's part of ``loss_fn.loss_type``, a scalar.

    * ``dr_grpo``: the sum over tokens, divided by the sequences of the global batch and by a constant length (Liu et
    al. 2025, arXiv:2503.20783, section 3.2 and listing 1). A long sequence then counts more, in proportion.
    * ``bnpo``: the mean over the micro-batch's tokens, weighted by its share of the sequences (TRL 1.16,
    ``GRPOTrainer._compute_loss``, whose micro-batches have equally many). With micro-batches of one sequence it is
    GRPO's mean, with one micro-batch DAPO's.
    """
    total = torch.where(mask_BT, values_BT, 0.0).sum()
    num_sequences = max(1, counts.sequences)
    if settings.loss_type == "dr_grpo":
        assert settings.loss_scale_factor is not None, "the configuration derives it"
        return total / (num_sequences * settings.loss_scale_factor)
    return total / mask_BT.sum().clamp(min=1) * (mask_BT.any(dim=1).sum() / num_sequences)
