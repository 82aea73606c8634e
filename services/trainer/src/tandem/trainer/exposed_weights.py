"""The layout of a rank's parameters, and the memory in which engines read them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.common.errors import ModelError
from tandem.config.models import lora
from tandem.config.schema.adapters import AdaptersConfig
from tandem.refit.adapters.huggingface import as_checkpoint
from tandem.refit.layout import Address, Box, Layout, LayoutBuilder, Storage
from tandem.refit.transports import cuda_ipc, shm
from tandem.refit.weights import Weights, device_name, host_name

_SHARED_MEMORY = "/dev/shm"
_COPY = "the copy of the weights that engines read while trainers step"
_WITHOUT = " (refit.keep_copy: off needs none)"


def box_of(parameter: torch.Tensor) -> Box:
    """Return the part of the global tensor that this rank holds; a box without elements if none."""
    if not isinstance(parameter, DTensor):  # whole: on the only rank there is, or a buffer
        return Box(start=(0,) * parameter.dim(), shape=tuple(parameter.shape))
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(start=tuple(start), shape=tuple(shape))


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter: its memory, not a copy, without gradient."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a parameter, or of a number computed from several, without gradient. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def share(parameters: Mapping[str, torch.Tensor]) -> None:
    """Move every shard into shared memory, in place, for good.

    This is for the CPU only: other processes open GPU memory without a move. Raises `ModelError` if the machine's
    shared memory is too small. Otherwise the first write would end the process with a bus error.
    """
    locals_ = [local_of(parameter) for parameter in parameters.values()]
    locals_ = [local for local in locals_ if local.numel() and local.device.type == "cpu"]
    if not locals_:
        return
    storages = {local.untyped_storage().data_ptr(): local.untyped_storage().nbytes() for local in locals_}
    _check_shared_memory("the parameters need", sum(storages.values()))
    for local in locals_:
        shm.share(local)


def copy_of(weights: Weights) -> Weights:
    """Return weights of the same layout in other memory of the same kind, which `Weights.refresh` copies into.

    Weights that never change stay in place. Raises `ModelError`, which names the configuration key, if memory has no
    room.
    """
    frozen = _frozen(weights.layout)
    changing = {name: storage for name, storage in weights.storages.items() if name not in frozen}
    on_cpu = [storage.nbytes for storage in changing.values() if storage.device.type == "cpu"]
    _check_shared_memory(f"{_COPY} needs", sum(on_cpu), _WITHOUT)
    copies = {name: _allocated_like(storage) for name, storage in changing.items()}
    storages = {**weights.storages, **copies}
    described = (
        Storage(each.name, each.num_bytes, address_of(copies[each.name])) if each.name in copies else each
        for each in weights.layout.storages
    )
    layout = msgspec.structs.replace(weights.layout, storages=tuple(described))
    return Weights(layout, storages, live=weights.storages)


def _frozen(layout: Layout) -> set[str]:
    """Return the storages that hold only tensors that never change."""
    holds: dict[str, bool] = {}
    for tensor, storage in zip(layout.pieces.tensor_P.tolist(), layout.pieces.storage_P.tolist(), strict=True):
        name = layout.storages[storage].name
        holds[name] = holds.get(name, True) and layout.tensors[tensor].is_frozen
    return {name for name, is_frozen in holds.items() if is_frozen}


def _allocated_like(storage: torch.Tensor) -> torch.Tensor:
    """Return as much empty memory of the same kind. On the CPU it is shared at once, not moved later."""
    try:
        if storage.device.type == "cpu":
            memory = torch.UntypedStorage._new_using_fd_cpu(storage.nbytes)
            return torch.empty(0, dtype=storage.dtype).set_(memory)
        return torch.empty_like(storage)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        need = f"{_COPY} needs {storage.nbytes / 2**20:.0f} MiB more on {storage.device}{_WITHOUT}"
        raise ModelError(f"{need}: {str(error).splitlines()[0]}") from error


def _check_shared_memory(purpose: str, num_bytes: int, otherwise: str = "") -> None:
    """Raise `ModelError` if the machine's shared memory is too small."""
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if num_bytes > free:
        needed = f"{num_bytes / 2**20:.0f} MiB of {_SHARED_MEMORY}, where {free / 2**20:.0f} MiB are free"
        raise ModelError(f"{purpose} {needed}{otherwise}")


def weights_of(parameters: Mapping[str, torch.Tensor], adapters: AdaptersConfig | None = None) -> Weights:
    """Describe this rank's shards in their own memory. With adapters, only these are trained. Call `share` first."""
    devices = {local_of(parameter).device for parameter in parameters.values()}
    builder = LayoutBuilder(host_name(), device_name(devices.pop()))
    storages: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        local, box = local_of(parameter), box_of(parameter)
        index = builder.tensor(name, parameter.shape, str(local.dtype).removeprefix("torch."))
        if box.num_elements:
            size = local.element_size()
            strides = [stride * size for stride in local.stride()]
            memory = local.untyped_storage()
            storage = builder.storage(name, memory.nbytes(), address_of(local))
            builder.add(index, box, storage, int(local.storage_offset()) * size, strides)
            storages[name] = torch.empty(0, dtype=local.dtype, device=local.device).set_(memory)
    return Weights(mark_frozen(as_checkpoint(builder.build()), adapters), storages)


def mark_frozen(layout: Layout, adapters: AdaptersConfig | None) -> Layout:
    """Return a layout that marks the tensors that never change, because only adapters are trained."""
    if adapters is None:
        return layout
    tensors = (
        msgspec.structs.replace(tensor, product_scale=adapters.scale if tensor.name.endswith(lora.B) else 0.0)
        if lora.is_adapter(tensor.name)
        else msgspec.structs.replace(tensor, is_frozen=True)
        for tensor in layout.tensors
    )
    return msgspec.structs.replace(layout, tensors=tuple(tensors))


def address_of(local: torch.Tensor) -> Address:
    """Return the address at which other processes of the host open a tensor's storage. Call `share` first."""
    return shm.share(local) if local.device.type == "cpu" else cuda_ipc.share(local)
