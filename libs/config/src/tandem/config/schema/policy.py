"""The model in training: its origin, batches, sharding, optimizer and sampling."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import msgspec

from tandem.config.schema.adapters import LoraCfg, PeftConfig
from tandem.config.schema.base import (
    ConfigSection,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)
from tandem.config.schema.generation import GenerationConfig
from tandem.config.schema.megatron import MegatronCfg

PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The template that a file's ``chat_template: null`` means."""


class TokenizerConfig(ConfigSection, frozen=True, kw_only=True):
    """The tokenizer of the policy."""

    name: NonEmptyStr
    """Folder or Hub name of the tokenizer."""
    chat_template: str | None = "default"
    """Jinja template that replaces the tokenizer's own, or a file with one, whose name ends in ``.jinja`` and is
    relative to the working directory; the run keeps its text. ``default`` keeps the tokenizer's own; null writes
    contents alone, one after the other, as in NeMo-RL."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as `enable_thinking`."""
    audio: dict[str, Any] | None = None
    """Conversion of audio to tokens."""
    video: dict[str, Any] | None = None
    """Conversion of video to tokens, such as `num_frames`."""


class DtensorCfg(ConfigSection, frozen=True, kw_only=True):
    """Training with FSDP2 (`fully_shard`) and the tensor parallelism of DTensor."""

    enabled: bool = True
    """Train with this backend."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence: less memory, same traffic."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass; same as `policy.activation_checkpointing_enabled`."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each layer; must divide the numbers of attention and key-value heads."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence. With more than one, prompts are not shared, regardless of
    `policy.share_prompts`."""
    custom_parallel_plan: NonEmptyStr | None = None
    """Dotted path of a tensor-parallel plan: a dict from paths of modules to styles of
    `torch.distributed.tensor.parallel`, or a function that returns one. null: the plan for the model's architecture."""

    expert_parallel_size: PositiveInt = 1
    """Ranks that share the experts of each layer, taken out of those that train on other sequences, or other parts of
    them. Each keeps whole experts, and tokens travel between them. Must divide the number of experts."""
    dp_replicate_size: PositiveInt = 1
    """Groups of ranks that each hold all weights, sharded within the group (HSDP): more memory, and gathering does not
    leave the group."""
    env_vars: dict[str, Any] | None = None
    """Environment variables of the trainers, texts or numbers by name, set before torch is imported."""
    lora_cfg: LoraCfg = LoraCfg()
    version_2: bool = msgspec.field(name="_v2", default=True)
    """Accepted: choice between NeMo-RL's two backends of that name. Here there is one."""
    automodel_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Accepted: arguments of NeMo-RL's library for loading models. Here Transformers loads them. Of a vision model,
    `freeze_config` is read, with the keys `freeze_vision_tower` (by default true) and `freeze_language_model` (false):
    the parts that are not trained. Without it, everything is."""
    moe_parallelizer: dict[str, Any] | None = None
    """Accepted: arguments of the same library."""
    model_save_format: NonEmptyStr | None = None
    """Accepted, like `checkpointing.model_save_format`, which NeMo-RL's main branch has here."""
    save_consolidated: NonEmptyStr | None = None
    """Accepted, like `checkpointing.save_consolidated`, which NeMo-RL's main branch has here: false, final or every."""
    clear_cache_every_n_steps: PositiveInt | None = None
    """Accepted: how often NeMo-RL's backend frees cached GPU memory within a step."""

    @cached_property
    def environment(self) -> dict[str, str]:
        """Environment variables for trainers from `env_vars`, if they train with this backend."""
        return {name: str(value) for name, value in (self.env_vars or {}).items()} if self.enabled else {}

    @cached_property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor_parallel_size * self.context_parallel_size

    @cached_property
    def parallel_sizes(self) -> tuple[int, ...]:
        """Sizes that determine how ranks are arranged, for one number of ranks."""
        return (
            self.tensor_parallel_size,
            self.context_parallel_size,
            self.dp_replicate_size,
            self.expert_parallel_size,
        )


PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class SequencePacking(ConfigSection, frozen=True, kw_only=True):
    """Micro-batches of one row each, in which sequences lie end to end without padding, and none sees another.

    Then `policy.train_micro_batch_size`, `policy.logprob_batch_size` and `policy.share_prompts` have no effect.
    """

    enabled: bool = False
    """Pack sequences. NeMo-RL's GRPO files have true."""
    train_mb_tokens: PositiveInt
    """Most tokens of a training micro-batch."""
    logprob_mb_tokens: PositiveInt
    """Most tokens of a log-probability micro-batch."""
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """Assignment of sequences to rows. modified_ffd is another name of the default."""
    microbatch_order: Literal["packer", "largest_first"] | None = None
    """Accepted: order in which a rank goes through its rows. Here it is the packer's; it does not change the
    gradient."""
    sequence_length_round: PositiveInt = 64
    """Multiple to which row lengths are rounded up."""
    fuse_loss: bool = False
    """Accepted: compute the loss of a row at once. Here it always is."""


class DynamicBatching(ConfigSection, frozen=True, kw_only=True):
    """Micro-batches of padded rows of similar lengths, as many as a token limit allows.

    Then `policy.train_micro_batch_size`, `policy.logprob_batch_size` and `policy.share_prompts` have no effect. Not
    together with `policy.sequence_packing`.
    """

    enabled: bool = False
    """Batch by tokens."""
    train_mb_tokens: PositiveInt
    """Most tokens of a training micro-batch, including padding."""
    logprob_mb_tokens: PositiveInt
    """Most tokens of a log-probability micro-batch, including padding."""
    sequence_length_round: PositiveInt = 64
    """Multiple to which row lengths are rounded up."""


class OptimizerConfig(ConfigSection, frozen=True, kw_only=True):
    """The optimizer, by the dotted path of its class."""

    name: NonEmptyStr = "torch.optim.AdamW"
    """Dotted path of a torch optimizer class."""
    kwargs: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8}
    )
    """Arguments of the class. If given, they replace these as a whole, and missing ones have the class's own
    defaults."""


class SchedulerEntry(ConfigSection, frozen=True, kw_only=True):
    """One part of the learning-rate schedule: a schedule (`name`, `kwargs`) or the milestones between schedules."""

    name: NonEmptyStr | None = None
    """Dotted path of a torch learning-rate scheduler class."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the class."""
    milestones: tuple[NonNegativeInt, ...] | None = None
    """Training steps at which the next schedule takes over; one fewer than there are schedules."""


class NewModel(ConfigSection, frozen=True, kw_only=True):
    """A model to make if `policy.model_name` does not exist: random weights and a character-level tokenizer."""

    config: dict[str, Any]
    """New. Fields of the model's Hugging Face configuration; `model_type` is required. The vocabulary size comes
    from the tokenizer."""
    characters: NonEmptyStr
    """New. Characters of the tokenizer, one token each."""
    image_processor: dict[str, Any] | None = None
    """New. Fields of the image processor (``preprocessor_config.json``) of a vision model; null means the family's
    defaults."""
    seed: Seed = 0
    """New. Seed of the weights."""


class DraftConfig(ConfigSection, frozen=True, kw_only=True):
    """A small model that predicts tokens ahead of the policy, trained beside it (EAGLE-3, arXiv:2503.01840)."""

    enabled: bool = False
    """Train a draft model."""
    model_name: NonEmptyStr | None = None
    """Folder or Hub name of the draft model."""
    loss_weight: NonNegativeFloat = 0.1
    """Weight of its loss."""
    num_layers: PositiveInt | None = None
    """Number of layers, if it is new."""
    aux_layer_indices: tuple[int, ...] | None = None
    """Layers of the policy that it reads."""


