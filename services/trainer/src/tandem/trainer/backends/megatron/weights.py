"""The weights of a Megatron-Core rank: filled from a checkpoint, gathered, laid out for engines.

A checkpoint's safetensors files are read a box at a time; tensors in memory are another source of first weights.

Only `tandem.refit.adapters.megatron` knows the places of tensors. Each piece of a rank's layout is a box of a tensor in
the Hugging Face checkpoint, with its place in a parameter of the rank. Loading reads just those boxes, saving sends
them, and refits copy them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from tandem.common.errors import ModelError
from tandem.config.models import lora
from tandem.config.schema.adapters import AdaptersConfig
from tandem.refit.adapters import catalogue
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.layout import ITEM_SIZES, Box, LayoutPiece, Storage, Tensor
from tandem.refit.weights import Weights, device_name, host_name
from tandem.trainer import exposed_weights

BATCH_BYTES = 2**28
"""Bytes of tensors that are gathered at once. A larger tensor is a batch of its own."""
_ROUTER_BIAS = "router.expert_bias"
"""The bias that balances experts. It is a buffer that training changes and engines need."""


class CheckpointTensors(Protocol):
    """A source of weights: tensors by the names of a Hugging Face checkpoint."""

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        ...


def parameters_of(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return all weights of a rank, by the names in its layout.

    Args:
        chunks: the rank's ``GPTModel``, or one for each virtual stage, in any wrappers.
    """
    parameters: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        module = _unwrapped(chunk)
        parameters |= {f"{prefix}{name}": parameter for name, parameter in module.named_parameters()}
        for name, buffer in module.named_buffers():
            if name.endswith(_ROUTER_BIAS):
                buffer.data = buffer.data.float()  # as Megatron-Core does before it uses one
                parameters[f"{prefix}{name}"] = buffer
    return parameters


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    inner = getattr(chunk, "module", None)
    return _unwrapped(inner) if isinstance(inner, torch.nn.Module) else chunk


