"""Megatron-Core's settings from ``policy.megatron_cfg``, corrected where wrong; the optimizer by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tandem.common.errors import ModelError
from tandem.config import Config, schema
from tandem.config.low_precision import LowPrecisionProducts, list_products
from tandem.config.schema.columns import Model
from tandem.refit.adapters.megatron import Megatron
from tandem.trainer.backends.megatron.architecture import transformer_arguments
from tandem.trainer.backends.megatron.preparing import HAS_TRANSFORMER_ENGINE, adds_weight_gradients, has_kernels

VOCABULARY_DIVISOR = 128
"""Divisor of the padded vocabulary, times the tensor-parallel size, as in Megatron-LM."""

_FORWARDED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "sequence_parallel",
)
"""Keys of ``policy.megatron_cfg`` with the same names in Megatron-Core, for every model."""

_OWN_KERNELS = {"apply_rope_fusion", "gradient_accumulation_fusion", "use_te_activation_func"}
_KERNELS = {"fused_residual_rmsnorm", "moe_permute_fusion", "moe_router_fusion"} | _OWN_KERNELS
"""Keys of ``TransformerConfig`` that request kernels. `kernels` has some of these for the CPU."""

_OF_EXPERTS = ("moe_router_dtype", "moe_router_load_balancing_type", "moe_router_bias_update_rate")
"""Keys with the same names in Megatron-Core, for models with experts."""


class MegatronSettings(msgspec.Struct, frozen=True):
    """Megatron-Core's configurations of a run."""

    transformer: TransformerConfig
    data_parallel: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    sizes: Megatron
    """The parallel sizes, as the weight plane knows them."""
    row_divisor: int
    """Divisor of the tokens of a row that context-parallel ranks share."""
    notices: tuple[str, ...]
    """The settings that differ from the configuration, one a line."""


def settings_of(config: Config, model: Mapping[str, Any], num_ranks: int, name: Model = "policy") -> MegatronSettings:
    """Return Megatron-Core's configurations.

    Args:
        config: configuration of the run.
        model: the Hugging Face configuration of the model.
        num_ranks: size of the default process group.
        name: name of the model, which has its own section in the configuration.

    Raises:
        ModelError: Megatron-Core does not support the model, or this machine not its products of fewer bits.
    """
    notices: list[str] = []
    section = config.settings_of(name)
    place = f"{'policy' if name == 'reference' else name}.megatron_cfg."
    products = list_products(section.megatron_cfg)
    for low_precision in products:
        has_gpu = torch.cuda.is_available()
        require_kernels(
            place, low_precision, HAS_TRANSFORMER_ENGINE, torch.cuda.get_device_capability() if has_gpu else None
        )
    transformer = transformer_of(section, model, notices)
    optimizer = _optimizer(section, transformer, notices)
    data_parallel = _data_parallel(section, optimizer, notices)
    ranks_a_replica = (
        transformer.tensor_model_parallel_size
        * transformer.pipeline_model_parallel_size
        * transformer.context_parallel_size
    )
    sizes = Megatron(
        tp=transformer.tensor_model_parallel_size,
        pp=transformer.pipeline_model_parallel_size,
        cp=transformer.context_parallel_size,
        dp=num_ranks // ranks_a_replica,
        ep=transformer.expert_model_parallel_size,
        etp=transformer.expert_tensor_parallel_size,
        vpp=transformer.virtual_pipeline_model_parallel_size or 1,
        num_layers_in_first_stage=transformer.num_layers_in_first_pipeline_stage,
        num_layers_in_last_stage=transformer.num_layers_in_last_pipeline_stage,
        vocabulary_divisor=VOCABULARY_DIVISOR,
        transformer_engine=HAS_TRANSFORMER_ENGINE,
        experts="grouped" if HAS_TRANSFORMER_ENGINE else "sequential",
    )
    row_divisor = row_divisor_of(products, transformer)
    prefixed_notices = tuple(f"{place}{notice}" for notice in notices)
    return MegatronSettings(transformer, data_parallel, optimizer, sizes, row_divisor, prefixed_notices)


