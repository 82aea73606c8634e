"""The model in training: where it comes from, how it is batched, sharded, optimized and sampled."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tandem.common.config.schema.base import (
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)
from tandem.common.config.schema.generation import Generation
from tandem.common.config.schema.megatron import MegatronCfg


class Tokenizer(Section, frozen=True, kw_only=True):
    """The tokenizer of the policy."""

    name: NonEmptyStr
    """Folder or Hub name of the tokenizer."""
    chat_template: str | None = None
    """Jinja template that replaces the tokenizer's own; null and ``default`` keep it."""


class DtensorCfg(Section, frozen=True, kw_only=True):
    """Training with FSDP2 (`fully_shard`) and the tensor parallelism of DTensor."""

    enabled: bool = True
    """Train with this backend."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence: less memory, the same traffic."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass; the same as `policy.activation_checkpointing_enabled`."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each layer: must divide the numbers of attention and of key-value heads."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence. Prompts are not shared then, whatever `policy.share_prompts` says."""
    custom_parallel_plan: NonEmptyStr | None = None
    """Dotted path of a tensor-parallel plan: a dict from paths of modules to styles of
    `torch.distributed.tensor.parallel`, or a function that returns one. null: the one for the model's architecture."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor_parallel_size * self.context_parallel_size


PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class SequencePacking(Section, frozen=True, kw_only=True):
    """Micro-batches of one row each, in which sequences lie end to end and none sees another: nothing is padded.

    `policy.train_micro_batch_size`, `policy.logprob_batch_size` and `policy.share_prompts` have no effect then.
    """

    enabled: bool = False
    """Pack sequences. NeMo-RL's GRPO files say true."""
    train_mb_tokens: PositiveInt
    """The most tokens of a training micro-batch."""
    logprob_mb_tokens: PositiveInt
    """The most tokens of a log-probability micro-batch."""
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """How sequences are assigned to rows."""
    sequence_length_round: PositiveInt = 64
    """Row lengths are rounded up to a multiple of this."""


class DynamicBatching(Section, frozen=True, kw_only=True):
    """Micro-batches of as many padded rows, of like lengths, as so many tokens allow.

    `policy.train_micro_batch_size`, `policy.logprob_batch_size` and `policy.share_prompts` have no effect then. Not
    together with `policy.sequence_packing`.
    """

    enabled: bool = False
    """Batch by tokens."""
    train_mb_tokens: PositiveInt
    """The most tokens of a training micro-batch, padding included."""
    logprob_mb_tokens: PositiveInt
    """The most tokens of a log-probability micro-batch, padding included."""
    sequence_length_round: PositiveInt = 64
    """Row lengths are rounded up to a multiple of this."""


class Optimizer(Section, frozen=True, kw_only=True):
    """The optimizer, by the dotted path of its class."""

    name: NonEmptyStr = "torch.optim.AdamW"
    """Dotted path of a torch optimizer class."""
    kwargs: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8}
    )
    """Its arguments. If given, they replace these whole, and what is not named has the class's own default."""


class SchedulerEntry(Section, frozen=True, kw_only=True):
    """One part of the learning-rate schedule: a schedule (`name`, `kwargs`) or the milestones between schedules."""

    name: NonEmptyStr | None = None
    """Dotted path of a torch learning-rate scheduler class."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Its arguments."""
    milestones: tuple[NonNegativeInt, ...] | None = None
    """Optimizer steps at which the next schedule takes over: one fewer than there are schedules."""


class NewModel(Section, frozen=True, kw_only=True):
    """A model to make where `policy.model_name` does not exist: random weights and a character-level tokenizer."""

    config: dict[str, Any]
    """New. Fields of the Hugging Face configuration of the model; `model_type` is required. The vocabulary size comes
    from the tokenizer."""
    characters: NonEmptyStr
    """New. The characters the tokenizer knows, one token each."""
    seed: Seed = 0
    """New. Decides the weights."""


class Model(Section, frozen=True, kw_only=True):
    """A model that trainers hold: where it comes from, how it is batched, sharded and optimized."""

    model_name: NonEmptyStr
    """Folder (relative to the working directory) or Hub name of a Hugging Face causal language model."""
    new_model: NewModel | None = None
    """New. How to make `model_name` if that folder does not exist."""
    max_total_sequence_length: PositiveInt = 512
    """Longest sequence, prompt and response together, in tokens."""
    train_global_batch_size: PositiveInt
    """Sequences (for DPO pairs of them) in one optimizer step, over all trainers."""
    train_micro_batch_size: PositiveInt = 4
    """Sequences (for DPO pairs of them) in one forward and backward pass of one trainer."""
    logprob_batch_size: PositiveInt = 4
    """Sequences (for DPO pairs of them) in one forward pass of one trainer when only log-probabilities are wanted."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of forward and backward passes and of generation."""
    share_prompts: bool = True
    """New. Compute each prompt once for all of its samples in a micro-batch, and no padding. A micro-batch size that is
    a multiple of `grpo.num_generations_per_prompt` splits no group. The numbers are the same either way; models whose
    tokens meet elsewhere than in plain causal attention are trained the other way by themselves."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this Euclidean norm; null means no clipping."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Padded lengths are rounded up to a multiple of this."""
    activation_checkpointing_enabled: bool = False
    """Recompute activations in the backward pass; the same as `policy.dtensor_cfg.activation_checkpointing`."""
    fsdp_offload_enabled: bool = False
    """The same as `policy.dtensor_cfg.cpu_offload`, as NeMo-RL's first FSDP backend had it."""
    tokenizer: Tokenizer
    dtensor_cfg: DtensorCfg = DtensorCfg()
    megatron_cfg: MegatronCfg = MegatronCfg()
    sequence_packing: SequencePacking
    dynamic_batching: DynamicBatching
    optimizer: Optimizer | None = Optimizer()
    """Null only where Megatron-Core brings its own."""
    scheduler: tuple[SchedulerEntry, ...] = ()
    """Schedules that follow each other: a list of entries, or one entry without the list; none or null keeps the
    learning rate constant."""

    @property
    def model_parallel_size(self) -> int:
        """Trainers that work on the same sequences, of whichever backend trains."""
        return (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg).model_parallel_size


class Policy(Model, frozen=True, kw_only=True):
    """The model in training."""

    generation_batch_size: PositiveInt = 32
    """Sequences an engine decodes at once, unless the engine's own section says otherwise."""
    generation: Generation