class RankWeights:
    """One model's weights on one rank of the default process group.

    Raises `ModelError` if its parameters do not match the layout.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        sizes: Megatron,
        model: ModelShape,
        adapters: AdaptersConfig | None = None,
    ) -> None:
        """Take a model. It has `adapters`, the last of its tensors, or is trained whole."""
        self._chunks = chunks
        self.sizes = sizes
        self._adapters = adapters
        of_adapters = (index for index, tensor in enumerate(model.tensors) if lora.is_adapter(tensor.name))
        self._first = 0 if adapters is None else next(of_adapters)
        parameters = parameters_of(chunks)
        trained = [tensor for tensor in parameters.values() if isinstance(tensor, torch.nn.Parameter)]
        # The parameters may have another dtype than the checkpoint's tensors.
        self._model = model.cast(str(trained[0].dtype).removeprefix("torch."))
        self._layout = sizes.layout(self._model, dist.get_rank(), host_name(), device_name(trained[0].device))
        described = {storage.name: storage.num_bytes for storage in self._layout.storages}
        allocated = {name: tensor.nbytes for name, tensor in parameters.items()}
        for name in sorted(described.keys() | allocated.keys()):
            if described.get(name) != allocated.get(name):
                amounts = [f"{of[name]} bytes" if name in of else "none" for of in (allocated, described)]
                raise ModelError(
                    f"parameter {name}: Megatron-Core has {amounts[0]}, the checkpoint implies {amounts[1]}"
                )

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The live parameters, by the layout's names."""
        return parameters_of(self._chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors from `gathered`, in the precision of the parameters."""
        gathered = self._model.tensors[self._first :]
        return sum(Box((), each.shape).num_elements * ITEM_SIZES[each.dtype] for each in gathered)

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of all adapters, by name; empty without adapters."""
        return {each.name: each.shape for each in self._model.tensors[self._first :]} if self._adapters else {}

    @functools.cached_property
    def pieces(self) -> dict[str, list[tuple[Tensor, LayoutPiece]]]:
        """The pieces in each parameter, with their tensors."""
        pieces: dict[str, list[tuple[Tensor, LayoutPiece]]] = {storage.name: [] for storage in self._layout.storages}
        for row, index in enumerate(self._layout.pieces.tensor_P.tolist()):
            piece = self._layout.piece(row)
            pieces[piece.parameter].append((self._layout.tensors[index], piece))
        return pieces

    def first_holder(self, tensor: str, box: Box) -> int:
        """Return the first rank that holds this box, one of `pieces`. Raises `ModelError`, as `gathered` does."""
        return self._holders[self._model.index[tensor]][box][0]

    @torch.no_grad()
    def load(self, source: CheckpointTensors) -> None:
        """Fill the parameters. The vocabulary's padding, which no tensor covers, becomes zero. Raises `ModelError`."""
        for name, parameter in self.parameters.items():
            if sum(piece.box.num_elements for _, piece in self.pieces[name]) < parameter.numel():
                parameter.zero_()
            for tensor, piece in self.pieces[name]:
                view_of(parameter, piece).copy_(source.read(tensor.name, tensor.shape, piece.box))

    @torch.no_grad()
    def load_adapters(self, source: CheckpointTensors) -> None:
        """Fill the parameters of adapters, and no others. Raises `ModelError`."""
        for name, parameter in self.parameters.items():
            for tensor, piece in self.pieces[name]:
                if lora.is_adapter(tensor.name):
                    view_of(parameter, piece).copy_(source.read(tensor.name, tensor.shape, piece.box))

    @functools.cached_property
    def shared(self) -> Weights:
        """The parameters in their own memory, for engines. On the CPU it becomes shared memory, in place.

        Parameters in one buffer, as in the distributed optimizer, are views of one storage. Wrap the model first:
        engines do not see later changes of the parameters' memory by a wrapper.
        """
        parameters = self.parameters
        exposed_weights.share(parameters)
        storages: dict[int, Storage] = {}
        memories: dict[str, torch.Tensor] = {}
        place_S = []
        for described in self._layout.storages:
            parameter = parameters[described.name].detach()
            memory = parameter.untyped_storage()
            if memory.data_ptr() not in storages:
                address = exposed_weights.address_of(parameter)
                storages[memory.data_ptr()] = Storage(described.name, memory.nbytes(), address)
                buffer = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                memories[described.name] = buffer.set_(memory)
            number = list(storages).index(memory.data_ptr())
            place_S.append((number, parameter.storage_offset() * parameter.element_size()))
        at = self._layout.pieces
        place_PX = np.array(place_S, np.int64).reshape(-1, 2)[at.storage_P]
        pieces = msgspec.structs.replace(at, storage_P=place_PX[:, 0], offset_P=at.offset_P + place_PX[:, 1])
        layout = msgspec.structs.replace(self._layout, storages=tuple(storages.values()), pieces=pieces)
        return Weights(exposed_weights.mark_frozen(layout, self._adapters), memories)

    @torch.no_grad()
    def gathered(self, batch_bytes: int = BATCH_BYTES) -> Iterator[dict[str, torch.Tensor]]:
        """Yield whole tensors by their names in a checkpoint, on the CPU: a batch at a time on rank 0, nothing
        elsewhere.

        For a model with adapters, these are only the adapters' tensors.

        Collective: every rank must go through all of it. Each box goes straight to rank 0 from the first rank that has
        it. Raises `ModelError` on every rank if no rank has a tensor.
        """
        parameters, rank = self.parameters, dist.get_rank()
        for batch, transfers in self._transfers(batch_bytes):
            tensors = {}
            if rank == 0:
                described = [self._model.tensors[index] for index in batch]
                tensors = {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in described}
            for transfer in transfers:
                if transfer.sender == rank:
                    views = [view_of(parameters[piece.parameter], piece) for _, piece in transfer.pieces]
                    flat = torch.cat([view.reshape(-1).view(torch.uint8) for view in views]).cpu()
                    if rank:
                        dist.send(flat, dst=0)
                elif rank == 0:
                    flat = torch.empty(transfer.num_bytes, dtype=torch.uint8)
                    dist.recv(flat, src=transfer.sender)
                if rank == 0:
                    _scatter(flat, transfer, tensors)
            yield tensors

    def _transfers(self, batch_bytes: int) -> Iterator[tuple[range, list[_Transfer]]]:
        """Yield the tensors of each batch, by index, and their transfers; the same on every rank."""
        for batch in _batches(self._model, self._first, batch_bytes):
            by_sender: dict[int, list[tuple[str, LayoutPiece]]] = {}
            for index in batch:
                for sender, piece in self._holders[index].values():
                    by_sender.setdefault(sender, []).append((self._model.tensors[index].name, piece))
            yield batch, [_Transfer(sender, pieces, self._num_bytes(pieces)) for sender, pieces in by_sender.items()]

    def _num_bytes(self, pieces: Sequence[tuple[str, LayoutPiece]]) -> int:
        tensors, index = self._model.tensors, self._model.index
        return sum(piece.box.num_elements * ITEM_SIZES[tensors[index[name]].dtype] for name, piece in pieces)

    @functools.cached_property
    def _holders(self) -> list[dict[Box, tuple[int, LayoutPiece]]]:
        """Disjoint boxes that cover each tensor, each with the first rank that has it."""
        holders: list[dict[Box, tuple[int, LayoutPiece]]] = [{} for _ in self._model.tensors]
        places = set()
        for rank in range(self.sizes.num_ranks):
            if self.sizes.place(rank) in places:
                continue
            places.add(self.sizes.place(rank))
            layout = self.sizes.parameters(self._model, rank)
            for row, index in enumerate(layout.pieces.tensor_P.tolist()):
                piece = layout.piece(row)
                holders[index].setdefault(piece.box, (rank, piece))
        for tensor, boxes in zip(self._model.tensors, holders, strict=True):
            if sum(box.num_elements for box in boxes) != Box((), tensor.shape).num_elements:
                raise ModelError(f"no rank has all of {tensor.name}")
        return holders


class _Transfer(NamedTuple):
    """One rank's transfer for one batch: boxes end to end, row-major, each with the name of its tensor."""

    sender: int
    pieces: Sequence[tuple[str, LayoutPiece]]
    num_bytes: int


def _batches(model: ModelShape, first: int, batch_bytes: int) -> Iterator[range]:
    """Divide the tensors, in order, from a first one on."""
    num_bytes = 0
    for index, tensor in list(enumerate(model.tensors))[first:]:
        size = Box((), tensor.shape).num_elements * ITEM_SIZES[tensor.dtype]
        if index > first and num_bytes + size > batch_bytes:
            yield range(first, index)
            first, num_bytes = index, 0
        num_bytes += size
    yield range(first, len(model.tensors))


def view_of(parameter: torch.Tensor, piece: LayoutPiece) -> torch.Tensor:
    """Return a piece of a contiguous parameter: its memory, in the shape of its box."""
    size = parameter.element_size()
    strides = [stride // size for stride in piece.strides]
    return parameter.detach().as_strided(piece.box.shape, strides, parameter.storage_offset() + piece.offset // size)


def _scatter(flat: torch.Tensor, transfer: _Transfer, tensors: dict[str, torch.Tensor]) -> None:
    """Write received elements into whole tensors."""
    first = 0
    for name, piece in transfer.pieces:
        part = tensors[name][piece.box.region]
        # A copy, because bytes between those of other types need not be aligned.
        part.copy_(flat[first : first + part.nbytes].clone().view(part.dtype).view(part.shape))
        first += part.nbytes


_WEIGHTS = {"F64", "F32", "BF16", "F16"}
"""Dtypes of weights that are not quantised."""


class SafetensorsFolder:
    """The tensors of a checkpoint's safetensors files, which are read only as requested.

    Raises `ModelError` if there are none or they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for file in catalogue.files_of(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._file_of

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self._folder} lacks {name}")
        tensor_slice = self._file_of[name].get_slice(name)
        if tensor_slice.get_dtype() not in _WEIGHTS:
            raise ModelError(
                f"{name} in {self._folder} is quantised ({tensor_slice.get_dtype()}); Megatron-Core trains a "
                "checkpoint in bfloat16, float16 or float32"
            )
        require_shape(name, shape, tensor_slice.get_shape())
        tensor: torch.Tensor = tensor_slice[box.region]
        return tensor


class TensorsInMemory:
    """Whole tensors by the names of a checkpoint."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._tensors

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape. Raises `ModelError`."""
        if name not in self._tensors:
            raise ModelError(f"the model lacks {name}")
        require_shape(name, shape, self._tensors[name].shape)
        return self._tensors[name].detach()[box.region]


class AdapterTensorSource:
    """The whole tensors of adapters, in memory, and those of their base model."""

    def __init__(self, adapters: Mapping[str, torch.Tensor], base: Any) -> None:
        """Join adapters with their `base`, which has the same method `read`."""
        self._adapters, self._own = adapters, TensorsInMemory(adapters)
        self._base = base

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape. Raises `ModelError`."""
        tensor: torch.Tensor = (self._own if name in self._adapters else self._base).read(name, shape, box)
        return tensor


def require_shape(name: str, expected: Sequence[int], actual: Sequence[int]) -> None:
    """Raise `ModelError` unless a checkpoint's tensor has the expected shape."""
    if tuple(expected) != tuple(actual):
        raise ModelError(f"{name} should have shape {tuple(expected)}, the checkpoint has {tuple(actual)}")
