"""Read a model's configuration through Transformers, with the fields that a run overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.common.errors import ModelError
from tandem.config.models.vision_families import VISION
from tandem.config.schema import ModelConfig

_TEXT_PART = "model.language_model."
_DEQUANTISED = ("fp8", "mxfp4")
"""Ways of quantising that Transformers undoes while it reads weights."""


def load_config(source: str, overrides: Mapping[str, Any] | None, **fields: Any) -> Any:
    """Return the Transformers configuration of a folder or of a name on the Hub.

    Raises the library's errors.

    Args:
        source: folder, or name on the Hub.
        overrides: ``hf_config_overrides`` of the model's section, which replace fields of ``config.json``. Values
            that Transformers derives follow from them.
        fields: attributes to set afterwards.
    """
    import transformers  # imported late, since it takes seconds

    if not overrides:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **fields)
    config_dict, _ = transformers.PreTrainedConfig.get_config_dict(source)
    kind: Any = transformers.CONFIG_MAPPING[config_dict["model_type"]]
    return kind.from_dict({**config_dict, **overrides}, **fields)


def find_model_class(config: Any) -> Any:
    """Return the class of Transformers that loads the language model, one that sees or not, of a configuration."""
    import transformers

    sees = config.model_type in VISION
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def describe_text_part(config: Any, names: Iterable[str] | None = None) -> tuple[Any, dict[str, str]]:
    """Return the configuration of the language model of a checkpoint, and how its tensors are renamed to load it.

    A vision model, and is trained on text here, is its text part if Transformers has a class of that and `names`,
    the checkpoint's tensors, have it under one prefix; None for names that are not known. Anything else is returned as
    it is.
    """
    import transformers

    text = config.get_text_config()
    if config.model_type in VISION or text is config or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return config, {}
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None and kind.config_class is type(text):  # Transformers takes the part by itself
        return config, {}
    if names is not None and not any(name.startswith(_TEXT_PART) for name in names):
        return config, {}
    return text, {rf"^{re.escape(_TEXT_PART)}(.+)": r"model.\1"}


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