def require_kernels(
    place: str, products: LowPrecisionProducts, has_transformer_engine: bool, capability: tuple[int, int] | None
) -> None:
    """Check that this machine has the kernels of products of fewer bits.

    Args:
        place: prefix of the keys of the section.
        products: the products.
        has_transformer_engine: whether Transformer Engine is installed.
        capability: compute capability of the GPU; None without a GPU.

    Raises:
        ModelError: it does not have them. Megatron-Core would multiply in the precision of the model, or stop late.
    """
    requirement = f"{place}{products.key}: {products.value} needs"
    if not has_transformer_engine:
        raise ModelError(f"{requirement} Transformer Engine, which is not installed here")
    if capability is None:
        raise ModelError(f"{requirement} a GPU")
    if capability < products.capability:
        least, actual = (".".join(map(str, each)) for each in (products.capability, capability))
        raise ModelError(
            f"{requirement} a GPU of compute capability {least} for {products.recipe}; this one has {actual}"
        )


def row_divisor_of(products: Sequence[LowPrecisionProducts], transformer: TransformerConfig) -> int:
    """Return the divisor of a row's tokens with which every rank has as many as its kernels take.

    1 if products are in the precision of the model.
    """
    if not products:
        return 1
    shares = 2 * transformer.context_parallel_size if transformer.context_parallel_size > 1 else 1
    shares *= transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
    return shares * max(each.token_divisor for each in products)


def transformer_of(section: schema.ModelConfig, model: Mapping[str, Any], notices: list[str]) -> TransformerConfig:
    """Return Megatron-Core's configuration of a model, and add to `notices` what differs from its section.

    Raises `ModelError`.
    """
    megatron, dtype = section.megatron_cfg, getattr(torch, section.precision)
    arguments = transformer_arguments(model)
    has_experts = "num_moe_experts" in arguments
    arguments |= {key: getattr(megatron, key) for key in _FORWARDED}
    if megatron.virtual_pipeline_model_parallel_size == 1:
        arguments["virtual_pipeline_model_parallel_size"] = None
    if has_experts:
        arguments |= {key: getattr(megatron, key) for key in _OF_EXPERTS}
        arguments["moe_grouped_gemm"] = HAS_TRANSFORMER_ENGINE
        arguments["moe_token_dispatcher_type"] = "alltoall"
    recomputes = megatron.activation_checkpointing or section.activation_checkpointing_enabled
    if recomputes and megatron.forwarded.get("recompute_granularity") is None:
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    has_rotation = HAS_TRANSFORMER_ENGINE or (has_kernels() and not arguments.get("multi_latent_attention"))
    counts = "mrope_section" not in arguments  # and so do the kernels, where images' tokens stand in a plane
    arguments |= {"apply_rope_fusion": megatron.apply_rope_fusion and has_rotation and counts}
    arguments |= {"bias_activation_fusion": HAS_TRANSFORMER_ENGINE, "bias_dropout_fusion": HAS_TRANSFORMER_ENGINE}
    arguments |= {"gradient_accumulation_fusion": adds_weight_gradients()}
    arguments |= _convert_types(megatron.forwarded)
    for products in list_products(megatron):
        arguments |= products.arguments
    if has_kernels():  # feed-forward layers then look at what `_layers_of` names, unless they are to fuse by themselves
        arguments["use_te_activation_func"] = not arguments["bias_activation_fusion"]
    arguments |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Values come from a checkpoint, but only parameters that were given some are marked as parts of larger ones,
        # without which their gradients are missing from the norm.
        "perform_initialization": True,
        # The loss is a sum over everything already: gradients are added up over ranks, never averaged.
        "calculate_per_token_loss": True,
    }
    replays, adapts = section.router_replay.enabled, section.adapters is not None
    _set_right(arguments, has_experts=has_experts, replays=replays, adapts=adapts, notices=notices)
    config_class = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    return config_class(**arguments)


