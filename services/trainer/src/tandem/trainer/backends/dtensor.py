"""The DTensor backend: FSDP2, with tensor, context and expert parallelism.

Trained parameters are float32, whatever the precision of the passes. On the CPU, the policy's parameters stay in shared
memory, at the same addresses, as long as the backend lives. So engines can copy straight out of them or read them in
place.

Models are arranged on the ranks. The same code builds each of them, takes its optimizer steps
(`DTensorHeldModel.train_step`), scores with it, moves it off the device and back, saves and resumes it.
"""

from __future__ import annotations

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tandem.common.errors import CheckpointError, ModelError, NotFiniteError, OutlierError
from tandem.common.numeric import RecentSteps
from tandem.config import Config
from tandem.config.models.lora import make_tensor_name
from tandem.config.placement import ModelGroup
from tandem.config.schema import columns
from tandem.config.schema.columns import Model
from tandem.refit.weights import Weights
from tandem.trainer import exposed_weights
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep
from tandem.trainer.backends import optimizers
from tandem.trainer.backends.building import ModelBuilder
from tandem.trainer.backends.holding import HoldingBackend, OffloadedStorages, as_at_the_start, shards_of, state_of
from tandem.trainer.backends.optimizers import make_optimizer, make_scheduler
from tandem.trainer.backends.sharding import RankMesh
from tandem.trainer.files import adapter_files, checkpoints, policy_files
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores


class CheckpointedModel(ABC):
    """The part of `tandem.trainer.backends.dtensor.DTensorHeldModel` that no step executes."""

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
        parts = partial(optimizers.parts_of, self._optimizer_tensors())
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
            tensors = adapter_files.read(folder / self.name, self._adapters, shapes)
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
            read = partial(optimizers.read, tensors)
            checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, self.name))


