"""Megatron-Core's optimizer and its schedule, from ``policy.megatron_cfg``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tandem.config import Config, schema
from tandem.trainer.backends.megatron.settings import MegatronSettings


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
