"""Training with Megatron-Core: known to the schema, not built yet."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.common.config.schema.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class MegatronCfg(Section, frozen=True, kw_only=True):
    """Training with Megatron-Core; read only where it is enabled, and then it wins over `policy.dtensor_cfg`."""

    enabled: bool = False
    """Train with Megatron-Core."""
    empty_unused_memory_level: NonNegativeInt = 0
    """How often cached GPU memory is given back: 0 never, 1 around generation, 2 also within a step."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    converter_type: str | None = None
    """Architecture that decides how Hugging Face names map to Megatron's."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers in sequence."""
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
    """Element type of what travels between pipeline stages."""
    freeze_moe_router: bool = False
    """Do not train the routers of mixtures of experts."""
    moe_router_dtype: str | None = None
    """Element type in which routers compute."""
    moe_router_load_balancing_type: str = "none"
    """How experts are kept evenly loaded."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Step of the bias that balances experts."""
    apply_rope_fusion: bool = True
    """Use the fused kernel for rotary embeddings."""
    optimizer: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of Megatron's optimizer configuration."""
    scheduler: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of Megatron's learning-rate schedule."""
    distributed_data_parallel_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of Megatron's data-parallel configuration."""
    forwarded: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Every further key written directly under `policy.megatron_cfg` is gathered here and forwarded to
    Megatron-Core."""
