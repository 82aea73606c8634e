"""Tensors of a checkpoint that a model does not load, carried over to its exports as they are.

Transformers leaves some tensors in the files: multi-token prediction layers, which others serve with (``mtp.*``,
``model.layers.61.*`` of DeepSeek-V3), or the tower of a model whose text part is trained. An export without them would
have lost them. They are copied from file to file, one at a time.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from tandem.config.models.hf_config import load_config
from tandem.config.models.model_sizes import local_folder
from tandem.refit.adapters import catalogue

_SCALES = "_scale_inv"
_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+\.")


class CarriedTensors:
    """The tensors of a model's source that the model does not load."""

    def __init__(self, model: Any, sources: Iterable[str]) -> None:
        """Look for them in the first of `sources` that is on this machine: folders, or names of the Hub.

        The model is only read here. Raises `ModelError` if a file cannot be read.
        """
        self._places: dict[str, catalogue.TensorPlace] = {}
        self.source: Path | None = None
        self._dtype = model.dtype
        self._block: tuple[int, int] | None = None
        """Rows and columns that share a scale in the source; None if it is not quantised."""
        if model.get_output_embeddings() is None:  # another head takes the place of what the source has
            return
        folders = (folder for source in sources if source and (folder := local_folder(source)) is not None)
        self.source = next((folder for folder in folders if any(folder.glob("*.safetensors"))), None)
        if self.source is None:
            return
        places = catalogue.read_places(self.source)
        unloaded = list_unloaded(model, places)
        if not unloaded:
            return
        settings = load_config(str(self.source), None)
        unloaded = _leave_layers_out(unloaded, model.config.get_text_config(), settings.get_text_config())
        if (quantised := getattr(settings, "quantization_config", None)) is not None:
            unloaded = [name for name in unloaded if name.removesuffix(_SCALES) in unloaded]
            block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
            if block is None:  # they cannot be read next to weights that are not quantised
                unloaded = []
            else:
                self._block = int(block[0]), int(block[1])
        self._places = {name: places[name] for name in unloaded}

    def read(self, trained: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them by name, each as it is in its file. Raises the library's errors.

        Names of `trained` are left out: a model may load a tensor in another way than its rules of renaming say. Those
        of a quantised source are dequantised like its other weights, since an export is not quantised.
        """
        places = {name: place for name, place in self._places.items() if name.removesuffix(_SCALES) not in trained}
        if places:
            _announce(str(self.source), tuple(places))
        for path in sorted({place.path for place in places.values()}):
            with safe_open(path, framework="pt") as file:
                for name, place in places.items():
                    if place.path == path and not (self._block and name.endswith(_SCALES)):
                        yield name, self._dequantise(name, file.get_tensor(name))

    def _dequantise(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor times the scales of its blocks, if it has any."""
        place = self._places.get(f"{name}{_SCALES}")
        if self._block is None or place is None:
            return tensor
        with safe_open(place.path, framework="pt") as file:
            scales = file.get_tensor(f"{name}{_SCALES}").float()
        rows, columns = self._block
        scales_of_elements = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        dequantised: torch.Tensor = (tensor.float() * scales_of_elements[: tensor.shape[0], : tensor.shape[1]]).to(
            self._dtype
        )
        return dequantised


def list_unloaded(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of a checkpoint's tensors, in order, that a model of Transformers does not load, by its own rules.

    The model may be without weights, and sharded.
    """
    loaded: Mapping[str, Any] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    conversions = getattr(model, "_weight_conversions", None)
    conversions = copy.deepcopy(conversions) if conversions else get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    prefix = model.base_model_prefix
    return [name for name in names if rename_source_key(name, renamings, converters, prefix, loaded)[0] not in loaded]


def _leave_layers_out(names: Sequence[str], settings: Any, source: Any) -> list[str]:
    """Return names without those of layers that the configuration of a run has taken from its model."""
    removed = range(settings.num_hidden_layers, source.num_hidden_layers)
    layers = {name: _LAYER.search(name) for name in names}
    return [name for name, layer in layers.items() if layer is None or int(layer[1]) not in removed]


@functools.cache
def _announce(source: str, names: tuple[str, ...]) -> None:
    """Say once what exports have of a source without training it."""
    kinds = sorted({_NUMBER.sub(".*.", name) for name in names})
    more = f" and {len(kinds) - 1} more kinds" if len(kinds) > 1 else ""
    print(f"exports have {len(names)} tensors of {source} as they are: {kinds[0]}{more}", flush=True)