class DTensorHeldModel(CheckpointedModel):
    """A rank's part of one model, with its scorer, and its optimizer if it is trained.

    It starts from the ``model_name`` of its section or, if it is trained and there is one, from a checkpoint. Raises
    `ModelError`, `ConfigError` or `CheckpointError`.
    """

    optimizer: torch.optim.Optimizer
    """The optimizer of a trained model."""
    scheduler: torch.optim.lr_scheduler.LRScheduler
    builder_class: type[ModelBuilder] = ModelBuilder

    def __init__(
        self, name: columns.Model, config: Config, ranks: RankMesh, *, checkpoint: Path | None, number: int = 0
    ) -> None:
        """Build the model. If it is trained, `start` makes its optimizer. Collective.

        `number` selects one of several models of the name.
        """
        self.name = name
        self._settings = config.settings_of(name, number)
        self._ranks = ranks
        self.is_trained = name in config.declaration.trains
        self.device = ranks.device
        self._builder = self.builder_class(name, config, ranks, number)
        built = self._builder.build(checkpoint)
        self.model, self._scorer, self.shares_prompts, self._adapters, self._place, start = built
        self.parameters: dict[str, torch.nn.Parameter] = {
            make_tensor_name(name): parameter for name, parameter in self.model.named_parameters()
        }
        self._clipped = self.parameters
        """The parameters whose gradients are clipped together; their norm is that of a step."""
        self._start = None if start is None else shards_of(self.parameters, start)
        """This rank's part of the adapters that training starts from; None if the reference has none."""
        self.buffers = policy_files.saved_buffers(self.model)
        """Buffers, whole on every rank and never trained."""
        # Gradients are reduced once an optimizer step, if host memory can hold them whole until then. On several GPUs
        # every backward pass is a last one to FSDP2. After others it keeps whole gradients of the embedding and the
        # output layer in float32 through the next forward pass: 4.2 GB of an 8B model.
        once = self.device.type == "cpu" or ranks.num_shards == 1
        self._reduces_once = self.model if once and isinstance(self.model, FSDPModule) else None
        """The model if FSDP2 is told which backward pass of an optimizer step reduces gradients."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_schedule_steps = 0
        """Steps of the schedule of the learning rate."""
        self.recent = RecentSteps()
        self._steps_per_pass = config.num_optimizer_steps_per_pass
        self._offloaded: OffloadedStorages | None = None

    def start(self, checkpoint: Path | None) -> None:
        """Make the optimizer and its schedule, from a checkpoint if given. Collective. Raises `CheckpointError`."""
        if checkpoint is None:
            self._start_optimizer(checkpoints.OptimizerCounts())
        else:
            self._load_optimizer(checkpoint)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, *, refuses_outliers: bool = False
    ) -> OptimizerStep:
        """Take an optimizer step, as `tandem.trainer.backend.TrainerBackend.train_step` does.

        Raises `NotFiniteError` or `OutlierError`.
        """
        compared = self.recent if refuses_outliers else None
        step = self.take_step(self.add_gradient(micro_batches, loss), self._settings.max_grad_norm, compared=compared)
        self.recent.add(step.loss, step.grad_norm)
        return step

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of the loss of these micro-batches on all ranks to what there is. Return the loss."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            if self._reduces_once is not None:
                _reduce_gradients(self._reduces_once, index == len(micro_batches) - 1)
            if self._place is not None:
                self._place.enter(self.num_steps, index)
            value = loss(batch, self._scorer(batch))
            # FSDP2 averages gradients over the ranks, but the loss is a sum.
            torch.autograd.backward(value * self._ranks.num_shards)
            total += value.detach()
        if self._place is not None:
            self._place.leave()
        return float(self._ranks.replicas.sum(total)[0])

    def take_step(
        self,
        loss: float,
        max_grad_norm: float | None,
        *,
        largest: float = sys.float_info.max,
        compared: RecentSteps | None = None,
    ) -> OptimizerStep:
        """Clip the gradient, which is that of `loss`, step, and forget it.

        Raises `NotFiniteError`, with the weights unchanged, if the loss or the gradient's norm is beyond `largest`, and
        `OutlierError` if it is out of all proportion to the steps `compared`.
        """
        gradients = [parameter.grad for parameter in self._clipped.values() if parameter.grad is not None]
        norm = norm_of(gradients)
        if max_grad_norm is not None:
            scale_down(gradients, norm, max_grad_norm)
        grad_norm = float(norm)
        if not (abs(loss) <= largest and grad_norm <= largest):
            self.optimizer.zero_grad(set_to_none=True)
            of_model = "" if self.name == "policy" else f" of the {self.name} model"
            raise NotFiniteError(
                f"optimizer step {self.num_steps + 1}{of_model} was not taken: loss {loss}, gradient norm {grad_norm}"
                f"{'' if largest == sys.float_info.max else f', and {largest:g} is the most'}"
            )
        if compared is not None and (excess := compared.excess(loss, grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise OutlierError(excess)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return OptimizerStep(loss=loss, grad_norm=grad_norm, learning_rate=learning_rate)

    def advance_schedule(self) -> None:
        """Advance the schedule of the learning rate by one step."""
        advance(self.scheduler)
        self.num_schedule_steps += 1

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], *, as_reference: bool = False) -> list[Scores]:
        """Return the model's scores of each micro-batch without gradient, zero for tokens that are not valid.

        Args:
            micro_batches: micro-batches to score.
            as_reference: whether to score as if the model's adapters, which it must have, had never been trained.
        """
        with as_at_the_start(self.model, self.parameters, self._start) if as_reference else nullcontext():
            scores = [self._scorer(batch) for batch in micro_batches]
            for module in _fsdp_modules(self.model):
                module.reshard()  # by itself, only a backward pass would do it
        return scores

    def offload(self) -> None:
        """Free the gradients and move the optimizer's state from the GPU to pinned host memory.

        Also move the parameters, unless engines may be reading them. On a CPU, all of it is already in host memory, and
        only the gradients are freed.
        """
        if self.is_trained:
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu" and self._offloaded is None:
            self._offloaded = OffloadedStorages(self.movable())

    def movable(self) -> list[torch.Tensor]:
        """Return this rank's tensors on its device that are only needed to train, or score with, the model."""
        parameters = () if self.name == "policy" else self.parameters.values()
        parts = [exposed_weights.local_of(each) for each in parameters if each.device.type == self.device.type]
        return [*(state_of(self.optimizer, self.device) if self.is_trained else ()), *parts]

    def reload(self) -> None:
        """Move back the offloaded tensors, which are the same as before."""
        if self._offloaded is not None:
            self._offloaded.reload()
            self._offloaded = None

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter that the optimizer changes, by reference."""
        return {name: exposed_weights.local_of(parameter) for name, parameter in self._trained().items()}

    def forget_steps(self) -> None:
        """Make a new optimizer, without state, as if no step had been taken; forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self._start_optimizer(checkpoints.OptimizerCounts())

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that an optimizer changes."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _start_optimizer(self, counts: checkpoints.OptimizerCounts) -> None:
        """Make a new optimizer, without state, as after these steps, and its schedule."""
        settings = self._settings.optimizer
        assert settings is not None, "the configuration's checks require an optimizer"
        self.optimizer = make_optimizer(settings, self._ranks.together(self._trained().values()), self.name)
        self.scheduler = make_scheduler(self._settings.scheduler, self.optimizer, self.name)
        self.num_steps, self.num_schedule_steps = counts.steps, counts.schedule_steps_of(self._steps_per_pass)
        self.recent = counts.recent_steps
        advance(self.scheduler, self.num_schedule_steps)
        self._offloaded = None


