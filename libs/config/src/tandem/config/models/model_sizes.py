"""Read a model's sizes from its local ``config.json``, without asking the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.config.installed.model_fields import find_default

if TYPE_CHECKING:
    from tandem.config.schema import ModelConfig

_NAMES = {
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


_STRETCHING = ("linear", "dynamic", "yarn")
"""Types of rotary embeddings with a factor that ``max_position_embeddings`` may not include."""


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that ranks divide among them; None where unknown, and for the experts of a dense model."""

    num_layers: int | None = None
    num_heads: int | None = None
    num_key_value_heads: int | None = None
    num_experts: int | None = None


class ExpertSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that determine the bytes of recorded experts per token."""

    num_layers: int
    """Layers of the whole model, with and without experts."""
    num_experts: int
    """Experts in a layer."""
    top_k: int
    """Experts per token in each layer with experts."""

    @property
    def bytes_of_expert(self) -> int:
        """Bytes of an expert's number: one if that leaves a value for an unknown expert."""
        return 1 if self.num_experts < 2**8 else 2

    @property
    def num_bytes(self) -> int:
        """Bytes per token."""
        return self.num_layers * self.top_k * self.bytes_of_expert


def read_expert_sizes(model: Mapping[str, Any]) -> ExpertSizes | None:
    """Return the expert sizes of a ``config.json``, or the defaults of its model type; None without experts."""
    sizes: dict[str, int] = {}
    for size in ExpertSizes.__struct_fields__:
        names = _NAMES.get(size, ("num_experts_per_tok",))
        candidates = [model[name] for name in names if name in model]
        candidates += [find_default(str(model.get("model_type")), name) for name in names]
        sizes[size] = next((value for value in candidates if isinstance(value, int)), 0)
    return ExpertSizes(**sizes) if all(value > 0 for value in sizes.values()) else None


def find_config_file(section: ModelConfig) -> Path | None:
    """Return the ``config.json`` of a section's model, in its folder or in the Hub's cache; None if it is in
    neither."""
    path = Path(section.model_name) / "config.json"
    return path if path.is_file() else _find_cached(section.model_name)


def local_folder(name: str) -> Path | None:
    """Return the folder of that name, or of that model in the Hub's cache; None if there is neither."""
    if Path(name).is_dir():
        return Path(name)
    cached = _find_cached(name)
    return None if cached is None else cached.parent


def read_model_config(section: ModelConfig) -> dict[str, Any] | None:
    """Return the model's ``config.json``, or the one that ``new_model`` will write; None without either.

    The fields in ``hf_config_overrides`` are replaced.
    """
    path = find_config_file(section)
    config = read_json(path) if path else _describe_new(section)
    return None if config is None else {**config, **(section.hf_config_overrides or {})}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it cannot be read, which is reported when the model is loaded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def find_language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a model's language model: of a vision model, they stand in ``text_config``."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_model_sizes(policy: ModelConfig) -> ModelSizes:
    """Return the known sizes of the model; all None if it is not on this machine."""
    config = find_language_config(read_model_config(policy) or {})
    sizes = {size: next((config[name] for name in names if name in config), None) for size, names in _NAMES.items()}
    return ModelSizes(**{size: value for size, value in sizes.items() if isinstance(value, int)})


def vocabulary_size(policy: ModelConfig) -> int:
    """Return the model's vocabulary size; the largest possible one if it is not known here."""
    return find_vocabulary(read_model_config(policy) or {}) or 2**31


def find_vocabulary(config: Mapping[str, Any]) -> int | None:
    """Return a model's vocabulary size; None if its ``config.json`` does not have it."""
    size = find_language_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def read_max_positions(policy: ModelConfig) -> int | None:
    """Return the longest sequence that a model was made for; None if it is not known here."""
    config = read_model_config(policy)
    return None if config is None else find_max_positions(config)


def find_max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence by a ``config.json``, or by the default of its model type; None without either."""
    config = find_language_config(config)
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if positions is None:
        positions = find_default(str(config.get("model_type")), "max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:  # -1: any length
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    stretched = 1.0
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in _STRETCHING:
        factor = scaling.get("factor")
        stretched = max(1.0, factor) if isinstance(factor, int | float) else 1.0
    return int(positions * stretched)


def _describe_new(section: ModelConfig) -> dict[str, Any] | None:
    return section.new_model.config if section.new_model is not None else None


def _find_cached(name: str) -> Path | None:
    """Return the path of a model's ``config.json`` in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path, not a name on the Hub
        return None
    return Path(path) if isinstance(path, str) else None
