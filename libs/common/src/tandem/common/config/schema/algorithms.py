"""What is learned, and how: one section an algorithm, and the loss of GRPO."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tandem.common.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
)


class Grpo(Section, frozen=True, kw_only=True):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    num_prompts_per_step: PositiveInt = 32
    """Prompt groups in one rollout batch."""
    num_generations_per_prompt: PositiveInt = 16
    """Samples drawn for each prompt: the size of a group."""
    max_rollout_turns: PositiveInt = 1
    """Responses a rollout may give: after each but the last the environment may answer, and the policy goes on."""
    max_num_steps: PositiveInt = 1_000_000
    """Rollout batches to train on before the run ends."""
    normalize_rewards: bool = True
    """Divide each advantage by the standard deviation of the rewards in its group."""
    use_leave_one_out_baseline: bool = True
    """Subtract the mean reward of the group's *other* samples, not of the whole group (Ahmadian et al. 2024,
    arXiv:2402.14740)."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 means never."""
    val_at_start: bool = False
    """Validate before the first step."""
    max_val_samples: PositiveInt = 256
    """Validation problems used each time, from the front of the validation set."""
    val_batch_size: PositiveInt = 256
    """Validation problems sent to the rollouts at once."""
    seed: Seed = 42
    """Decides the problems, their order and every sample."""


class Sft(Section, frozen=True, kw_only=True):
    """Supervised fine-tuning on worked solutions."""

    max_num_epochs: PositiveInt = 1
    """Passes over the training set; the run ends at this or at `max_num_steps`, whichever comes first."""
    max_num_steps: PositiveInt = 60
    """Optimizer steps before the run ends."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 means never."""
    val_batches: PositiveInt = 8
    """Validation batches used each time."""
    val_global_batch_size: PositiveInt = 32
    """Sequences in one validation batch, over all trainers."""
    val_micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass of one trainer while validating."""
    val_at_start: bool = True
    """Validate before the first step."""
    seed: Seed = 42
    """Decides the problems and their order."""


class Dpo(Section, frozen=True, kw_only=True):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290). Known, not built yet."""

    max_num_epochs: PositiveInt = 1
    """Passes over the preference pairs."""
    max_num_steps: PositiveInt = 150
    """Optimizer steps before the run ends."""
    val_period: NonNegativeInt = 25
    """Steps between validations; 0 means never."""
    val_batches: PositiveInt = 8
    """Validation batches used each time."""
    val_global_batch_size: PositiveInt = 8
    """Sequences in one validation batch, over all trainers."""
    val_micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass of one trainer while validating."""
    val_at_start: bool = True
    """Validate before the first step."""
    seed: Seed = 42
    """Decides the order of the pairs."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.05
    """The inverse temperature beta of the DPO loss."""
    preference_average_log_probs: bool = False
    """Divide the preference loss's log-probabilities by the length of the response."""
    sft_average_log_probs: bool = False
    """Divide the added SFT loss's log-probabilities by the length of the response."""
    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the added SFT loss on the chosen responses."""


class LossFn(Section, frozen=True, kw_only=True):
    """The clipped policy-gradient loss of GRPO; SFT does not read it."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the starting model; 0 builds no reference model."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """New. The estimator of that divergence (Schulman 2020, joschu.net/blog/kl-approx.html): k1 is minus the
    log-ratio, k2 half its square, k3 the ratio minus one minus its logarithm, with the ratio of reference to
    policy."""
    ratio_clip_min: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 plus this."""
    ratio_clip_c: Annotated[float, Meta(gt=1)] | None = None
    """Where the advantage is negative, the loss of a token is at most this times the advantage's magnitude (dual
    clip, Ye et al. 2020, arXiv:1912.09729); null means no such bound."""
    use_on_policy_kl_approximation: bool = False
    """Correct the KL estimate for samples drawn by a policy other than the one in training."""
    use_importance_sampling_correction: bool = False
    """Weight each token by its probability in training over its probability in generation."""
    token_level_loss: bool = True
    """True: the mean over all tokens of the global batch. False: the mean over sequences of each sequence's mean."""
