"""Sections of algorithms: SFT, DPO, reward models, distillation; and of `coordinator eval`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.base import (
    ConfigSection,
    Fraction,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)
from tandem.config.schema.grpo import RolloutsConfig
from tandem.config.schema.policy import ModelConfig

NumBatches = Annotated[int, Meta(ge=-1)]


class EvalConfig(ConfigSection, frozen=True, kw_only=True):
    """Settings of `coordinator eval` alone. The problems are the held-out ones, limited by `grpo.max_val_samples`;
    null keys follow the validation of a run."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """Score reported beside the table: the chance that one of k samples is correct, or that the answer given by most
    of k samples is."""
    k_value: PositiveInt = 1
    """The k of the metric."""
    num_tests_per_prompt: PositiveInt | None = None
    """Samples per problem; null means `grpo.num_val_generations_per_prompt`. NeMo-RL's default is 1."""
    seed: Seed | None = None
    """Seed of the samples; null means `grpo.val_seed`. NeMo-RL's default is 42."""
    temperature: NonNegativeFloat | None = None
    """New. Divisor of the logits before sampling; 0 takes the likeliest token; null means `grpo.val_temperature`."""
    top_p: Fraction | None = None
    """New. Null means `policy.generation.top_p`."""
    top_k: PositiveInt | None = None
    """New. Null means `policy.generation.top_k`."""
    max_new_tokens: PositiveInt | None = None
    """New. Null means `policy.generation.max_new_tokens`."""
    during_training: bool = False
    """New. Have `coordinator up` evaluate each checkpoint while training goes on, with processes of its own. The scores
    become the `val_` metrics of the checkpoint's step, and rank it."""
    gpus: tuple[NonNegativeInt, ...] | None = None
    """New. With `eval.during_training`: the GPUs of these processes, which the run should leave alone; null means all
    that it sees."""
    save_path: NonEmptyStr | None = None
    """Folder of the results; null means `eval` within `logger.log_dir`."""


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


class DistillationConfig(RolloutsConfig, frozen=True, kw_only=True):
    """Distillation of a teacher (section `teacher`) into the policy, over the policy's own samples (Agarwal et al.
    2023, arXiv:2306.13649)."""

    num_prompts_per_step: PositiveInt = 128
    """Prompts per step."""
    num_generations_per_prompt: PositiveInt = 1
    """Samples per prompt."""
    max_num_epochs: PositiveInt | None = 10
    """Passes over the training problems; the run ends at this or at `max_num_steps`, whichever comes first. Null
    means no limit."""
    max_num_steps: NonNegativeInt = 1000
    """Rollout batches to train on before the run ends; 0 only validates the model."""
    topk_logits_k: PositiveInt = 64
    """Likeliest tokens of the teacher that are compared at each position."""
    val_period: NonNegativeInt = 20
    """Steps between validations; 0 means never."""
    max_val_samples: PositiveInt = 512
    """Validation problems used each time, from the front of the validation set."""
    val_batch_size: PositiveInt = 64
    """Accepted, like `grpo.val_batch_size`."""


class OffPolicyDistillation(SftConfig, frozen=True, kw_only=True):
    """New. Distillation of a teacher into the policy over recorded text: a data set like SFT's, and no engines. Its
    loss is that of `distillation`. NeMo-RL's section for it is `distillation`, with a list of `teachers`."""

    topk_logits_k: PositiveInt = 64
    """New. Likeliest tokens of the teacher that are compared at each position."""


class TeacherConfig(ModelConfig, frozen=True, kw_only=True):
    """The teacher of distillation, with the keys of `policy`."""

    generation_batch_size: PositiveInt = 32
    """Accepted: a teacher generates nothing."""
    generation: dict[str, Any] | None = None
    """Accepted: a teacher generates nothing."""
    projection_matrix_path: NonEmptyStr | None = None
    """File that maps its tokens to the student's, if their tokenizers differ."""
    weight: NonNegativeFloat = 1.0
    """Weight in the loss, if there are several teachers."""
    gold_loss: bool | None = None
    """Same as `loss_fn.gold_loss`, for this teacher."""
    xtoken_loss: bool | None = None
    """Same as `loss_fn.xtoken_loss`, for this teacher."""


class TeacherCfg(ConfigSection, frozen=True, kw_only=True):
    """Distribution of each teacher over processes of its own. The sizes apply if the section `teacher` is null."""

    gpus_per_node: PositiveInt = 1
    """GPUs per node."""
    num_nodes: PositiveInt = 1
    """Number of nodes."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers in sequence."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt | None = None
    """Ranks that share the experts of each layer; null means the policy's, with Megatron-Core, and otherwise 1."""
    micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass."""
    precision: Literal["bf16", "bfloat16", "fp32", "float32"] = "bf16"
    """Element type of its forward pass."""

    def applied_to(self, model: ModelConfig) -> ModelConfig:
        """Return a model's section with these sizes, for its backend."""
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        megatron, dtensor = model.megatron_cfg, model.dtensor_cfg
        if megatron.enabled:
            megatron = msgspec.structs.replace(
                megatron,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=self.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=None,
                context_parallel_size=context,
                expert_model_parallel_size=self.expert_model_parallel_size or megatron.expert_model_parallel_size,
            )
        else:
            dtensor = msgspec.structs.replace(
                dtensor,
                tensor_parallel_size=tensor,
                context_parallel_size=context,
                expert_parallel_size=self.expert_model_parallel_size or 1,
                dp_replicate_size=1,
            )
        return msgspec.structs.replace(
            model,
            megatron_cfg=megatron,
            dtensor_cfg=dtensor,
            logprob_batch_size=self.micro_batch_size,
            precision="bfloat16" if self.precision in ("bf16", "bfloat16") else "float32",
        )


