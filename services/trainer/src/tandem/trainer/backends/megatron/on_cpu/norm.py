"""The norm of plain layers, by this project's CPU kernel."""

from __future__ import annotations

import torch

from tandem.trainer.backends.megatron import attention
from tandem.trainer.backends.megatron.on_cpu.kernels import rms_norm


class CpuNorm(attention.AttentionNorm):
    """RMSNorm with few passes over memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with a mean square of one over its last dimension, times the weight."""
        if x.dtype != torch.float32:  # torch has a kernel for these, which computes in float32
            return super().forward(x)
        assert self.eps is not None, "it was given"
        return rms_norm(x, self.weight, self.eps)