def _reduce_gradients(model: FSDPModule, is_last: bool) -> None:
    """Have the next backward pass reduce gradients and give up whole parameters, or neither."""
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all elements of tensors on one mesh of all ranks, as a float64 scalar.

    Collective. Ranks exchange one number, whereas torch would reduce over one axis of the mesh after the other.
    """
    total, is_shared = torch.zeros((), dtype=torch.float64), False
    for tensor in tensors:
        local, num_holders = tensor, 1
        if isinstance(tensor, DTensor):
            is_shared = True
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            local, num_holders = tensor.to_local(), math.prod(size for each, size in sizes if each.is_replicate())
        square = torch.linalg.vector_norm(local.detach(), dtype=torch.float64).square()
        total = total.to(square.device) + square / num_holders
    if is_shared:
        dist.all_reduce(total)
    return total.sqrt()


def scale_down(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale tensors of this norm to `max_norm` in place, if it is larger: `torch.nn.utils.clip_grads_with_norm_`.

    Each rank scales its own parts. Of whole tensors torch would first find out, one by one, how ranks share the
    multiplication, which takes a first step tenths of a second a tensor where a mesh has several axes.
    """
    if tensors:  # torch multiplies no empty list
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        local_tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        torch._foreach_mul_(local_tensors, factor)


def advance(scheduler: torch.optim.lr_scheduler.LRScheduler, num_steps: int = 1) -> None:
    """Advance a schedule by `num_steps`.

    A schedule depends only on the number of steps, so a new one at the same step is exactly where the old one was.
    """
    with warnings.catch_warnings():
        # torch warns of steps without optimizer steps, as in a replay, and of its own use of `epoch`.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(num_steps):
            scheduler.step()


def _fsdp_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class DTensorBackend(HoldingBackend[DTensorHeldModel]):
    """One rank of the default process group, as a `tandem.trainer.backend.TrainerBackend`.

    Raises `ModelError`, `ConfigError` (optimizer or schedule) or `CheckpointError`.
    """

    def __init__(self, config: Config, *, checkpoint: Path | None, model_group: ModelGroup | None = None) -> None:
        """Build the models of a model group; `model_group` None: of all."""
        super().__init__(config, model_group)
        self._ranks = _arranged(config, self._model_group.models, self.device)
        self._replicas = {name: ranks.replicas for name, ranks in self._ranks.items()}
        self.divides_alike = len({replicas.sizes for replicas in self._replicas.values()}) == 1
        ranks = self._ranks[self._model_group.name]
        self.data_parallel_rank = ranks.data.get_local_rank()
        self.data_parallel_size = ranks.data.size()
        self.sequence_divisor = ranks.sequence_divisor
        proof = checkpoints.FileProof(checkpoints.files_to_load(config, checkpoint, self._model_group.models))
        for name, number in self._list_models():
            held_model = self._hold(name, number, checkpoint)
            if name == "policy":
                exposed_weights.share(held_model.parameters | held_model.buffers)
            self._held[name, number] = held_model
        self.shares_prompts = all(model.shares_prompts for model in self._held.values())
        first = self._held[self._model_group.name, 0]
        self.num_parameters = sum(parameter.numel() for parameter in first.parameters.values())
        for model in self._trained():
            model.start(checkpoint)
        proof.conclude()

    def _hold(self, name: Model, number: int, checkpoint: Path | None) -> DTensorHeldModel:
        return DTensorHeldModel(name, self._config, self._ranks[name], checkpoint=checkpoint, number=number)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        return self._replicas[self._model_group.name].sum(values)

    @property
    def policy(self) -> DTensorHeldModel:
        """The policy."""
        return self._held["policy", 0]

    def weights(self) -> Weights:
        """Return the shards of the policy that this rank holds, in the memory that it trains in."""
        policy = self.policy
        return exposed_weights.weights_of(policy.parameters | policy.buffers, self._config.policy.adapters)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of `save`, bit for bit, on any number of ranks, in the parameters' own memory."""
        proof = checkpoints.FileProof(checkpoints.files_of(folder))
        for model in self._trained():
            model.load(folder)
        proof.conclude()


def _arranged(config: Config, models: Sequence[Model], device: torch.device) -> dict[Model, RankMesh]:
    """Return the ranks of each model, arranged once for models with the same parallel sizes. Collective."""
    by_sizes: dict[tuple[int, ...], list[Model]] = {}
    for name in models:
        by_sizes.setdefault(config.settings_of(name).dtensor_cfg.parallel_sizes, []).append(name)
    meshes: dict[Model, RankMesh] = {}
    for names in by_sizes.values():
        ranks = RankMesh([config.settings_of(name) for name in names], device)
        meshes |= dict.fromkeys(names, ranks)
    return meshes
