"""The common part of all backends: the models of a rank, on its device or off it; sums over ranks.

Each model takes its own optimizer steps: `DTensorHeldModel` with DTensor, `MegatronHeldModel` with Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from tandem.config import Config, placement, schema
from tandem.config.schema.columns import Model
from tandem.trainer import exposed_weights, scoring
from tandem.trainer.backend import CheckpointWriting, LossOfMicroBatch, ModelReplicas, OptimizerStep
from tandem.trainer.files import checkpoints
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores, StudentScores, TokenScores


class RankModel(Protocol):
    """One model that a rank holds, or its part of one."""

    name: Model
    is_trained: bool

    def start(self, checkpoint: Path | None) -> None:
        """Make the optimizer and its schedule, from a checkpoint if given. Collective. Raises `CheckpointError`."""
        ...

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, *, refuses_outliers: bool = False
    ) -> OptimizerStep:
        """Take an optimizer step, as `tandem.trainer.backend.TrainerBackend.train_step` does.

        Raises `NotFiniteError` or `OutlierError`.
        """
        ...

    def advance_schedule(self) -> None:
        """Advance the schedule of the learning rate by one step."""
        ...

    def scores(self, micro_batches: Sequence[MicroBatch], *, as_reference: bool = False) -> Sequence[Scores]:
        """Return the model's scores of each micro-batch without gradient, zero for tokens that are not valid.

        `as_reference` scores as if the model's adapters, which it must have, had never been trained.
        """
        ...

    def state(self) -> checkpoints.ModelState:
        """Return the contents of a checkpoint."""
        ...

    def offload(self) -> None:
        """Free the device memory that only training needs."""
        ...

    def reload(self) -> None:
        """Take the memory back."""
        ...


AnyHeld = TypeVar("AnyHeld", bound=RankModel)


class HoldingBackend(Generic[AnyHeld]):
    """The part of a backend (`tandem.trainer.backend.TrainerBackend`) that passes calls on to the models.

    A trained model starts from the ``model_name`` of its section or, if given, from a checkpoint of Tandem. The
    reference exists only if the loss reads it. It is always the policy before any training: ``policy.model_name`` or,
    if adapters are trained, the policy with the adapters that training starts from, which needs no model of its own.
    """

    def __init__(self, config: Config, model_group: placement.ModelGroup | None) -> None:
        """Begin without models. `model_group` is the model group of the process group; None if it holds all models."""
        self._config = config
        self._model_group = model_group or placement.ModelGroup(
            models=config.holds, first=0, size=dist.get_world_size()
        )
        self.device = _device_of(self._model_group.first + dist.get_rank())
        self._held: dict[tuple[Model, int], AnyHeld] = {}
        """The models, by name and number."""
        self._replicas: dict[Model, ModelReplicas] = {}
        """How each model divides the ranks."""

    def _list_models(self) -> Iterator[tuple[Model, int]]:
        """Yield the models to hold here, by name and number."""
        adapts = self._config.policy.adapters is not None
        for name in self._model_group.models:
            if name != "reference" or not adapts:
                yield from ((name, number) for number in range(self._config.num_of(name)))

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossOfMicroBatch,
        model: Model = "policy",
        *,
        refuses_outliers: bool = False,
    ) -> OptimizerStep:
        """Forward and backward over this rank's micro-batches, clip, and step the model's optimizer once.

        Raises `NotFiniteError` or `OutlierError`, before anything has changed.
        """
        return self._held[model, 0].train_step(micro_batches, loss, refuses_outliers=refuses_outliers)

    def advance_schedule(self, model: Model = "policy") -> None:
        """Advance the schedule of a model's learning rate."""
        self._held[model, 0].advance_schedule()

    def scores(self, micro_batches: Sequence[MicroBatch], model: Model, number: int = 0) -> Sequence[Scores]:
        """Return a model's scores of each micro-batch without gradient, zero for tokens that are not valid."""
        if (model, number) not in self._held:  # the reference of a policy with trained adapters
            return self._held["policy", 0].scores(micro_batches, as_reference=True)
        return self._held[model, number].scores(micro_batches)

    def replicas(self, model: Model) -> ModelReplicas:
        """Return how a model divides the ranks."""
        return self._replicas[model]

    def save(self, folder: Path) -> CheckpointWriting:
        """Copy the trained models and the optimizers' states, and begin to write them.

        Raises `CheckpointError` if an optimizer's state cannot be saved.
        """
        return checkpoints.save(folder, self._states(), self._config, first_writer=self._model_group.first)

    def offload(self) -> None:
        """Free what only training needs: gradients, optimizer states, and parameters that no engine reads."""
        for model in self._held.values():
            model.offload()

    def reload(self) -> None:
        """Move it back, to tensors that are the same as before."""
        for model in self._held.values():
            model.reload()

    def close(self) -> None:
        """Release models and optimizers. The process group belongs to its creator."""
        self._held.clear()

    def _trained(self) -> list[AnyHeld]:
        return [model for model in self._held.values() if model.is_trained]

    def _states(self) -> dict[Model, checkpoints.ModelState]:
        return {model.name: model.state() for model in self._trained()}


