"""Weights in float8 with block scales: what vLLM is told of them and, on a CPU, what it computes with.

With `insides`, `part` and `worker` the only module that knows vLLM's insides; checked against the same releases.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tandem.common.errors import NotSupportedYet
from tandem.refit.adapters.catalogue import from_config

PRECISION = "fp8"
"""What ``policy.generation.vllm_cfg.precision`` says."""
ACTIVATIONS = "bfloat16"
"""Element type of all that is not in float8."""
BLOCK = (128, 128)
"""Rows and columns of a weight that share a scale; as the checkpoints of DeepSeek-V3 (arXiv:2412.19437)."""


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint of such weights has as ``quantization_config``, for a model's configuration.

    Raises `NotSupportedYet` for a mixture of experts, whose kernels would pack the weights.
    """
    geometry = from_config(config).geometry
    if geometry is not None and geometry.experts is not None:
        raise NotSupportedYet("policy.generation.vllm_cfg.precision: fp8 for a mixture of experts")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }


@functools.cache
def install_cpu_kernel() -> None:
    """Have linear layers on a CPU multiply by weights as they are held, scaled back block by block.

    vLLM's own kernels for CPUs need AMX and pack the weights, which could then not be written in place. Activations
    stay as they are: only the weights are in float8.
    """
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.platforms import PlatformEnum

    class PlainBlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leave the parameters as they are."""

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
        ) -> torch.Tensor:
            params = self._get_layer_params(layer)
            return torch.nn.functional.linear(x, scaled_back(params.weight, params.weight_scale_inv, x.dtype), bias)

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
            raise NotImplementedError("apply_weights does it all")

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, PlainBlockKernel)
    types = Fp8Config.get_supported_act_dtypes()
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [*types, torch.float32])  # type: ignore[method-assign,unused-ignore]


def scaled_back(values_NK: Any, scales_BC: Any, dtype: Any) -> Any:
    """Return ``value × its block's scale``, multiplied in float32; the last block of a side may be cut off."""
    rows, columns = values_NK.shape
    scales_NK = scales_BC.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return (values_NK.float() * scales_NK).to(dtype)
