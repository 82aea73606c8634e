"""Adapters in PEFT's files: ``adapter_model.safetensors`` beside ``adapter_config.json``.

``PeftModel.from_pretrained(base, folder)`` reads them. The tensors have the names of `tandem.config.models.lora`, after
a prefix.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tandem.common.errors import CheckpointError
from tandem.config.models import hub
from tandem.config.models.lora import CONFIG, A, find_layer
from tandem.config.schema.adapters import AdaptersConfig, LoraCfg, PeftConfig
from tandem.trainer.exposed_weights import gather_whole
from tandem.trainer.files.box_files import digests_of

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


if TYPE_CHECKING:
    from peft import LoraConfig


_RENAMED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of names that PEFT takes for those of routed experts, in any layer of a model that has experts."""


class AdapterDescription(msgspec.Struct, frozen=True):
    """The description of adapters for PEFT."""

    base: str
    """Folder or Hub name of the model that they belong to."""
    adapters: AdaptersConfig
    layers: Sequence[str]
    """Names of the layers with an adapter."""
    linear: Sequence[str]
    """Names of all layers that could have an adapter."""
    has_experts: bool
    """Whether the model has routed experts."""

    @property
    def target_modules(self) -> list[str]:
        """The shortest names that fit these layers and no others. Other programs expect the last parts."""
        layers = set(self.layers) - set(self._renamed)
        last = {name.rpartition(".")[2] for name in layers}
        fitting = {name for name in self.linear if name.rpartition(".")[2] in last}
        return sorted(last if fitting == layers else layers)

    @property
    def target_parameters(self) -> list[str]:
        """The weights of layers that PEFT finds only by these names. An adapter is the same either way."""
        return [f"{layer}.weight" for layer in self._renamed]

    @property
    def _renamed(self) -> list[str]:
        return [layer for layer in self.layers if self.has_experts and layer.rpartition(".")[2] in _RENAMED]


def first_values(name: str, shape: tuple[int, ...], adapters: LoraCfg | PeftConfig, seed: int) -> torch.Tensor:
    """Return the first values of an adapter's tensor, which are the same on every rank."""
    initial = adapters.initial[0] if name.endswith(A) else adapters.initial[1]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    tensor = torch.zeros(shape, dtype=torch.float32)
    match initial:
        case "xavier":
            torch.nn.init.xavier_normal_(tensor, generator=generator)
        case "kaiming":
            torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        case "normal":
            torch.nn.init.normal_(tensor, std=0.2, generator=generator)
        case "zero":
            pass
    return tensor


def change_start(adapters: LoraCfg | PeftConfig) -> bool:
    """Tell whether new or restored adapters make the policy that training starts from another than the bare model."""
    return adapters.restore_from is not None or adapters.initial[1] != "zero"


def settings_of(adapters: AdaptersConfig, layers: Sequence[str], **about: Any) -> LoraConfig:
    """Return PEFT's description of adapters of these layers; `about` has its other arguments."""
    from peft import LoraConfig  # takes seconds

    alpha: Any = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
    return LoraConfig(r=adapters.dim, lora_alpha=alpha, target_modules=list(layers), **about)


def gathered(parameters: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the whole tensors at once on rank 0, and nothing elsewhere. Collective for sharded parameters."""
    wholes = {name: gather_whole(parameter) for name, parameter in parameters.items()}
    is_first = dist.get_rank() == 0
    yield {name: tensor.to("cpu", copy=True) for name, tensor in wholes.items()} if is_first else {}


class AdapterWriter:
    """Writes adapters to one file. The base model is not read."""

    def __init__(self, folder: Path, described: AdapterDescription) -> None:
        self._folder, self._described = folder, described
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take whole tensors by the names that they have everywhere."""
        self._tensors |= {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}

    def finish(self) -> dict[Path, dict[str, str]]:
        """Write both files; return the file of tensors with their digests. Raises the libraries' errors."""
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, self._folder / TENSORS, metadata={"format": "pt"})
        described = self._described
        on_hub = hub.find_cached_name(described.base)
        parameters = described.target_parameters
        settings_of(
            described.adapters,
            described.target_modules,
            target_parameters=parameters or None,
            lora_dropout=0.0 if parameters else described.adapters.dropout,  # PEFT has no dropout for parameters
            task_type="CAUSAL_LM",
            base_model_name_or_path=described.base if on_hub is None else on_hub.repo,
            revision=None if on_hub is None else on_hub.revision,
            inference_mode=True,
        ).save_pretrained(str(self._folder))
        return {self._folder / TENSORS: digests_of(self._tensors)}


def base_of(folder: Path) -> str:
    """Return the model that a folder's adapters belong to. Raises `CheckpointError`."""
    settings = _settings_of(folder)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{folder / CONFIG} does not name the model that its adapters belong to")
    return f"{base}@{revision}" if isinstance(revision, str) and not Path(base).exists() else base


def read(folder: Path, adapters: AdaptersConfig, shapes: Mapping[str, Iterable[int]]) -> dict[str, torch.Tensor]:
    """Return the tensors in a folder, which must be of adapters like these, with these shapes.

    Raises `CheckpointError`.
    """
    settings = _settings_of(folder)
    rank = settings.get("r")
    if settings.get("use_dora") or settings.get("use_rslora") or settings.get("alpha_pattern"):
        raise CheckpointError(
            f"{folder / CONFIG}: these are no plain LoRA adapters (use_dora, use_rslora, alpha_pattern)"
        )
    if rank != adapters.dim or settings.get("lora_alpha") != adapters.alpha:
        raise CheckpointError(
            f"{folder / CONFIG} has r {rank} and lora_alpha {settings.get('lora_alpha')}, the configuration has dim "
            f"{adapters.dim} and alpha {adapters.alpha:g}"
        )
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = {name.removeprefix(_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / TENSORS} cannot be read: {error}") from error
    different = sorted(tensors.keys() ^ shapes.keys())
    if different:
        mismatch = "the adapters here have none" if different[0] in tensors else "the folder has none"
        raise CheckpointError(f"{folder}: adapters of other layers: of {find_layer(different[0])} {mismatch}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, the model's {tuple(shapes[name])}"
            )
    return tensors


def _settings_of(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}
