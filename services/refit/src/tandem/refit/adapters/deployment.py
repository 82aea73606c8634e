"""Deployments: all ranks of a parallel program, their hosts, and the layers of pipeline stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.layout import Layout, Storage


class HostNames(msgspec.Struct, frozen=True):
    """Hosts ``name-0``, ``name-1``, ... with `per_host` ranks each, in order of rank."""

    name: str
    per_host: int = 8
    has_gpus: bool = True
    """Whether each rank has a GPU of its own."""
    first: int = 0
    """Number of places that are already taken; rank 0 comes after them."""

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return f"{self.name}-{(self.first + rank) // self.per_host}"

    def device(self, rank: int) -> str:
        """Return a unique name for a rank's device."""
        return f"{self.host(rank)}/gpu-{(self.first + rank) % self.per_host}" if self.has_gpus else "cpu"


def locate(layout: Layout, parameters: Mapping[str, Storage]) -> Layout:
    """Return a layout with the addresses of a process's live parameters.

    Args:
        layout: made by an adapter for this process.
        parameters: contiguous parameters of the process, by name; may include others that hold no tensor.

    Raises:
        RefitError: a parameter is missing or has another size, so the adapter describes another model.

    """
    storages = []
    for storage in layout.storages:
        live = parameters.get(storage.name)
        if live is None or live.num_bytes != storage.num_bytes:
            actual = "no such parameter" if live is None else f"{live.num_bytes} bytes"
            raise RefitError(f"{storage.name} should have {storage.num_bytes} bytes, the process has {actual}")
        storages.append(Storage(storage.name, storage.num_bytes, live.address))
    return msgspec.structs.replace(layout, storages=tuple(storages))


class ParallelDeployment(msgspec.Struct, frozen=True):
    """The parallel sizes of a program; subclasses know what each rank holds."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Number of processes in the program."""

    @abstractmethod
    def place(self, rank: int) -> Hashable:
        """Return a key for what a rank holds; ranks with equal keys are replicas."""

    @abstractmethod
    def parameters(self, model: ModelShape, rank: int) -> Layout:
        """Return a rank's layout without its host."""

    def look_up_parameters(self, model: ModelShape, rank: int) -> Layout:
        """Return `parameters`, made once for all ranks in one place. A model keeps those of one deployment."""
        cache: tuple[ParallelDeployment, dict[Hashable, Layout]] = model.__dict__.setdefault("layouts", (self, {}))
        if cache[0] != self:
            cache = model.__dict__["layouts"] = self, {}
        place = self.place(rank)
        if place not in cache[1]:
            cache[1][place] = self.parameters(model, rank)
        return cache[1][place]

    def layout(self, model: ModelShape, rank: int, host: str, device: str = "cpu") -> Layout:
        """Return the layout of one rank.

        Args:
            model: as the process holds it, with the element types of its parameters.
            rank: in the whole program, counted as its library does.
            host: where the process runs.
            device: UUID of its GPU, or ``cpu``.

        Raises:
            RefitError: there is no such rank, or the model cannot be split this way.

        """
        if not 0 <= rank < self.num_ranks:
            raise RefitError(f"there is no rank {rank} among {self.num_ranks}")
        return msgspec.structs.replace(self.parameters(model, rank), host=host, device=device)

    def layouts(self, model: ModelShape, hosts: HostNames) -> tuple[Layout, ...]:
        """Return the layouts of all ranks, in order of rank; replicas share the columns of their pieces.

        Raises:
            RefitError: as for `layout`, or the adapter does not know where some tensor goes.

        """
        layouts = []
        is_held = np.zeros(len(model.tensors), np.bool_)
        for rank in range(self.num_ranks):
            layout = self.look_up_parameters(model, rank)
            layouts.append(msgspec.structs.replace(layout, host=hosts.host(rank), device=hosts.device(rank)))
        for pieces in {id(layout.pieces): layout.pieces for layout in layouts}.values():
            is_held[pieces.tensor_P] = True
        if not is_held.all():
            lost = model.tensors[int(np.argmin(is_held))].name
            raise RefitError(f"{type(self).__name__} has no place for {(~is_held).sum()} tensors, the first is {lost}")
        return tuple(layouts)


def _split_by_counts(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of consecutive stages with the given numbers of layers."""
    ends = list(accumulate(counts))
    return tuple(range(end - n, end) for end, n in zip(ends, counts, strict=True))


def list_vllm_stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Return the layers of each of vLLM's stages, without ``VLLM_PP_LAYER_PARTITION``.

    Remaining layers go to the stages before the last, starting from the back.
    """
    counts = [num_layers // pp] * pp
    for stage in range(num_layers % pp):
        counts[-2 - stage] += 1
    return _split_by_counts(counts)


def list_megatron_stages(
    num_layers: int, pp: int, vpp: int, in_first: int | None = None, in_last: int | None = None
) -> tuple[tuple[range, ...], ...]:
    """Return the layers of each chunk of each Megatron-Core stage: ``[stage][chunk]``.

    Args:
        num_layers: of the model.
        pp: number of stages.
        vpp: number of chunks per stage, interleaved: layers fill chunk 0 of all stages, then chunk 1, and so on.
        in_first: layers of the first stage, all chunks together; None for as many as the middle stages.
        in_last: layers of the last stage; None likewise.

    Raises:
        RefitError: the layers do not divide this way.

    """
    num_middle_layers = num_layers - (in_first or 0) - (in_last or 0)
    middle = pp - (in_first is not None) - (in_last is not None)
    if num_middle_layers < 0 or middle < 0 or (num_middle_layers % middle if middle else num_middle_layers):
        raise RefitError(f"{num_middle_layers} layers cannot be split evenly over {middle} pipeline stages")
    counts = [num_middle_layers // middle] * middle if middle else []
    counts = [*([] if in_first is None else [in_first]), *counts, *([] if in_last is None else [in_last])]
    if any(n % vpp for n in counts):
        raise RefitError(f"stages of {counts} layers cannot be split evenly into {vpp} chunks each")
    in_order = _split_by_counts([n // vpp for n in counts] * vpp)
    return tuple(tuple(in_order[chunk * pp + stage] for chunk in range(vpp)) for stage in range(pp))