def sum_over(group: dist.ProcessGroup, device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Add a float64 tensor over the ranks of a group, which compute on this kind of device."""
    total = values.detach().clone().to(device)
    dist.all_reduce(total, group=group)
    return total


def _device_of(index: int) -> torch.device:
    """Return the device of a trainer. Trainers take a node's GPUs from the first on (`tandem.config.placement`)."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def function_of_scores(settings: schema.ModelConfig) -> Callable[..., TokenScores | StudentScores]:
    """Return `tandem.trainer.scoring.score_tokens`, or what does the same by fused kernels."""
    if not settings.compile:
        return scoring.score_tokens
    from tandem.trainer.backends import compiling  # it imports torch's compiler

    return compiling.score_tokens


@contextmanager
def exchanged(tensors: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Let tensors have the values of others, in their own memory, as long as the context lasts.

    No engine may read them meanwhile: it is for a training step, in which they change anyway.
    """
    values = [tensor.clone() for tensor in tensors]
    for tensor, replacement in tensors.items():
        tensor.copy_(replacement)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def as_at_the_start(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], start: Mapping[str, torch.Tensor] | None
) -> AbstractContextManager[None]:
    """Let a model compute as the policy that training starts from, as long as the context lasts.

    `start` is this rank's part of the adapters that training starts from; without any they are switched off.
    """
    if start is None:
        from tandem.trainer import lora

        return lora.switched_off(model)
    return exchanged({exposed_weights.local_of(parameters[name]): tensor for name, tensor in start.items()})


def shards_of(
    parameters: Mapping[str, torch.nn.Parameter], whole_tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's part of whole tensors, of the parameters of these names."""
    return {
        name: tensor[exposed_weights.box_of(parameters[name]).region].clone().to(parameters[name].device)
        for name, tensor in whole_tensors.items()
    }


_SMALLEST_PART = 1 << 20
"""Bytes of pinned memory below which nothing is divided, as copies cost more than rounding wastes."""


def state_of(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """Return this rank's tensors of an optimizer's state on a kind of device."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = [exposed_weights.local_of(value) for value in values if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == device.type]


class OffloadedStorages:
    """Storages of tensors without their memory. Nothing may read or write the tensors until `reload`.

    An owner of the tensors, such as an optimizer, notices nothing: they are the same objects afterwards.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy every storage to host memory, pinned if it lies on a GPU, and give its own memory back to the device."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._held = [(storage, _copies_on_host(storage)) for storage in storages.values() if storage.nbytes()]
        _wait(self._devices())
        for storage, _ in self._held:
            storage.resize_(0)
        if any(device.type == "cuda" for device in self._devices()):
            torch.cuda.empty_cache()  # otherwise it stays with this process

    def reload(self) -> None:
        """Take the memory again, and copy the bytes back."""
        for storage, parts in self._held:
            sizes = [host.nbytes for host in parts]
            storage.resize_(sum(sizes))
            for part, host in zip(torch.split(_bytes_of(storage), sizes), parts, strict=True):
                part.copy_(host, non_blocking=True)
        _wait(self._devices())
        self._held = []

    def _devices(self) -> set[torch.device]:
        return {storage.device for storage, _ in self._held}


def _copies_on_host(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """Begin to copy the bytes of a storage to host memory, and return where they will be, end to end."""
    if storage.device.type != "cuda":
        return [_bytes_of(storage).clone()]
    return [
        torch.empty(len(part), dtype=torch.uint8, pin_memory=True).copy_(part, non_blocking=True)
        for part in torch.split(_bytes_of(storage), _pinned_sizes(storage.nbytes()))
    ]


def _pinned_sizes(num_bytes: int) -> list[int]:
    """Divide a size into powers of two and a rest, because torch rounds each block of pinned memory up to one."""
    sizes = []
    while num_bytes > _SMALLEST_PART:
        sizes.append(1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(devices: Iterable[torch.device]) -> None:
    """Wait for copies that were begun on GPUs."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class MediaOfModel(Protocol):
    """The media of micro-batches, as inputs of one model."""

    undrawable: tuple[int, ...]
    """Tokens that no policy draws, and that have no probability."""

    def __call__(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the model's inputs besides its tokens. Raises `DataError` for what cannot be read."""
        ...
