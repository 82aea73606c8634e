"""Distillation of teachers into the policy: sections that are known, and not built."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tandem.common.config.schema.base import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)
from tandem.common.config.schema.policy import Model


class Distillation(Section, frozen=True, kw_only=True):
    """Distillation of a teacher into the policy, over samples of the policy or recorded text (Agarwal et al. 2023,
    arXiv:2306.13649). Not built."""

    num_prompts_per_step: PositiveInt = 128
    """Prompts of one step."""
    num_generations_per_prompt: PositiveInt = 1
    """Samples drawn for each prompt."""
    max_rollout_turns: PositiveInt = 1
    """Responses a rollout may give."""
    max_num_epochs: PositiveInt = 10
    """Passes over the training problems."""
    max_num_steps: NonNegativeInt = 1000
    """Steps before the run ends."""
    topk_logits_k: PositiveInt = 64
    """Likeliest tokens of the teacher that are compared."""
    val_period: NonNegativeInt = 20
    """Steps between validations; 0 means never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, whatever `val_period` says."""
    max_val_samples: PositiveInt = 512
    """Validation problems used each time."""
    val_batch_size: PositiveInt = 64
    """Validation problems sent to the rollouts at once."""
    seed: Seed = 42
    """Decides the problems, their order and every sample."""


class Teacher(Model, frozen=True, kw_only=True):
    """The teacher of distillation, with the keys of `policy`."""

    generation_batch_size: PositiveInt = 32
    """Accepted: a teacher generates nothing."""
    generation: dict[str, Any] | None = None
    """Accepted: a teacher generates nothing."""
    projection_matrix_path: NonEmptyStr | None = None
    """File that maps its tokens to the student's, where they have different tokenizers."""
    weight: NonNegativeFloat = 1.0
    """Its share in the loss, where there are several."""


class TeacherCfg(Section, frozen=True, kw_only=True):
    """How a teacher on devices of its own is spread over them."""

    gpus_per_node: PositiveInt = 1
    """GPUs a node."""
    num_nodes: PositiveInt = 1
    """Nodes."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers in sequence."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass."""
    precision: NonEmptyStr = "bf16"
    """Element type of its forward pass."""


class NonColocatedTeachers(Section, frozen=True, kw_only=True):
    """Teachers on devices of their own."""

    enabled: bool = False
    """Whether they have any."""
    default_teacher_cfg: TeacherCfg = TeacherCfg()


class OnPolicyDistillation(Section, frozen=True, kw_only=True):
    """GRPO whose advantages are a teacher's log-probabilities minus the policy's; not built."""

    enabled: bool = False
    """Distil."""
    teacher_model_by_agent_name: dict[str, NonEmptyStr] = msgspec.field(default_factory=dict)
    """Folder or Hub name of each teacher."""
    default_teacher_alias: NonEmptyStr | None = None
    """The one of them that teaches where none is named."""
    strict_agent_name_match: bool = False
    """Refuse samples whose agent has no teacher."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a teacher once that has several names."""
    non_colocated_teachers: NonColocatedTeachers = NonColocatedTeachers()


class DistillationLoss(Section, frozen=True, kw_only=True):
    """Keys of ``loss_fn`` that only distillation reads."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    """Distillation: the divergence between teacher and student."""
    mixed_kl_weight: NonNegativeFloat = 0.5
    """Distillation: the share of the forward divergence in the mixed one."""
    zero_outside_topk: bool = False
    """Distillation: take the teacher's other tokens as impossible."""
    kd_loss_mode: NonEmptyStr = "sum"
    """Distillation across tokenizers: how several losses become one."""
    kl_loss_weight: NonNegativeFloat = 1.0
    """Distillation across tokenizers: weight of the divergence."""
    ce_loss_scale: NonNegativeFloat = 0.1
    """Distillation across tokenizers: weight of the text's own loss."""
    dynamic_loss_scaling: bool = False
    """Distillation across tokenizers: scale one loss to the size of the other."""
    exact_token_match_only: bool = False
    """Distillation across tokenizers: compare only tokens that both have."""
    gold_loss: bool = False
    """Distillation across tokenizers: compare sorted probabilities where tokens differ."""
    xtoken_loss: bool = False
    """Distillation across tokenizers: compare projected probabilities."""
    normalize_teacher_by_vocab: bool = False
    """Distillation across tokenizers: normalise over the tokens that both have."""
    reverse_kl: bool = False
    """Distillation across tokenizers: the divergence from student to teacher."""
    sum_weights_metric: NonEmptyStr | None = None
    """Distillation with several teachers: the metric by which they are weighted."""
    temperature: PositiveFloat = 1.0
    """Distillation across tokenizers: logits are divided by this."""
    alpha: NonNegativeFloat = 1.0
    """Distillation across tokenizers: the share of the divergence."""
    vocab_topk: PositiveInt = 8192
    """Distillation across tokenizers: likeliest tokens that are compared."""
    uncommon_topk: PositiveInt = 8192
    """Distillation across tokenizers: the same, of those that only one has."""
