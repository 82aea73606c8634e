"""The configuration by which a trainer reads a checkpoint that may be quantised."""

from __future__ import annotations

from typing import Any

from tandem.common.errors import ModelError
from tandem.config.models.hf_config import load_config
from tandem.config.schema import ModelConfig

_DEQUANTISED = ("fp8", "mxfp4")
"""Ways of quantising that Transformers undoes while it reads weights."""


def describe_for_training(source: str, settings: ModelConfig, **fields: Any) -> Any:
    """Return the configuration by which weights are read: of a quantised checkpoint, dequantised if configured.

    Raises `ModelError` if they would stay quantised, and so could not be trained.
    """
    described = load_config(source, settings.hf_config_overrides, **fields)
    quantised = getattr(described, "quantization_config", None)
    if quantised is None:
        return described
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if not settings.dequantize_base_checkpoint:
        raise ModelError(f"it is quantised ({method}): dequantize_base_checkpoint reads float8 and MXFP4")
    if method not in _DEQUANTISED:
        raise ModelError(f"it is quantised ({method}), and of these only {' and '.join(_DEQUANTISED)} are dequantised")
    described.quantization_config = {**quantised, "dequantize": True}
    return described