def _set_right(
    arguments: dict[str, Any], *, has_experts: bool, replays: bool, adapts: bool, notices: list[str]
) -> None:
    """Change settings that would give wrong numbers, or an error much later."""

    def set_(key: str, value: object, reason: str) -> None:
        if key in arguments and arguments[key] != value:
            notices.append(f"{key} is {value}, not {arguments[key]}: {reason}")
        arguments[key] = value

    if replays:
        set_("moe_router_fusion", False, "the kernel chooses experts itself, and policy.router_replay gives them")
    if adapts:
        set_("moe_router_bias_update_rate", 0.0, "the bias is the base's, which stays as it is beside adapters")
    has_tensor_ranks = arguments["tensor_model_parallel_size"] > 1
    if arguments["sequence_parallel"] and not has_tensor_ranks:
        set_("sequence_parallel", False, "it needs tensor_model_parallel_size above 1")
    if has_experts and has_tensor_ranks:
        set_("sequence_parallel", True, "experts under tensor parallelism need it")
        if arguments["expert_model_parallel_size"] == 1:
            size = arguments["tensor_model_parallel_size"]
            set_(
                "expert_tensor_parallel_size", size, "without expert parallelism experts get wrong gradients otherwise"
            )
    if arguments.get("moe_token_dispatcher_type") == "allgather":
        set_("moe_token_dispatcher_type", "alltoall", "micro-batches are of different lengths")
    if arguments["pipeline_model_parallel_size"] > 1:
        if (arguments.get("virtual_pipeline_model_parallel_size") or 1) > 1:
            set_("overlap_p2p_comm", True, "virtual stages give wrong gradients otherwise")
            set_("batch_p2p_comm", False, "virtual stages give wrong gradients otherwise")
        else:
            # Micro-batches are of different lengths. Virtual stages have them padded to one length.
            arguments["variable_seq_lengths"] = True
        arguments.setdefault("moe_token_dispatcher_type", "alltoall")  # it is also checked in dense models
    if not HAS_TRANSFORMER_ENGINE:
        available = _OWN_KERNELS if has_kernels() else {"gradient_accumulation_fusion"}
        for key in sorted(_KERNELS - available):
            if arguments.get(key):
                set_(key, False, "it is a kernel of Transformer Engine, which is not installed")


def _optimizer(section: schema.ModelConfig, transformer: TransformerConfig, notices: list[str]) -> OptimizerConfig:
    arguments = _convert_types(section.megatron_cfg.optimizer)
    arguments |= {"bf16": transformer.bf16, "params_dtype": transformer.params_dtype}
    arguments["clip_grad"] = arguments.get("clip_grad", section.max_grad_norm) or 0.0
    if arguments.get("use_precision_aware_optimizer") and not HAS_TRANSFORMER_ENGINE:
        arguments["use_precision_aware_optimizer"] = False
        notices.append(
            "optimizer.use_precision_aware_optimizer is False: it is Transformer Engine's, which is not installed"
        )
    return OptimizerConfig(**arguments)


def _data_parallel(
    section: schema.ModelConfig, optimizer: OptimizerConfig, notices: list[str]
) -> DistributedDataParallelConfig:
    arguments = _convert_types(section.megatron_cfg.distributed_data_parallel_config)
    for key, reason in (
        ("average_in_collective", "gradients are summed, since the loss is a sum over the global batch"),
        ("overlap_param_gather", "engines read the parameters as soon as a step is over"),
    ):
        if arguments.get(key):
            arguments[key] = False
            notices.append(f"distributed_data_parallel_config.{key} is False: {reason}")
    return DistributedDataParallelConfig(**arguments, use_distributed_optimizer=optimizer.use_distributed_optimizer)


