"""A model that a rank of the DTensor backend holds, as checkpoints have it: saved and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tandem.common.errors import CheckpointError, ModelError
from tandem.common.numeric.outliers import RecentSteps
from tandem.config.models.lora import make_tensor_name
from tandem.config.schema import columns
from tandem.trainer import exposed_weights
from tandem.trainer.backends import optimizer_state
from tandem.trainer.backends.building import ModelBuilder
from tandem.trainer.files import adapter_files, checkpoints, policy_files


class CheckpointedModel(ABC):
    """The part of `tandem.trainer.backends.held.DTensorHeldModel` that no step executes."""

    name: columns.Model
    model: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    num_steps: int
    num_schedule_steps: int
    recent: RecentSteps
    _adapters: adapter_files.AdapterDescription | None
    _builder: ModelBuilder

    @abstractmethod
    def _trained(self) -> dict[str, torch.nn.Parameter]: ...

    @abstractmethod
    def _start_optimizer(self, counts: checkpoints.OptimizerCounts) -> None: ...

    def state(self) -> checkpoints.ModelState:
        """Return the contents of a checkpoint. The schedule needs only the number of its steps."""
        counts = checkpoints.OptimizerCounts.of(self.num_steps, self.num_schedule_steps, self.recent)
        parts = partial(optimizer_state.parts_of, self._optimizer_tensors())
        if self._adapters is not None:
            trained = self._trained()
            gathered, num_bytes = adapter_files.gathered(trained), sum(each.nbytes for each in trained.values())
            return checkpoints.ModelState(self.model, gathered, num_bytes, parts, counts, self._adapters)
        gathered = policy_files.gathered(self.model, self.parameters)
        num_bytes = sum(parameter.nbytes for parameter in self.parameters.values())
        return checkpoints.ModelState(self.model, gathered, num_bytes, parts, counts)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint, bit for bit, in the parameters' own memory."""
        restored: dict[str, torch.Tensor] = {**self._trained()}
        if self._adapters is not None:
            shapes = {name: parameter.shape for name, parameter in restored.items()}
            tensors = adapter_files.read(folder / self.name, self._adapters.adapters, shapes)
        else:
            restored |= self.buffers
            tensors = self._read_whole_tensors(folder)
        for name, parameter in restored.items():
            exposed_weights.local_of(parameter).copy_(tensors[name][exposed_weights.box_of(parameter).region])
        self._load_optimizer(folder)

    def _read_whole_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint of a model that is trained whole. Raises `CheckpointError`."""
        try:
            loaded = self._builder.load(str(folder / self.name), torch.float32)
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        tensors: dict[str, torch.Tensor] = loaded.state_dict()
        for name, parameter in (self.parameters | self.buffers).items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise CheckpointError(f"{folder} is a checkpoint of another model: {name} differs")
        return tensors

    def _optimizer_tensors(self) -> dict[str, Any]:
        """Return the optimizer's state, by reference."""
        if not self.num_steps:  # no step, no state
            return {}
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {"state": {make_tensor_name(name): each for name, each in state.items()}}

    def _load_optimizer(self, folder: Path) -> None:
        self._start_optimizer(checkpoints.agree(lambda: checkpoints.read_counts(folder, self.name)))
        if self.num_steps:
            tensors = self._optimizer_tensors()  # of the right names, shapes and sharding, with arbitrary values
            read = partial(optimizer_state.read, tensors)
            checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, self.name))
