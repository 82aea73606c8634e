"""The windows and rotations of attention, as a model's configuration in Transformers describes them."""

from __future__ import annotations

from typing import Any


def find_sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer, from a model's text configuration in Transformers.

    None for a layer with full attention.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or not layer_types:
        return (window,) * int(getattr(config, "num_hidden_layers", 0))  # BLT's parts have layers of their own
    return tuple(window if each == "sliding_attention" else None for each in layer_types[: config.num_hidden_layers])


def find_unstable_rotation(config: Any, max_length: int) -> str | None:
    """Return the type of rotary embeddings if its angles depend on the row's length, else None.

    Lengths up to `max_length` are considered. `config` is a model's text configuration in Transformers.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for rotation in parameters.values() if isinstance(next(iter(parameters.values()), None), dict) else (parameters,):
        kind = rotation.get("rope_type")
        limit = None
        if kind == "longrope":
            limit = rotation.get("original_max_position_embeddings") or config.max_position_embeddings
        elif kind == "dynamic":
            limit = config.max_position_embeddings
        if limit is not None and max_length > limit:
            return str(kind)
    return None
