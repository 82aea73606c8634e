"""Preparation of Megatron-Core before it is used, on any device.

Without Transformer Engine, two names that Megatron-Core gets wrong are corrected. Without Apex, its kernel of weight
gradients is filled in for. Without a GPU, `on_cpu` puts the CPU where Megatron-Core names CUDA.

Shapes: ``V`` and ``E``, outputs and inputs of a linear layer; ``N`` tokens of a row.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import types
import warnings

import torch

from tandem.common.distribution import install_command
from tandem.common.errors import ModelError
from tandem.config.installed.megatron_arguments import RELEASES, find_obstacle, is_among
from tandem.trainer.backends.megatron import insides

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None

_GRADIENT_CALLS = {
    "ColumnParallelLinear.__init__": "_grad_accum_fusion_available",
    "LinearWithGradAccumulationAndAsyncCommunication.backward": "fused_weight_gradient_mlp_cuda",
}
"""Functions of linear layers, with the name that each looks up in its module and that is replaced."""


@functools.cache
def prepare() -> None:
    """Make Megatron-Core run on this machine. Call it once in a process, which may then not use CUDA's names otherwise.

    Raises `ModelError` if Megatron-Core is not installed, or is not a supported release.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")  # it warns of missing optional packages
    # The warnings of its collectives cannot be acted on. They would be the last words of a trainer that dies.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than it saves, even at import
    _require_version()
    _do_without_transformer_engine()
    if torch.cuda.is_available():
        _do_without_apex()
        return
    from tandem.trainer.backends.megatron.on_cpu import stand_ins

    stand_ins.replace_cuda()
    if not HAS_TRANSFORMER_ENGINE:
        _do_without_apex()
        stand_ins.replace_rotation()


def adds_weight_gradients() -> bool:
    """Tell whether the matrix product that computes a weight's gradient also adds it to the total."""
    return bool(insides.module("tensor_parallel.layers")._grad_accum_fusion_available)


def has_kernels() -> bool:
    """Tell whether `prepare` has put this project's CPU kernels in the places of GPU kernels."""
    if torch.cuda.is_available():
        return False
    from tandem.trainer.backends.megatron.on_cpu import stand_ins

    return stand_ins.has_rotation()


def add_weight_gradient(input_NE: torch.Tensor, grad_NV: torch.Tensor, total_VE: torch.Tensor) -> None:
    """Add a micro-batch's gradient of a linear layer's weight to the total, by the matrix product that computes it.

    It has the arguments of Apex's ``fused_weight_gradient_mlp_cuda``. The total may have more precision than the
    product.
    """
    if total_VE.dtype == grad_NV.dtype:
        total_VE.addmm_(grad_NV.t(), input_NE)
    else:
        total_VE.add_(grad_NV.t() @ input_NE)


def _require_version() -> None:
    if (obstacle := find_obstacle()) is not None:
        raise ModelError(obstacle)
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise ModelError(
            f"policy.megatron_cfg needs Megatron-Core, `{install_command('megatron')}`: {error}"
        ) from error
    if not is_among(core.__version__, RELEASES):
        raise ModelError(f"Megatron-Core {core.__version__} is installed, and known releases are {', '.join(RELEASES)}")


def _do_without_transformer_engine() -> None:
    """Correct modules that assume Transformer Engine where it is not installed."""
    if HAS_TRANSFORMER_ENGINE:
        return
    moe_utils = insides.module("transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # which is checked, and then not used
    latent_attention = insides.module("transformer.multi_latent_attention")
    latent_attention.HAVE_TE = False  # it only checks the import of names, which exist and are None
    from tandem.trainer.backends.megatron.releases import name_plain_linear  # it imports Megatron-Core

    name_plain_linear()


def _do_without_apex() -> None:
    """Fill in for Apex's kernel of weight gradients if Apex is not installed."""
    for name, called in _GRADIENT_CALLS.items():
        insides.require_call("tensor_parallel.layers", name, called)
    layers = insides.module("tensor_parallel.layers")
    if layers._grad_accum_fusion_available:
        return
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    layers._grad_accum_fusion_available = True
