"""Adapters in PEFT's files: ``adapter_model.safetensors`` beside ``adapter_config.json``.

``PeftModel.from_pretrained(base, folder)`` reads them. The tensors have the names of `tandem.config.models.lora`, after
a prefix.
"""

from __future__ import annotations

import hashlib
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
from tandem.config.models.lora import CONFIG, TENSORS, A, B, explain_other_adapters, find_layer, read_settings
from tandem.config.schema.adapters import AdaptersConfig, LoraCfg, PeftConfig
from tandem.trainer.exposed_weights import gather_whole
from tandem.trainer.files.box_files import digests_of

_PREFIX = "base_model.model."


if TYPE_CHECKING:
    from peft import LoraConfig


class FusedAdapter(msgspec.Struct, frozen=True):
    """The adapter of a fused parameter of routed experts."""

    parameter: str
    """Name of the parameter, such as ``model.layers.0.mlp.experts.gate_up_proj``."""
    num_experts: int
    rank: int
    is_transposed: bool = False
    """Whether the parameter is ``[experts, in, out]``: its rows are inputs."""

    def convert_to_peft(self, kind: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return a tensor of an adapter of this parameter as PEFT has it in a file, with its kind there.

        PEFT has the ranks of all experts in one dimension: ``lora_A`` of shape ``[experts * rank, in]``, in which an
        expert's follow each other, and ``lora_B`` of shape ``[out, rank * experts]``, in which they do not.
        """
        if self.is_transposed:
            kind, tensor = B if kind == A else A, tensor.transpose(1, 2)
        if kind == A:
            return kind, tensor.reshape(-1, tensor.shape[-1])
        return kind, tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1)

    def convert_from_peft(self, kind: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return a tensor of PEFT's file as `convert_to_peft` takes it. Raises `CheckpointError`."""
        if tensor.dim() != 2 or tensor.shape[0 if kind == A else 1] != self.num_experts * self.rank:
            raise CheckpointError(
                f"{self.parameter} has adapters of rank {self.rank} for {self.num_experts} experts, and its {kind} in "
                f"the file has shape {tuple(tensor.shape)}"
            )
        if kind == A:
            matrices = tensor.view(self.num_experts, self.rank, -1)
        else:
            matrices = tensor.view(-1, self.rank, self.num_experts).permute(2, 0, 1)
        return (B if kind == A else A, matrices.transpose(1, 2)) if self.is_transposed else (kind, matrices)


_RENAMED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of names that PEFT takes for those of routed experts, in any layer of a model that has experts."""


class AdapterDescription(msgspec.Struct, frozen=True):
    """The description of adapters for PEFT."""

    base: str
    """Folder or Hub name of the model that they belong to."""
    adapters: AdaptersConfig
    layers: Sequence[str]
    """Names of the layers with an adapter, routers among them."""
    linear: Sequence[str]
    """Names of all linear layers that could have an adapter."""
    has_experts: bool
    """Whether the model has routed experts."""
    experts: Sequence[FusedAdapter] = ()
    """Fused parameters with an adapter, those of a module in its order."""
    fused: Sequence[str] = ()
    """Names of all fused parameters that could have an adapter."""
    routers: Sequence[str] = ()
    """Names of all routers."""

    @property
    def target_modules(self) -> list[str]:
        """The shortest names that fit these layers and no others. Other programs expect the last parts."""
        layers = set(self.layers) - set(self._renamed)
        last = {name.rpartition(".")[2] for name in layers}
        fitting = {name for name in self.linear if name.rpartition(".")[2] in last}
        return sorted(last if fitting == layers else layers)

    @property
    def target_parameters(self) -> list[str]:
        """The parameters of experts, and the weights of layers that PEFT finds only by these names."""
        adapted = {expert.parameter for expert in self.experts}
        last = {name: ".".join(name.rsplit(".", 3)[1:]) for name in self.fused}
        short = {last[name] for name in adapted}
        fitting = {name for name in self.fused if last[name] in short}
        names = sorted(short if fitting == adapted else adapted)
        return [*(f"{layer}.weight" for layer in self._renamed), *names]

    @property
    def patterns(self) -> dict[str, dict[str, Any]]:
        """PEFT's ``rank_pattern`` and ``alpha_pattern`` for parameters with another rank; the scale is the same."""
        multiples = {
            rf".*\.experts\.{adapter.parameter.rpartition('.')[2]}": adapter.rank // self.adapters.dim
            for adapter in self.experts
            if adapter.rank != self.adapters.dim
        }
        alpha = _as_number(self.adapters.alpha)
        return {
            "rank_pattern": {name: self.adapters.dim * number for name, number in multiples.items()},
            "alpha_pattern": {name: alpha * number for name, number in multiples.items()},
        }

    @property
    def _renamed(self) -> list[str]:
        names = _RENAMED if self.has_experts else ()
        return [layer for layer in self.layers if layer.rpartition(".")[2] in names or layer in self.routers]

    def convert_to_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole tensors as PEFT's file has them, by its names."""
        named, layers = {}, self._layers_in_file
        for name, tensor in tensors.items():
            parameter, kind, named_tensor = find_layer(name), A if name.endswith(A) else B, tensor
            layer = parameter
            if parameter in layers:
                described, layer = layers[parameter]
                kind, named_tensor = described.convert_to_peft(kind, tensor)
            named[f"{_PREFIX}{layer}.{kind}"] = named_tensor.contiguous()
        return named

    def convert_from_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of PEFT's file by the names that they have everywhere. Raises `CheckpointError`."""
        of_layers = {layer: described for described, layer in self._layers_in_file.values()}
        named = {}
        for name, tensor in tensors.items():
            layer = find_layer(name.removeprefix(_PREFIX))
            if layer in of_layers:
                kind, matrices = of_layers[layer].convert_from_peft(A if name.endswith(A) else B, tensor)
                named[f"{of_layers[layer].parameter}.{kind}"] = matrices
            else:
                named[name.removeprefix(_PREFIX)] = tensor
        return named

    @property
    def _layers_in_file(self) -> dict[str, tuple[FusedAdapter, str]]:
        """Return each fused parameter's adapter, and its layer in PEFT's model.

        PEFT wraps a module once for each of its parameters: the first is the innermost.
        """
        by_module: dict[str, list[FusedAdapter]] = {}
        for adapter in self.experts:
            by_module.setdefault(adapter.parameter.rpartition(".")[0], []).append(adapter)
        return {
            adapter.parameter: (adapter, module + ".base_layer" * (len(adapters) - 1 - place))
            for module, adapters in by_module.items()
            for place, adapter in enumerate(adapters)
        }


def first_values(
    name: str, shape: tuple[int, ...], adapters: LoraCfg | PeftConfig, seed: int, *, is_transposed: bool = False
) -> torch.Tensor:
    """Return the first values of an adapter's tensor, which are the same on every rank.

    Each expert's matrix is initialised by itself. In a transposed adapter, ``B`` is the first of the two matrices.
    """
    initial = adapters.initial[0] if name.endswith(A) != is_transposed else adapters.initial[1]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    if is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    values = torch.zeros(shape, dtype=torch.float32)
    for matrix in values.view(-1, *shape[-2:]):
        _initialise(matrix, initial, generator)
    return values.transpose(-2, -1) if is_transposed else values


def _initialise(tensor: torch.Tensor, initial: str, generator: torch.Generator) -> None:
    match initial:
        case "xavier":
            torch.nn.init.xavier_normal_(tensor, generator=generator)
        case "kaiming":
            torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        case "normal":
            torch.nn.init.normal_(tensor, std=0.2, generator=generator)
        case "zero":
            pass


def change_start(adapters: LoraCfg | PeftConfig) -> bool:
    """Tell whether new or restored adapters make the policy that training starts from another than the bare model."""
    return adapters.restore_from is not None or adapters.initial[1] != "zero"


def settings_of(adapters: AdaptersConfig, layers: Sequence[str], **about: Any) -> LoraConfig:
    """Return PEFT's description of adapters of these layers; `about` has its other arguments."""
    from peft import LoraConfig  # takes seconds

    return LoraConfig(r=adapters.dim, lora_alpha=_as_number(adapters.alpha), target_modules=list(layers), **about)


def _as_number(alpha: float) -> Any:
    """Return a number as PEFT's files have it: a whole one without a point."""
    return int(alpha) if alpha == int(alpha) else alpha


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
        self._tensors |= self._described.convert_to_file(tensors)

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
            **described.patterns,
            base_model_name_or_path=described.base if on_hub is None else on_hub.repo,
            revision=None if on_hub is None else on_hub.revision,
            inference_mode=True,
        ).save_pretrained(str(self._folder))
        return {self._folder / TENSORS: digests_of(self._tensors)}


def base_of(folder: Path) -> str:
    """Return the model that a folder's adapters belong to. Raises `CheckpointError`."""
    try:
        settings = read_settings(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{folder / CONFIG} does not name the model that its adapters belong to")
    return f"{base}@{revision}" if isinstance(revision, str) and not Path(base).exists() else base


def read(folder: Path, described: AdapterDescription, shapes: Mapping[str, Iterable[int]]) -> dict[str, torch.Tensor]:
    """Return the tensors in a folder, which must be of adapters like these, with these shapes.

    Raises `CheckpointError`.
    """
    if (problem := explain_other_adapters(folder, described.adapters)) is not None:
        raise CheckpointError(problem)
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = described.convert_from_file({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
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
