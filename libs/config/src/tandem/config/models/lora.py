"""Low-rank adapters: their layers, and the names of their tensors.

An adapter of a linear layer is two matrices, ``A`` of shape ``[rank, in]`` and ``B`` of shape ``[out, rank]``; the
layer computes as if its weight were ``weight + alpha / rank * B @ A`` (Hu et al. 2021, arXiv:2106.09685). Its
tensors have the layer's name in a Hugging Face checkpoint: ``model.layers.0.self_attn.q_proj.lora_A.weight``.

The routed experts of a layer are fused in parameters of three dimensions, the first of which counts experts:
``mlp.experts.gate_up_proj``. An adapter of one is a pair of matrices for each expert, ``A`` of shape ``[experts, rank,
columns]`` and ``B`` of shape ``[experts, rows, rank]``: ``mlp.experts.gate_up_proj.lora_A.weight``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tandem.common.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tandem.config.schema.adapters import AdaptersConfig, LoraCfg, PeftConfig

A, B = "lora_A.weight", "lora_B.weight"
"""Last parts of the names of an adapter's tensors."""
ALL_LINEAR = "all-linear"
"""PEFT's word for all linear layers but the output layer, routers, and experts that are linear layers in
checkpoints."""
CONFIG = "adapter_config.json"
"""Configuration file in a folder of adapters in PEFT's format."""
TENSORS = "adapter_model.safetensors"
"""Tensors' file in such a folder."""


def explain_no_model(folder: Path) -> str | None:
    """Return why a folder cannot be used as a model: it holds adapters; None if it does not."""
    if not (folder / CONFIG).is_file():
        return None
    return f"{folder} holds adapters, not a model: `coordinator merge {folder} FOLDER` makes one"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what a folder's configuration file says of its adapters. Raises `ValueError`."""
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def explain_other_adapters(folder: Path, adapters: AdaptersConfig) -> str | None:
    """Return why the adapters in a folder cannot begin a run with these settings; None if nothing speaks against it.

    Only trainers know the layers of a model, and compare them.
    """
    try:
        settings = read_settings(folder)
    except ValueError as error:
        return str(error)
    if not (folder / TENSORS).is_file():
        return f"{folder} has no {TENSORS}"
    if settings.get("use_dora") or settings.get("use_rslora") or not _has_one_scale(settings):
        return f"{folder / CONFIG}: these are no plain LoRA adapters (use_dora, use_rslora, alpha_pattern)"
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if rank == adapters.dim and alpha == adapters.alpha:
        return None
    return (
        f"{folder / CONFIG} has r {rank} and lora_alpha {alpha}, the configuration has dim {adapters.dim} and alpha "
        f"{adapters.alpha:g}"
    )


def _has_one_scale(settings: Mapping[str, Any]) -> bool:
    """Tell whether all adapters have one scale: parameters of another rank have another alpha to match."""
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    try:
        scale = settings["lora_alpha"] / settings["r"]
        return ranks.keys() == alphas.keys() and all(alphas[name] == ranks[name] * scale for name in ranks)
    except (KeyError, TypeError, ZeroDivisionError):
        return not ranks and not alphas


def is_adapter(tensor: str) -> bool:
    """Tell by its name whether a tensor belongs to an adapter."""
    return tensor.endswith((f".{A}", f".{B}"))


def make_tensor_name(parameter: str) -> str:
    """Return the usual name of a parameter in a model with adapters; other names are returned unchanged.

    PEFT's layer holds the layer it adapts as ``base_layer``, and its two matrices as ``lora_A.default`` and
    ``lora_B.default``. A module with an adapter of its parameter ``gate_up_proj`` holds ``gate_up_proj_lora_A`` and
    ``gate_up_proj_lora_B`` as well.
    """
    if parameter.endswith(("_lora_A", "_lora_B")):  # of a parameter that is no linear layer's weight
        return f"{parameter[:-7].removesuffix('.weight')}.{parameter[-6:]}.weight"
    return parameter.replace(".base_layer.", ".").replace(".default.weight", ".weight")


