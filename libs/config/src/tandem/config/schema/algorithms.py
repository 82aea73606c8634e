"""Sections of the algorithms over data sets: SFT, DPO and reward models."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tandem.config.schema.base import (
    ConfigSection,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seed,
)

NumBatches = Annotated[int, Meta(ge=-1)]


class SftConfig(ConfigSection, frozen=True, kw_only=True):
    """Supervised fine-tuning on worked solutions."""

    max_num_epochs: PositiveInt = 1
    """Passes over the training set; the run ends at this or at `max_num_steps`, whichever comes first."""
    max_num_steps: PositiveInt = 60
    """Optimizer steps before the run ends."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 means never."""
    val_batches: NumBatches = 8
    """Validation batches used each time; 0 or -1 means the whole validation set."""
    val_global_batch_size: PositiveInt = 32
    """Sequences in one validation batch, over all trainers."""
    val_micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass of one trainer while validating."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, regardless of `val_period`."""
    only_unmask_final: bool = False
    """Learn only the assistant's last turn in each conversation."""
    seed: Seed = 42
    """Seed of the problems and their order."""


class DpoConfig(ConfigSection, frozen=True, kw_only=True):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290). As in NeMo-RL, its batch sizes and
    those of `policy` count pairs."""

    max_num_epochs: PositiveInt = 1
    """Passes over the preference pairs."""
    max_num_steps: PositiveInt = 150
    """Optimizer steps before the run ends."""
    val_period: NonNegativeInt = 25
    """Steps between validations; 0 means never."""
    val_batches: NumBatches = 8
    """Validation batches used each time; 0 or -1 means the whole validation set."""
    val_global_batch_size: PositiveInt = 8
    """Pairs in one validation batch, over all trainers."""
    val_micro_batch_size: PositiveInt = 1
    """Pairs in one forward pass of one trainer while validating."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, regardless of `val_period`."""
    seed: Seed = 42
    """Seed of generated pairs, and of the order of pairs."""
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


class RewardModelConfig(ConfigSection, frozen=True, kw_only=True):
    """Training of a reward model on pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155). As in
    NeMo-RL, its batch sizes and those of `policy` count pairs."""

    max_num_epochs: PositiveInt = 1
    """Passes over the preference pairs."""
    max_num_steps: Annotated[int, Meta(ge=-1)] = -1
    """Optimizer steps before the run ends; -1 means those of all epochs."""
    val_period: NonNegativeInt = 16
    """Steps between validations; 0 means never."""
    val_batches: NumBatches = -1
    """Validation batches used each time; 0 or -1 means the whole validation set."""
    val_global_batch_size: PositiveInt = 32
    """Pairs in one validation batch, over all trainers."""
    val_micro_batch_size: PositiveInt = 1
    """Pairs in one forward pass of one trainer while validating."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, regardless of `val_period`."""
    seed: Seed = 42
    """Seed of generated pairs, and of the order of pairs."""