class NonColocatedTeachers(ConfigSection, frozen=True, kw_only=True):
    """Teachers in processes of their own, by NeMo-RL's keys; `cluster.processes_of.teacher` is their total."""

    enabled: bool = False
    """Whether teachers have processes of their own, or share the policy's."""
    default_teacher_cfg: TeacherCfg = TeacherCfg()


class OnPolicyDistillation(ConfigSection, frozen=True, kw_only=True):
    """Several teachers, each for its own tasks. With ``grpo.adv_estimator.name: opd``, GRPO's advantages are the
    teacher's log-probabilities minus the policy's. With ``algorithm: distillation``, the task's teacher provides the
    likeliest tokens."""

    enabled: bool = False
    """Whether there are such teachers."""
    teacher_model_by_agent_name: dict[str, NonEmptyStr] = msgspec.field(default_factory=dict)
    """Folder of each teacher, by the name of the environment (an entry of `env`, agents included) or else of the
    data set that it teaches. All have the settings of the section `teacher`, or the policy's if that is
    null."""
    default_teacher_alias: NonEmptyStr | None = None
    """Default teacher, for samples without a teacher of their name."""
    strict_agent_name_match: bool = False
    """true: refuse a run with samples of a name that has no teacher, even with a default."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a teacher with several names only once."""
    non_colocated_teachers: NonColocatedTeachers = NonColocatedTeachers()


class DistillationLossConfig(ConfigSection, frozen=True, kw_only=True):
    """Keys of ``loss_fn`` that only distillation reads."""

    kl_type: Literal["forward", "reverse", "mixed", "jsd"] = "mixed"
    """Distillation: the divergence between teacher P and student Q. forward: KL(P|Q). reverse: KL(Q|P). mixed: both,
    weighted by `mixed_kl_weight`. jsd, which NeMo-RL does not have: the generalised Jensen-Shannon divergence
    (Agarwal et al. 2023, arXiv:2306.13649, equation 1), with `mixed_kl_weight` as its beta."""
    mixed_kl_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Distillation: weight of the forward divergence in the mixed one; with jsd, the teacher's weight in the
    mixture."""
    zero_outside_topk: bool = False
    """Distillation: true treats the teacher's other tokens as impossible, and uses the student's distribution over
    all tokens. false compares the two distributions over the teacher's `topk_logits_k` likeliest tokens, each
    normalised."""
    kd_loss_mode: Literal["sum", "averaged_logits", "select_teacher"] = "sum"
    """Distillation of several teachers over recorded text: how their divergences are combined. sum: the sum by their
    weights. select_teacher: that of the teacher to which the tokens of the batch are likeliest."""
    kl_loss_weight: NonNegativeFloat = 1.0
    """Distillation: weight of the divergence."""
    ce_loss_scale: NonNegativeFloat = 0.0
    """Distillation: weight of the negative log-likelihood of the tokens, beside the divergence."""
    dynamic_loss_scaling: bool = False
    """Distillation: the loss is the negative log-likelihood of the tokens plus the divergence, scaled to the same size
    in each micro-batch. `kl_loss_weight` and `ce_loss_scale` have no effect then."""
    exact_token_match_only: bool = False
    """Distillation across tokenizers: compare only tokens that both have."""
    gold_loss: bool = False
    """Distillation across tokenizers: compare sorted probabilities where tokens differ."""
    xtoken_loss: bool = False
    """Distillation across tokenizers: compare projected probabilities."""
    normalize_teacher_by_vocab: bool = False
    """Accepted: gives teachers with more tokens a larger weight. Here all have the policy's."""
    reverse_kl: bool | None = None
    """In NeMo-RL's files of distillation over recorded text (`distillation` with a list of `teachers`): true sets
    `kl_type` to reverse, false to forward."""
    sum_weights_metric: Literal["ce", "entropy", "max_prob"] | None = None
    """Distillation of several teachers over recorded text, with `kd_loss_mode` sum: the weights are
    ``softmax(alpha * score)`` instead of `teachers[].weight`. A teacher's score is a mean over the tokens of the batch:
    of their log-probabilities (ce), of minus its entropies, or of its largest probabilities."""
    temperature: PositiveFloat = 1.0
    """Distillation over recorded text: logits are divided by this."""
    alpha: NonNegativeFloat = 1.0
    """With `sum_weights_metric`: sharpness of the weights."""
    vocab_topk: PositiveInt = 8192
    """Alias of `topk_logits_k` in NeMo-RL's files of distillation over recorded text."""
    uncommon_topk: PositiveInt = 8192
    """Distillation across tokenizers: the same for tokens that only one of them has."""
