"""One model that a rank of the DTensor backend holds: policy, reference, value model, teacher.

The same code builds, saves and resumes each of them; `stepping` trains them, and scores with them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tandem.common.errors import CheckpointError, ModelError
from tandem.config import Config
from tandem.config.models.lora import tensor_name
from tandem.config.schema import columns
from tandem.trainer import shards
from tandem.trainer.backends import optimizer_state
from tandem.trainer.backends.building import Builder
from tandem.trainer.backends.sharding import Ranks
from tandem.trainer.backends.stepping import SteppedModel, advance
from tandem.trainer.files import adapter_files, checkpoints, policy_files
from tandem.trainer.optimizers import make_optimizer, make_scheduler


class HeldModel(SteppedModel):
    """A rank's part of one model, with its scorer, and its optimizer if it is trained.

    It starts from the ``model_name`` of its section or, if it is trained and there is one, from a checkpoint. Raises
    `ModelError`, `ConfigError` or `CheckpointError`.
    """

    def __init__(
        self, name: columns.Model, config: Config, ranks: Ranks, *, checkpoint: Path | None, number: int = 0
    ) -> None:
        """Build the model. If it is trained, `start` makes its optimizer. Collective.

        `number` selects one of several models of the name.
        """
        self._builder = Builder(name, config, ranks, number)
        built = self._builder.build(checkpoint)
        is_trained = name in config.declaration.trains
        super().__init__(name, config.settings_of(name, number), ranks, built, is_trained=is_trained)
        self.buffers = policy_files.saved_buffers(self.model)
        """Buffers, whole on every rank and never trained."""

    def start(self, checkpoint: Path | None) -> None:
        """Make the optimizer and its schedule, from a checkpoint if given. Collective. Raises `CheckpointError`."""
        if checkpoint is None:
            self._start_optimizer(num_steps=0)
        else:
            self._load_optimizer(checkpoint)

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter that the optimizer changes, by reference."""
        return {name: shards.local_of(parameter) for name, parameter in self._trained().items()}

    def forget_steps(self) -> None:
        """Make a new optimizer, without state, as if no step had been taken; forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self._start_optimizer(num_steps=0)

    def state(self) -> checkpoints.State:
        """Return the contents of a checkpoint. The schedule needs only the number of steps."""
        parts = partial(optimizer_state.parts_of, self._optimizer_tensors())
        if self._adapters is not None:
            trained = self._trained()
            gathered, num_bytes = adapter_files.gathered(trained), sum(each.nbytes for each in trained.values())
            return checkpoints.State(self.model, gathered, num_bytes, parts, self.num_steps, self._adapters)
        gathered = policy_files.gathered(self.model, self.parameters)
        num_bytes = sum(parameter.nbytes for parameter in self.parameters.values())
        return checkpoints.State(self.model, gathered, num_bytes, parts, self.num_steps)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint, bit for bit, in the parameters' own memory."""
        held: dict[str, torch.Tensor] = {**self._trained()}
        if self._adapters is not None:
            shapes = {name: parameter.shape for name, parameter in held.items()}
            tensors = adapter_files.read(folder / self.name, self._adapters.adapters, shapes)
        else:
            held |= self.buffers
            tensors = self._whole_tensors(folder)
        for name, parameter in held.items():
            shards.local_of(parameter).copy_(tensors[name][shards.box_of(parameter).region])
        self._load_optimizer(folder)

    def _whole_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
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

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that an optimizer changes."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _optimizer_tensors(self) -> dict[str, Any]:
        """Return the optimizer's state, by reference."""
        if not self.num_steps:  # no step, no state
            return {}
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {"state": {tensor_name(name): each for name, each in state.items()}}

    def _start_optimizer(self, num_steps: int) -> None:
        """Make a new optimizer, without state, with its schedule after `num_steps`."""
        settings = self._settings.optimizer
        assert settings is not None, "the configuration's checks require an optimizer"
        self.optimizer = make_optimizer(settings, self._ranks.together(self._trained().values()), self.name)
        self.scheduler = make_scheduler(self._settings.scheduler, self.optimizer, self.name)
        advance(self.scheduler, num_steps)
        self.num_steps = num_steps
        self._offloaded = None

    def _load_optimizer(self, folder: Path) -> None:
        self._start_optimizer(checkpoints.agree(lambda: checkpoints.read_num_steps(folder, self.name)))
        if self.num_steps:
            tensors = self._optimizer_tensors()  # of the right names, shapes and sharding, with arbitrary values
            read = partial(optimizer_state.read, tensors)
            checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, self.name))
