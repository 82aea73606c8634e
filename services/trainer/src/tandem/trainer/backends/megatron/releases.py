"""The differences between the known releases of Megatron-Core, in one place.

`tandem.config.installed.megatron_arguments` names them. Code here asks what a release has, not for its number. Since
0.16:

- 0.17 makes experts by calls in place of a ``ModuleSpec``, knows no plain linear layer in latent attention without
  Transformer Engine, and tells the fused rotation whether pairs are neighbours.
- 0.18 makes all feed-forward layers by calls, and imports triton wherever it runs.
- 0.19 chooses the norms of latent attention itself, and asks for CUDA's current stream before it reduces gradients.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_NORMED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
"""Parts of latent attention that 0.19 chooses by itself."""


def name_plain_linear() -> None:
    """Let latent attention know its plain linear layer, which 0.17 and later name only with Transformer Engine."""
    if multi_latent_attention.Linear is None:
        multi_latent_attention.Linear = Linear


def submodules_of(part: Any) -> Any:
    """Return the submodules that a specification names for a part of a layer: a ``ModuleSpec``, or a call."""
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules


def keep_norms(attention: Any) -> None:
    """Have latent attention built of what its specification names.

    0.19 demands ``qk_layernorm`` of a configuration with norms of queries and keys. Without Transformer Engine, their
    gradients would then be summed over tensor-parallel ranks once too often. And it gives queries without a low rank a
    norm, which no model here has.
    """
    if attention.module is MLASelfAttention and hasattr(MLASelfAttention, "_resolve_qk_norm_config"):
        attention.module = _AsSpecified


class _AsSpecified(MLASelfAttention):  # type: ignore[misc]
    """Latent attention of the parts that its specification names."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _NORMED}
