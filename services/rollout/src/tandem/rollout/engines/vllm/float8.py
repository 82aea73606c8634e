"""Float8 weights with block scales for vLLM, and the kernels that use them on a CPU.

Only this module, `insides`, `part` and `worker` know vLLM's internals; all are checked against the same releases.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tandem.refit.adapters.catalogue import make_shape

PRECISION = "fp8"
"""Value of ``policy.generation.vllm_cfg.precision`` that selects float8."""
ACTIVATIONS = "bfloat16"
"""Element type of everything that is not in float8."""
BLOCK = (128, 128)
"""Rows and columns of a weight that share a scale, as in the checkpoints of DeepSeek-V3 (arXiv:2412.19437)."""


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``quantization_config`` that a checkpoint of such weights has, for a model's configuration."""
    geometry = make_shape(config).geometry
    experts = geometry.experts if geometry is not None else None
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        # Routers stay as they are, as in the checkpoints of Qwen3 in float8.
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in experts.layers] if experts else [],
    }


@functools.cache
def install_cpu_kernels() -> None:
    """Have layers on a CPU multiply by the weights as held, scaled back block by block.

    vLLM's own kernels for CPUs need AMX and pack the weights, which could then not be written in place. Activations
    keep their precision: only the weights are in float8.
    """
    _install_linear()
    _install_experts()


def _install_linear() -> None:
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


def _install_experts() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    class PlainExperts(cpu_moe.CPUExpertsFp8):  # type: ignore[misc,unused-ignore]
        @staticmethod
        def _supports_current_device() -> bool:
            return True

        def apply(
            self,
            *,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            expert_map: torch.Tensor | None,
            **_: Any,
        ) -> None:
            """Compute one expert after another for the tokens that chose it; sum in float32."""
            linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
            dtype, made_TH = hidden_states.dtype, torch.zeros(output.shape)
            own_TC = topk_ids if expert_map is None else expert_map[topk_ids.long()]  # -1: an expert of another worker
            for expert in range(len(w1)):
                token_K, choice_K = (own_TC == expert).nonzero(as_tuple=True)
                if len(token_K) == 0:
                    continue
                gate_up_FH = scaled_back(w1[expert], self.w1_scale[expert], dtype)
                gate_KI, up_KI = linear(hidden_states[token_K], gate_up_FH).chunk(2, dim=-1)
                down_KH = linear(silu(gate_KI) * up_KI, scaled_back(w2[expert], self.w2_scale[expert], dtype))
                made_TH.index_add_(0, token_K, down_KH.float() * topk_weights[token_K, choice_K, None].float())
            output.copy_(made_TH)

    cpu_moe.CPUExpertsFp8 = PlainExperts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    cpu_moe.CPUExpertsFp8W8A8._supports_current_device = staticmethod(lambda: False)


def scaled_back(values_NK: Any, scales_BC: Any, dtype: Any) -> Any:
    """Return ``value × its block's scale``, multiplied in float32; the last block of a side may be cut off."""
    rows, columns = values_NK.shape
    scales_NK = scales_BC.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return (values_NK.float() * scales_NK).to(dtype)