class RouterReplayConfig(ConfigSection, frozen=True, kw_only=True):
    """Routing of tokens in training to the experts that the engine chose (arXiv:2510.11370)."""

    enabled: bool = False
    """Replay the engine's routing, in training and for the previous and reference log-probabilities. For a `policy`
    that is a mixture of experts. Samples grow by one byte for each expert of each token and layer, two from 256
    experts on."""


class MtpConfig(ConfigSection, frozen=True, kw_only=True):
    """Training of the checkpoint's layers that predict the tokens after the next one, with FSDP2.

    NeMo-RL has these settings with Megatron-Core alone, as ``policy.megatron_cfg.mtp_*``.
    """

    num_layers: NonNegativeInt = 0
    """New. Layers to train with the policy: the first of the checkpoint's, of which each predicts one token further.
    0 trains none, and exports have all of them as they came."""
    loss_scaling_factor: NonNegativeFloat = 0.1
    """New. Weight of the mean of their losses, added to the policy's loss."""
    use_repeated_layer: bool = False
    """New. Apply the first of the checkpoint's layers `num_layers` times instead."""
    detach_heads: bool = False
    """New. Let their loss have no gradient in the policy: its layers, embedding and output layer. Their gradients are
    then clipped apart, and the policy is trained as it is without them."""

    @property
    def num_kept(self) -> int:
        """Layers that trainers hold."""
        return min(self.num_layers, 1) if self.use_repeated_layer else self.num_layers


class RewardModelCfg(ConfigSection, frozen=True, kw_only=True):
    """A head with one output instead of the one that predicts tokens."""

    enabled: bool = False
    """Whether the model has such a head. A value model and the model of `algorithm: rm` always do."""
    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """Meaning of the output: a score for comparing pairs, or a value."""


