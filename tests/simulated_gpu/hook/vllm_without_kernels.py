"""Have vLLM for CUDA compute by torch and Triton alone: its own kernels are compiled for GPUs, and run on nothing else.

All else is as it is on a GPU: its worker, model runner, loader, scheduler, memory and sleep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def _platform(cuda: Any) -> None:
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    cuda._get_backend_priorities = lambda *_, **__: [AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.TRITON_MLA]
    cuda.CudaPlatformBase.get_default_ir_op_priority = classmethod(
        lambda cls, config: IrOpPriorityConfig.with_default(["native"])
    )


def _layers(custom_op: Any) -> None:
    custom_op.CustomOp.default_on = staticmethod(lambda: False)


def _sampler(sampler: Any) -> None:
    # Its Triton kernel loops over `tl.range`, which the interpreter counts through in Python's own numbers.
    sampler.HAS_TRITON = False


def _runtime(wrapper: Any) -> None:
    # It calls the CUDA runtime by the file that torch has loaded, not by the names that are preloaded.
    preloaded = os.environ["LD_PRELOAD"].split(":")[0]
    wrapper.find_loaded_library = lambda name: preloaded


BY_MODULE: dict[str, Callable[[Any], object]] = {
    "vllm.distributed.device_communicators.cuda_wrapper": _runtime,
    "vllm.platforms.cuda": _platform,
    "vllm.model_executor.custom_op": _layers,
    "vllm.v1.sample.ops.topk_topp_sampler": _sampler,
}
"""What to do with a module of vLLM once it has been imported."""