def _convert_types(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with dtypes, and attention kernels, in place of their names."""
    typed = dict(arguments)
    for key, value in arguments.items():
        if key.endswith("_dtype") and key != "moe_router_dtype" and isinstance(value, str):
            typed[key] = getattr(torch, value)
        elif key == "attention_backend" and isinstance(value, str):
            typed[key] = AttnBackend[value]
    return typed


def add_gradient_buffers(
    chunks: Sequence[torch.nn.Module], settings: MegatronSettings
) -> list[DistributedDataParallel]:
    """Return the chunks with gradient buffers, which are reduced over the data-parallel ranks of each parameter."""
    transformer, data_parallel = settings.transformer, settings.data_parallel
    wrapped = [
        # Only the first chunk's gradients are ready late enough to be worth reducing a bucket at a time.
        DistributedDataParallel(transformer, data_parallel, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    transformer.finalize_model_grads_func = finalize_model_grads
    if data_parallel.overlap_grad_reduce:
        has_virtual = len(wrapped) > 1
        no_sync, start = [chunk.no_sync for chunk in wrapped], [chunk.start_grad_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if has_virtual else no_sync[0]
        transformer.grad_sync_func = start if has_virtual else start[0]
    return wrapped


def make_optimizer(chunks: Sequence[DistributedDataParallel], settings: MegatronSettings) -> ChainedOptimizer:
    """Return the optimizer of all chunks, which must have their weights already."""
    optimizer = get_megatron_optimizer(settings.optimizer, list(chunks), use_gloo_process_groups=False)
    _fuse(optimizer)
    return optimizer


def _fuse(optimizer: ChainedOptimizer) -> None:
    """Make torch's Adam take one pass over memory, which Megatron-Core does not request.

    Those of Transformer Engine and Apex, which it uses if they are installed, already do.
    """
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and isinstance(part.optimizer, torch.optim.Adam):  # AdamW is one
            for group in part.optimizer.param_groups:
                group["fused"] = True


def clip(optimizer: ChainedOptimizer, norm: float, largest: float) -> None:
    """Scale gradients of this norm down to the largest; zero leaves them unchanged."""
    if not largest:
        return
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters:
            is_decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, largest, norm, is_decoupled)


def state_of(optimizer: ChainedOptimizer, chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the tensors that only optimizer steps need: moments, and float32 copies of other parameters."""
    trained = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}
    state_values = []
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            state_values += [value for state in part.optimizer.state.values() for value in state.values()]
            state_values += [parameter.detach() for group in part.param_groups for parameter in group["params"]]
    tensors = [value for value in state_values if isinstance(value, torch.Tensor) and value.is_cuda]
    return [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in trained]


def make_schedule(
    config: Config, section: schema.ModelConfig, optimizer: ChainedOptimizer, num_steps: int
) -> OptimizerParamScheduler:
    """Return ``megatron_cfg.scheduler`` of a model's section after `num_steps` of its steps, passes over a batch.

    By default, the learning rate decays over the whole run: ``train_iters``, in which the coordinator sets its steps.
    """
    scheduler_config, settings = section.megatron_cfg.scheduler, optimizer.config
    run_steps = section.megatron_cfg.train_iters or max(1, config.algorithm_section.max_num_steps)
    num_in_run, decay = run_steps * config.num_passes, settings.weight_decay
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler_config.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr or 0.0,
        lr_warmup_steps=scheduler_config.lr_warmup_iters,
        lr_decay_steps=scheduler_config.lr_decay_iters or max(scheduler_config.lr_warmup_iters + 1, num_in_run),
        lr_decay_style=scheduler_config.lr_decay_style,
        start_wd=decay if scheduler_config.start_weight_decay is None else scheduler_config.start_weight_decay,
        end_wd=decay if scheduler_config.end_weight_decay is None else scheduler_config.end_weight_decay,
        wd_incr_steps=num_in_run,
        wd_incr_style=scheduler_config.weight_decay_incr_style,
        wsd_decay_steps=scheduler_config.lr_wsd_decay_iters,
        lr_wsd_decay_style=scheduler_config.lr_wsd_decay_style,
    )
    schedule.step(num_steps)
    return schedule
