"""Read a model's configuration as transformers has it, with the fields that a run overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def load_config(source: str, overrides: Mapping[str, Any] | None, **fields: Any) -> Any:
    """Return the configuration of transformers of a folder, or of a name of the Hub.

    Raises what the library raises.

    Args:
        source: the folder, or the name.
        overrides: ``hf_config_overrides`` of the model's section: fields of ``config.json`` that are other than there.
            What transformers derives from a field, it derives from these.
        fields: set afterwards.
    """
    import transformers  # here, because it takes seconds

    if not overrides:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **fields)
    found, _ = transformers.PreTrainedConfig.get_config_dict(source)
    kind: Any = transformers.CONFIG_MAPPING[found["model_type"]]
    return kind.from_dict({**found, **overrides}, **fields)