def find_layer(tensor: str) -> str:
    """Return the name of the layer that one of an adapter's tensors belongs to."""
    return tensor.removesuffix(f".{A}").removesuffix(f".{B}")


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern is the last part of a layer's name, or matches all of it, with ``*`` for any text."""
    last = layer.rpartition(".")[2]
    return any(pattern == last or fnmatchcase(layer, pattern) for pattern in patterns)


_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
)
"""The projections of an expert in each fused parameter, by the names that checkpoints have for them."""


def choose_layers(
    layers: Sequence[str], adapters: LoraCfg | PeftConfig, section: str, fused: Sequence[str] = ()
) -> list[str]:
    """Return the linear layers of a model that have an adapter, and then the fused parameters.

    A fused parameter is named like a layer, or by all projections in it, as a checkpoint has them. Excluded layers need
    not exist. Raises `ConfigError` if no layer remains, if one of `target_modules` matches none, or if the projections
    of a fused parameter would be treated differently.
    """
    parts = [part for parameter in fused for names in _parts_of(parameter) for part in names[:1]]
    candidates = [*layers, *fused, *parts]
    names = sorted({layer.rpartition(".")[2] for layer in candidates})
    aliases = [part for parameter in fused for names in _parts_of(parameter) for part in names[1:]]
    for pattern in adapters.target_modules:
        if pattern != ALL_LINEAR and not any(matches(layer, [pattern]) for layer in (*candidates, *aliases)):
            hint = f"{nearest(pattern, names)}: there are {', '.join(names)}"
            raise ConfigError(f"{section}.target_modules: no layer is called {pattern!r}{hint}")
    adapted_layers = [
        layer for layer in layers if matches(layer, adapters.patterns) and not matches(layer, adapters.exclude_modules)
    ]
    adapted_layers += [parameter for parameter in fused if _takes(parameter, adapters, section)]
    if not adapted_layers:
        raise ConfigError(f"{section}: no layer is left for an adapter, among {', '.join(names)}")
    return adapted_layers


def count_projections(parameter: str, adapters: LoraCfg | PeftConfig) -> int:
    """Return the number of projections whose ranks add up in the adapter of a fused parameter.

    Where projections are named as a checkpoint has them, or all layers are, each has the rank of the configuration,
    as with PEFT; a parameter that is named itself has that rank as a whole.
    """
    named = [any(matches(name, adapters.patterns) for name in names) for names in _parts_of(parameter)]
    return len(named) if all(named) else 1


def _takes(parameter: str, adapters: LoraCfg | PeftConfig, section: str) -> bool:
    """Tell whether a fused parameter has an adapter. Raises `ConfigError` if only some projections in it would."""
    if matches(parameter, adapters.exclude_modules):
        return False
    parts = _parts_of(parameter)
    is_named = [any(matches(name, adapters.patterns) for name in names) for names in parts]
    is_excluded = [any(matches(name, adapters.exclude_modules) for name in names) for names in parts]
    is_own = matches(parameter, adapters.patterns) and not all(is_named)
    has_some = [(is_own or named) and not excluded for named, excluded in zip(is_named, is_excluded, strict=True)]
    if any(has_some) and not all(has_some):
        adapted, plain = (parts[has_some.index(state)][0].rpartition(".")[2] for state in (True, False))
        raise ConfigError(
            f"{section}: adapters of {adapted} and none of {plain}, but in {parameter} both are one parameter: choose "
            "both or neither"
        )
    return all(has_some)


def _parts_of(parameter: str) -> list[list[str]]:
    """Return the projections in a fused parameter, each with its names."""
    prefix, _, last = parameter.rpartition(".")
    return [[f"{prefix}.{name}" for name in names] for names in _PARTS.get(last, ((last,),))]
