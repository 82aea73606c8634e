"""Distillation of teachers into the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.algorithms import Sft
from tandem.config.schema.base import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from tandem.config.schema.grpo import Rollouts
from tandem.config.schema.policy import Model


class Distillation(Rollouts, frozen=True, kw_only=True):
    """Distillation of a teacher, the section `teacher`, into the policy, over samples of the policy itself (Agarwal et
    al. 2023, arXiv:2306.13649)."""

    num_prompts_per_step: PositiveInt = 128
    """Prompts of one step."""
    num_generations_per_prompt: PositiveInt = 1
    """Samples drawn for each prompt."""
    max_num_epochs: PositiveInt | None = 10
    """Passes over the training problems; the run ends at this or at `max_num_steps`, whichever comes first. Null means
    any number."""
    max_num_steps: NonNegativeInt = 1000
    """Rollout batches to train on before the run ends; 0 trains on none: the model is validated, and that is all."""
    topk_logits_k: PositiveInt = 64
    """Likeliest tokens of the teacher that are compared, in the place of each token."""
    val_period: NonNegativeInt = 20
    """Steps between validations; 0 means never."""
    max_val_samples: PositiveInt = 512
    """Validation problems used each time, from the front of the validation set."""
    val_batch_size: PositiveInt = 64
    """Validation problems sent to the rollouts at once."""


class OffPolicyDistillation(Sft, frozen=True, kw_only=True):
    """New. Distillation of a teacher into the policy over recorded text: a data set as SFT has it, and no engines. Its
    loss is that of `distillation`. NeMo-RL's section for it is `distillation`, with a list of `teachers`."""

    topk_logits_k: PositiveInt = 64
    """New. Likeliest tokens of the teacher that are compared, in the place of each token."""


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
    gold_loss: bool | None = None
    """As `loss_fn.gold_loss`, of this one."""
    xtoken_loss: bool | None = None
    """As `loss_fn.xtoken_loss`, of this one."""


class TeacherCfg(Section, frozen=True, kw_only=True):
    """How each teacher is spread over processes of its own. The sizes hold where the section `teacher` is null."""

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
    precision: Literal["bf16", "bfloat16", "fp32", "float32"] = "bf16"
    """Element type of its forward pass."""

    def applied_to(self, model: Model) -> Model:
        """Return a model's section with these sizes, for whichever backend it has."""
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        megatron, dtensor = model.megatron_cfg, model.dtensor_cfg
        if megatron.enabled:
            megatron = msgspec.structs.replace(
                megatron,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=self.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=None,
                context_parallel_size=context,
            )
        else:
            dtensor = msgspec.structs.replace(dtensor, tensor_parallel_size=tensor, context_parallel_size=context)
        return msgspec.structs.replace(
            model,
            megatron_cfg=megatron,
            dtensor_cfg=dtensor,
            logprob_batch_size=self.micro_batch_size,
            precision="bfloat16" if self.precision in ("bf16", "bfloat16") else "float32",
        )


class NonColocatedTeachers(Section, frozen=True, kw_only=True):
    """Teachers in processes of their own, by NeMo-RL's keys: `cluster.processes_of.teacher` for all of them."""

    enabled: bool = False
    """Whether they are, or live in the policy's processes."""
    default_teacher_cfg: TeacherCfg = TeacherCfg()


class OnPolicyDistillation(Section, frozen=True, kw_only=True):
    """Several teachers, each for its own tasks. With ``grpo.adv_estimator.name: opd`` GRPO's advantages are the
    teacher's log-probabilities minus the policy's; with ``algorithm: distillation`` the likeliest tokens are the
    teacher's whose task it is."""

    enabled: bool = False
    """Whether there are such teachers."""
    teacher_model_by_agent_name: dict[str, NonEmptyStr] = msgspec.field(default_factory=dict)
    """Folder of each teacher, by the name of the environment (an entry of `env`, also of an agent), or else of the data
    set, whose samples it teaches. All have the section `teacher`, or where that is null what the policy's says."""
    default_teacher_alias: NonEmptyStr | None = None
    """The one of them that teaches where none has the name."""
    strict_agent_name_match: bool = False
    """true: refuse a run with samples that none has the name of, whatever the default is."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a teacher once that has several names."""
    non_colocated_teachers: NonColocatedTeachers = NonColocatedTeachers()


class DistillationLoss(Section, frozen=True, kw_only=True):
    """Keys of ``loss_fn`` that only distillation reads."""

    kl_type: Literal["forward", "reverse", "mixed", "jsd"] = "mixed"
    """Distillation: the divergence between teacher P and student Q. forward: KL(P|Q). reverse: KL(Q|P). mixed: both,
    by `mixed_kl_weight`. jsd, which NeMo-RL does not have: the generalised one of Jensen and Shannon (Agarwal et al.
    2023, arXiv:2306.13649, equation 1), with `mixed_kl_weight` as its beta."""
    mixed_kl_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Distillation: the share of the forward divergence in the mixed one; with jsd that of the teacher in what both are
    compared with."""
    zero_outside_topk: bool = False
    """Distillation: true takes the teacher's other tokens as impossible, and the student's distribution is that of all
    tokens. false compares the two distributions over the teacher's `topk_logits_k` likeliest tokens, each
    normalised."""
    kd_loss_mode: NonEmptyStr = "sum"
    """Distillation of several teachers over recorded text: how their losses become one."""
    kl_loss_weight: NonNegativeFloat = 1.0
    """Distillation: weight of the divergence."""
    ce_loss_scale: NonNegativeFloat = 0.0
    """Distillation: weight of the loss of the tokens themselves, minus their log-probability, beside the divergence."""
    dynamic_loss_scaling: bool = False
    """Distillation: scale the divergence to the size of that other loss."""
    exact_token_match_only: bool = False
    """Distillation across tokenizers: compare only tokens that both have."""
    gold_loss: bool = False
    """Distillation across tokenizers: compare sorted probabilities where tokens differ."""
    xtoken_loss: bool = False
    """Distillation across tokenizers: compare projected probabilities."""
    normalize_teacher_by_vocab: bool = False
    """Distillation of several teachers over recorded text: weigh those more that have more tokens."""
    reverse_kl: bool | None = None
    """In NeMo-RL's files of distillation over recorded text (`distillation` with a list of `teachers`): true makes
    `kl_type` reverse, false forward."""
    sum_weights_metric: NonEmptyStr | None = None
    """Distillation of several teachers over recorded text: the metric by which they are weighted."""
    temperature: PositiveFloat = 1.0
    """Distillation over recorded text: logits are divided by this."""
    alpha: NonNegativeFloat = 1.0
    """Distillation of several teachers over recorded text: how sharp their weights are."""
    vocab_topk: PositiveInt = 8192
    """In NeMo-RL's files of distillation over recorded text: what `topk_logits_k` is."""
    uncommon_topk: PositiveInt = 8192
    """Distillation across tokenizers: the same, of those that only one has."""
