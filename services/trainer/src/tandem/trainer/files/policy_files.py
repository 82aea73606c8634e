"""The policy as Hugging Face's safetensors files, gathered and written a part at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from tandem.samples.unchanged_files import copy_generation_config
from tandem.trainer.exposed_weights import gather_whole
from tandem.trainer.files import model_folder
from tandem.trainer.files.box_files import digests_of
from tandem.trainer.files.carried_tensors import CarriedTensors
from tandem.trainer.models import decoder_layers

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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
        source = model_folder.save_config(self._config, self._folder)
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
