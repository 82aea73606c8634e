"""Training with Megatron-Core."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import msgspec

from tandem.config.schema.adapters import PeftConfig
from tandem.config.schema.base import (
    ConfigSection,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)


class MegatronScheduler(ConfigSection, frozen=True, kw_only=True):
    """Schedules of the learning rate and the weight decay, counted in training steps.

    A step may have several optimizer steps, with one learning rate. PPO counts each of its `ppo_epochs`, GRPO each of
    its `num_iterations`. The highest learning rate is `lr` and the lowest `min_lr` of `policy.megatron_cfg.optimizer`.
    """

    lr_warmup_iters: NonNegativeInt = 0
    """Steps in which the learning rate rises from `lr_warmup_init` to its maximum."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate of the first step of the warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the decay after the warm-up; WSD keeps the rate and lowers it in the last `lr_wsd_decay_iters`."""
    lr_decay_iters: PositiveInt | None = None
    """Steps, including the warm-up, after which the rate is lowest; null means those of the whole run, the
    smaller of `max_num_steps` and `max_num_epochs`."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """Steps of that decay; required for WSD."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the first step; null means that of the optimizer."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the last step; null means that of the optimizer."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change between them; constant needs both to be equal."""
    override_opt_param_scheduler: bool | None = None
    """Stretch schedules over the whole run again where a resumed run becomes longer or shorter. By default they end
    where they would have ended when the run began. No other of these keys can change."""


class Fp8Cfg(ConfigSection, frozen=True, kw_only=True):
    """Matrix products in float8, by Transformer Engine, in training and in scoring.

    Weights, activations and gradients are rounded for each product, and kept in `policy.precision`.
    """

    enabled: bool = False
    """Multiply in float8."""
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Float8 format: e4m3 everywhere, or hybrid with e5m2 for gradients."""
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8", "delayed", "custom"] = "blockwise"
    """Choice of the scales: one for each block (blockwise), tensor (tensorwise) or 32 elements (mxfp8, from Blackwell
    on), or by `fp8_quantizer_factory` of Megatron-Core (custom). delayed is refused: passes that score have no
    scales of their own with it."""
    fp8_param: bool = False
    """Keep the weights in float8 as well."""


class Fp4Cfg(ConfigSection, frozen=True, kw_only=True):
    """Matrix products in float4, by Transformer Engine, in training and in scoring, as in `fp8_cfg`."""

    enabled: bool = False
    """Multiply in float4."""
    fp4: Literal["e2m1"] = "e2m1"
    """Float4 format."""
    fp4_recipe: Literal["nvfp4", "custom"] = "nvfp4"
    """Choice of the scales: one for 16 elements (nvfp4, from Blackwell on), or by `fp4_quantizer_factory` of
    Megatron-Core (custom)."""
    fp4_param: bool = False
    """Keep the weights in float4 as well."""


class MegatronCfg(ConfigSection, frozen=True, kw_only=True):
    """Training with Megatron-Core (extra ``megatron``); takes precedence over `policy.dtensor_cfg` if enabled.

    Any other key here is an argument of Megatron-Core's own ``TransformerConfig``, such as `recompute_granularity`
    or `moe_aux_loss_coeff`: it is checked against that class and forwarded. Values set by the model's
    ``config.json``, such as `hidden_size`, are refused.
    """

    enabled: bool = False
    """Train with Megatron-Core."""
    force_reconvert_from_hf: bool = False
    """Convert `policy.model_name` again even if a conversion exists."""
    empty_unused_memory_level: NonNegativeInt = 0
    """Accepted: how often NeMo-RL frees cached GPU memory. Here that is done around colocated generation alone."""
    activation_checkpointing: bool = False
    """Recompute the activations of whole layers in the backward pass; `recompute_granularity` and the like choose
    otherwise."""
    env_vars: dict[str, Any] | None = None
    """Environment variables of the trainers, texts or numbers by name, set before torch is imported."""
    converter_type: str | None = None
    """Accepted: NeMo-RL's choice of a converter. Tandem goes by the model's ``config.json``."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers in sequence."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """New. Number of interleaved stages on each of these ranks, which then wait less for each other."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share each expert."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline stage; null means an even share."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline stage; null means an even share."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence."""
    pipeline_dtype: str | None = None
    """Element type of tensors sent between pipeline stages: `policy.precision`, or null for the same."""
    freeze_moe_router: bool = False
    """Do not train the routers of mixtures of experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Element type in which routers compute; null means that of the activations."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    """Method of load balancing for experts."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Step size of the bias that balances experts."""
    moe_router_enable_expert_bias: bool | None = None
    """Accepted: whether routers have a bias that balances experts. The model's ``config.json`` decides."""
    moe_grouped_gemm: bool | None = None
    """Accepted: whether a rank's experts are multiplied in one call. They are wherever possible."""
    mtp_num_layers: NonNegativeInt | None = None
    """Accepted: layers that predict the tokens after the next one. They are not trained with this backend, but with
    `policy.mtp`; exports have them as they came."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.0
    """Accepted: weight of their loss."""
    mtp_use_repeated_layer: bool = False
    """Accepted: whether they are one layer, applied repeatedly."""
    mtp_detach_heads: bool = False
    """Accepted: whether their loss has no gradient in the layers below."""
    defer_fp32_logits: bool | None = None
    """Accepted: when NeMo-RL converts logits to float32. Here this happens row by row for the log-probabilities."""
    use_linear_ce_fusion_loss: bool = False
    """Accepted: compute log-probabilities without whole logits. This only changes the use of memory."""
    linear_ce_fusion_chunk_size: PositiveInt = 256
    """Accepted: tokens that `use_linear_ce_fusion_loss` computes at once."""
    train_iters: PositiveInt | None = None
    """Accepted: number of steps of the run, as in NeMo-RL for schedules without `lr_decay_iters`. The run itself sets
    it when it begins."""
    track_moe_metrics: bool | None = None
    """Accepted: log the load of experts."""
    peft: PeftConfig = PeftConfig()
    fp8_cfg: Fp8Cfg | None = None
    """Products in float8; null means `enabled: false`."""
    fp4_cfg: Fp4Cfg | None = None
    """New. Products in float4; null means `enabled: false`."""
    apply_rope_fusion: bool = True
    """Use the fused kernel for rotary embeddings, if there is one."""
    optimizer: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of Megatron-Core's ``OptimizerConfig``. Its defaults apply, except for `lr` (5.0e-6), `min_lr` (0),
    `use_distributed_optimizer` (true) and `clip_grad` (`policy.max_grad_norm`)."""
    scheduler: MegatronScheduler = MegatronScheduler()
    distributed_data_parallel_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of Megatron-Core's ``DistributedDataParallelConfig``."""
    forwarded: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Collects every other key written directly under `policy.megatron_cfg`."""

    @cached_property
    def environment(self) -> dict[str, str]:
        """Environment variables for trainers from `env_vars`, if they train with Megatron-Core."""
        variables = self.env_vars if self.enabled else None
        return {name: str(value) for name, value in (variables or {}).items()}

    @cached_property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model and work on the same sequences."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
