"""Low-rank adapters: their layers, and the names of their tensors.

An adapter of a linear layer is two matrices, ``A`` of shape ``[rank, in]`` and ``B`` of shape ``[out, rank]``; the
layer computes as if its weight were ``weight + alpha / rank * B @ A`` (Hu et al. 2021, arXiv:2106.09685). Its
tensors have the layer's name in a Hugging Face checkpoint: ``model.layers.0.self_attn.q_proj.lora_A.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tandem.config.schema.adapters import LoraCfg, PeftConfig

A, B = "lora_A.weight", "lora_B.weight"
"""Last parts of the names of an adapter's tensors."""
CONFIG = "adapter_config.json"
"""Configuration file in a folder of adapters in PEFT's format."""


def explain_no_model(folder: Path) -> str | None:
    """Return why a folder cannot be used as a model: it holds adapters; None if it does not."""
    if not (folder / CONFIG).is_file():
        return None
    return f"{folder} holds adapters, not a model: `coordinator merge {folder} FOLDER` makes one"


def is_adapter(tensor: str) -> bool:
    """Tell by its name whether a tensor belongs to an adapter."""
    return tensor.endswith((f".{A}", f".{B}"))


def make_tensor_name(parameter: str) -> str:
    """Return the usual name of a parameter in a model with PEFT's layers; other names are returned unchanged.

    PEFT's layer holds the layer it adapts as ``base_layer``, and its two matrices as ``lora_A.default`` and
    ``lora_B.default``.
    """
    return parameter.replace(".base_layer.", ".").replace(".default.weight", ".weight")


def find_layer(tensor: str) -> str:
    """Return the name of the layer that one of an adapter's tensors belongs to."""
    return tensor.removesuffix(f".{A}").removesuffix(f".{B}")


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern is the last part of a layer's name, or matches all of it, with ``*`` for any text."""
    last = layer.rpartition(".")[2]
    return any(pattern == last or fnmatchcase(layer, pattern) for pattern in patterns)


def choose_layers(layers: Sequence[str], adapters: LoraCfg | PeftConfig, section: str) -> list[str]:
    """Return the linear layers of a model that have an adapter.

    Excluded layers need not exist. Raises `ConfigError` if no layer remains, or if one of `target_modules` matches
    none.
    """
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    for pattern in adapters.target_modules:
        if not any(matches(layer, [pattern]) for layer in layers):
            hint = f"{nearest(pattern, names)}: there are {', '.join(names)}"
            raise ConfigError(f"{section}.target_modules: no layer is called {pattern!r}{hint}")
    adapted_layers = [
        layer for layer in layers if matches(layer, adapters.patterns) and not matches(layer, adapters.exclude_modules)
    ]
    if not adapted_layers:
        raise ConfigError(f"{section}: no layer is left for an adapter, among {', '.join(names)}")
    return adapted_layers
