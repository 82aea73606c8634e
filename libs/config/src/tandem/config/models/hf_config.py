"""Read a model's configuration through Transformers, with the fields that a run overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.models.vision_families import VISION


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
