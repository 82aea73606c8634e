"""The policy as Hugging Face's files, written in parts: configuration, weights, carried tensors.

Transformers leaves some tensors in the files: multi-token prediction layers, which others serve with (``mtp.*``,
``model.layers.61.*`` of DeepSeek-V3), or the tower of a model whose text part is trained. An export without them would
have lost them. They are copied from file to file, one at a time.

Transformers 5 has other names for some settings than Transformers 4, which reads its files without error but wrongly:
the base of rotary embeddings, `rope_theta`, would be the default.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from tandem.config.models.hf_config import load_config
from tandem.config.models.model_sizes import local_folder
from tandem.refit.adapters import catalogue
from tandem.samples.unchanged_files import copy_generation_config
from tandem.trainer.exposed_weights import gather_whole
from tandem.trainer.files.box_files import digests_of
from tandem.trainer.models import decoder_layers

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SCALES = "_scale_inv"
_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+\.")
_CONFIG = "config.json"
_OF_WHOLE = ("architectures", "dtype", "transformers_version", "_name_or_path")
"""Settings that the whole of a model has, and a part of it does not need."""


def save_config(config: Any, folder: Path) -> Path | None:
    """Write a configuration of Transformers so that Transformers 4 reads it too.

    Return the folder that it was read from; None if there is none. Raises the errors of the library and of the system.
    """
    config.save_pretrained(folder)
    written = json.loads((folder / _CONFIG).read_text())
    source = Path(config.name_or_path or folder)
    if not (source / _CONFIG).is_file() or source.resolve() == folder.resolve():
        settings, source_folder = _add_older_names(written, config.attribute_map), None
    else:
        source_settings = json.loads((source / _CONFIG).read_text())
        same = json.loads(load_config(str(source), None).to_json_string())
        settings, source_folder = _apply_to_source(source_settings, same, written), source
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return source_folder


def _apply_to_source(
    original: Mapping[str, Any], source: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return given settings with what differs, which may be of the text part alone of a vision model."""
    text = source.get("text_config")
    if (
        not isinstance(text, dict)
        or not isinstance(original.get("text_config"), dict)
        or not written.get("model_type") == text.get("model_type") != source.get("model_type")
    ):
        return _apply_changes(original, source, written)
    part = {key: value for key, value in written.items() if key not in _OF_WHOLE}
    settings = {**original, "text_config": _apply_changes(original["text_config"], text, part)}
    for key in ("dtype", "torch_dtype"):
        if key in original and "dtype" in written:
            settings[key] = written["dtype"]
    return settings


def _apply_changes(
    original: Mapping[str, Any], source: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return given settings with what differs between two forms that Transformers has written."""
    settings = dict(original)
    for key in source.keys() | written.keys():
        forms = (original.get(key), source.get(key), written.get(key))
        if key in source and key in written and source[key] == written[key]:
            continue
        if key not in written:
            settings.pop(key, None)
        elif all(isinstance(form, dict) for form in forms):
            settings[key] = _apply_changes(original[key], source[key], written[key])
        elif key == "dtype" and "dtype" not in original:
            settings["torch_dtype"] = written[key]
        else:
            settings[key] = written[key]
    return settings


def _add_older_names(written: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with the names that Transformers 4 has for some of them, besides those of Transformers 5.

    `names` are those of settings by the names that a type has for them too, such as ``num_experts`` of Qwen3-MoE.
    """
    settings = {alias: written[name] for alias, name in names.items() if name in written} | dict(written)
    if "dtype" in written:
        settings["torch_dtype"] = written["dtype"]
    rope = written.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            settings["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return settings


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


def gathered(model: Any, parameters: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield on rank 0 the whole tensors of each decoder layer, and of the rest; nothing elsewhere.

    They are on the CPU, in memory of their own, and include the model's persistent buffers. Collective for sharded
    parameters: every rank must go through all of it.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    layers = {id(layer) for layer in decoder_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in {**parameters, **saved_buffers(model)}.items():
        group = next((prefix for prefix in prefixes if name.startswith(prefix)), name)
        if name not in ignored:
            groups.setdefault(group, {})[name] = tensor
    for tensors in groups.values():
        copies = {}
        for name, tensor in tensors.items():
            whole_tensor = gather_whole(tensor)
            if dist.get_rank() == 0:
                copies[name] = whole_tensor.to("cpu", copy=True)
        yield copies


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint has beside the parameters, such as the biases of routers."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def convert_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors as in Hugging Face's checkpoints; they may be views.

    Args:
        model: model that gives the tensors their names.
        tensors: the tensors. Those that a checkpoint may join into one must be together, and one that it may split
            whole.
    """
    return dict(revert_weight_conversion(model, dict(tensors)))


class PolicyWriter:
    """Writes one model, file after file, and then an index, unless one file holds it all.

    Memory holds the tensors of one file, of `max_file_bytes` unless one decoder layer is larger. The model is only read
    when the writer is made, so it may train while another thread writes.
    """

    def __init__(self, folder: Path, model: Any, max_file_bytes: int, source: str = "") -> None:
        """Write to `folder`. What the model does not load comes from `source`, or from where it was loaded."""
        self._folder = folder
        self._carried = CarriedTensors(model, (source, model.config.name_or_path or ""))
        self._max_file_bytes = max_file_bytes
        self._config = copy.deepcopy(model.config)
        self._config.dtype = str(model.dtype).removeprefix("torch.")
        self._config.architectures = [type(model).__name__.removeprefix("FSDP")]
        self._generation_config = copy.deepcopy(model.generation_config) if model.can_generate() else None
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[dict[str, str]] = []
        """Digests of the tensors of each written file."""
        self._total_bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take whole tensors by the names of Hugging Face's checkpoints."""
        for name, tensor in tensors.items():
            if self._waiting and self._waiting_bytes + tensor.nbytes > self._max_file_bytes:
                self._write()
            self._waiting[name] = tensor.contiguous()
            self._waiting_bytes += tensor.nbytes

    def finish(self) -> dict[Path, dict[str, str]]:
        """Write the last file, the index, and the model's configuration. Raises what the libraries raise.

        Return the files of tensors with their digests.
        """
        trained = {*self._waiting, *(name for file in self._files for name in file)}
        for name, tensor in self._carried.read(trained):
            self.add({name: tensor})
        self._write()
        names = [_WHOLE]
        if len(self._files) == 1:
            self._path(1).rename(self._folder / _WHOLE)
        else:
            names = [f"model-{number:05d}-of-{len(self._files):05d}.safetensors" for number in self._numbers()]
            for number, name in zip(self._numbers(), names, strict=True):
                self._path(number).rename(self._folder / name)
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        source = save_config(self._config, self._folder)
        if self._generation_config is not None and not (source and copy_generation_config(source, self._folder)):
            self._generation_config.save_pretrained(self._folder)
        return {self._folder / name: digests for name, digests in zip(names, self._files, strict=True)}

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files.append(digests_of(self._waiting))
        save_file(self._waiting, self._path(len(self._files)), metadata={"format": "pt"})
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _numbers(self) -> range:
        return range(1, len(self._files) + 1)

    def _path(self, number: int) -> Path:
        """Return a file's path until the number of files is known."""
        return self._folder / f"part-{number:05d}"