class ModelConfig(ConfigSection, frozen=True, kw_only=True):
    """A model that trainers hold: its origin, batches, sharding and optimizer."""

    model_name: NonEmptyStr
    """Folder (relative to the working directory) of a Hugging Face causal language model, or its name on the Hub:
    `org/name`, or `org/name@revision`."""
    revision: NonEmptyStr | None = None
    """New. Branch, tag or commit of a model on the Hub; null means the default branch. A run keeps the commit that
    it started with."""
    new_model: NewModel | None = None
    """New. Recipe for `model_name` if that folder does not exist."""
    max_total_sequence_length: PositiveInt = 512
    """Longest sequence, prompt and response together, in tokens."""
    train_global_batch_size: PositiveInt
    """Sequences (for DPO and RM pairs of them) in one optimizer step, over all trainers."""
    train_micro_batch_size: PositiveInt = 4
    """Sequences (for DPO and RM pairs of them) in one forward and backward pass of one trainer."""
    logprob_batch_size: PositiveInt = 4
    """Sequences (for DPO and RM pairs of them) in one forward pass of one trainer when it only computes
    log-probabilities."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of forward and backward passes and of generation."""
    share_prompts: bool = True
    """New. Compute each prompt once for all of its samples in a micro-batch, without padding. A micro-batch size
    that is a multiple of `grpo.num_generations_per_prompt` splits no group. Results are the same either way. Models
    with interactions between tokens outside of plain causal attention are automatically trained without it."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum Euclidean norm of gradients, to which larger ones are scaled down; null means no clipping."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Multiple to which padded lengths are rounded up."""
    activation_checkpointing_enabled: bool = False
    """Recompute activations in the backward pass; same as `policy.dtensor_cfg.activation_checkpointing`."""
    compile: bool = False
    """New. Fuse norms, rotations, activations and sums over logits by ``torch.compile``: all of them on the DTensor
    backend, sums over logits on Megatron-Core. For GPUs. The first step takes a minute longer."""
    fsdp_offload_enabled: bool = False
    """Same as `policy.dtensor_cfg.cpu_offload`; the key of NeMo-RL's first FSDP backend."""
    hf_config_overrides: dict[str, Any] | None = None
    """Replacements for fields of the model's ``config.json``, in trainers, engines and checkpoints."""
    reward_model_cfg: RewardModelCfg = RewardModelCfg()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    draft: DraftConfig = DraftConfig()
    quant_cfg: NonEmptyStr | None = None
    """Quantise the model in training according to a file for NVIDIA's ModelOpt."""
    quant_calib_size: PositiveInt = 16
    """Number of calibration samples for `quant_cfg`."""
    quant_sequence_length: PositiveInt = 1024
    """Length of calibration samples."""
    quant_batch_size: PositiveInt = 1
    """Calibration samples in one batch."""
    quant_calib_data: NonEmptyStr | None = None
    """Data set of the calibration samples."""
    disable_modelopt_layer_spec: bool = False
    """Build layers without ModelOpt, regardless of `quant_cfg`."""
    dequantize_base_checkpoint: bool = False
    """Read a checkpoint in float8 or MXFP4 and train its weights in `precision`; checkpoints and engines have them so.
    Only with `dtensor_cfg`."""
    logprob_chunk_size: PositiveInt | None = None
    """Accepted: number of tokens for which NeMo-RL computes log-probabilities at once."""
    offload_optimizer_for_logprob: bool = False
    """Accepted: whether the optimizer's state leaves the GPU while log-probabilities are computed. With colocated
    generation, it is on the device only during a training step."""
    refit_buffer_size_gb: PositiveFloat | None = None
    """Accepted: memory of NeMo-RL's refit. Here weights go straight to engines, through buffers of a few MB."""
    tokenizer: TokenizerConfig
    dtensor_cfg: DtensorCfg = DtensorCfg()
    megatron_cfg: MegatronCfg = MegatronCfg()
    sequence_packing: SequencePacking
    dynamic_batching: DynamicBatching
    optimizer: OptimizerConfig | None = OptimizerConfig()
    """The optimizer; null only if Megatron-Core brings its own."""
    warmup_steps: NonNegativeFloat = 0.0
    """New. Steps in which the learning rate rises linearly from 0 to its value, where it stays, in either backend;
    below 1 a share of the steps that the run has when it begins, by the algorithm's ``max_num_steps`` and
    ``max_num_epochs``. It stands for `scheduler`, or for `megatron_cfg.scheduler.lr_warmup_iters`, and counts what
    these count."""
    scheduler: tuple[SchedulerEntry, ...] = ()
    """Consecutive schedules: a list of entries, or one entry without the list; empty or null keeps the learning rate
    constant."""

    @cached_property
    def engine_config_overrides(self) -> dict[str, Any] | None:
        """Fields of ``config.json`` to replace in engines, which get the weights as they are trained."""
        if not self.dequantize_base_checkpoint:
            return self.hf_config_overrides
        return {**(self.hf_config_overrides or {}), "quantization_config": None}

    @cached_property
    def environment(self) -> dict[str, str]:
        """Environment variables of the trainers, for the enabled backend."""
        return (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg).environment

    @cached_property
    def adapters(self) -> LoraCfg | PeftConfig | None:
        """Settings of the adapters that the enabled backend trains instead of the weights; None if it trains the
        weights."""
        section = self.megatron_cfg.peft if self.megatron_cfg.enabled else self.dtensor_cfg.lora_cfg
        return section if section.enabled else None

    @cached_property
    def model_parallel_size(self) -> int:
        """Trainers that work on the same sequences, in the enabled backend."""
        return (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg).model_parallel_size


class PolicyConfig(ModelConfig, frozen=True, kw_only=True):
    """The model in training."""

    generation_batch_size: PositiveInt = 32
    """Sequences that an engine decodes at once, unless the engine's own section has another number."""
    is_vlm: bool | None = None
    """Accepted: whether the model sees. Its config.json says so."""
    mtp: MtpConfig = MtpConfig()
    generation: GenerationConfig
