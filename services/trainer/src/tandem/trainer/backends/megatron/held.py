"""One model of a Megatron-Core rank: the policy, the reference, the value model or a teacher.

The same code builds, fills, trains, saves and resumes each of them, and scores with it. The model's section of the
configuration has the settings. The algorithm's declaration has the models to train, and the heads on their layers.

Of checkpoints, Megatron-Core's own `dist_checkpointing` is not used, because it does not keep three promises of this
project:

- Its ``torch_dist`` format keeps a pickled index (``.metadata``), which is unpickled to read a checkpoint.
- To write an optimizer's state for resharding, every data-parallel rank gathers its replica's whole state. To read it,
  every rank reads all of it. Another expert-parallel size cannot read it.
- On resuming with torch's AdamW, all parameters share one counter of steps (`optimizer_state`).

Here both folders use the checkpoint's own coordinates, which the layout knows. Every rank writes the elements it owns
and reads the elements it needs. TP, PP, virtual stages, EP, ETP, CP, DP, the distributed optimizer and the padding of
the vocabulary may all change in between. All files are safetensors and JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from tandem.common.errors import CheckpointError, ModelError, NotFiniteError, OutlierError
from tandem.common.numeric import RecentSteps
from tandem.config import Config
from tandem.config.models.families import is_text_only
from tandem.config.schema.adapters import PeftConfig
from tandem.config.schema.columns import Model
from tandem.refit.adapters import catalogue
from tandem.refit.adapters.megatron import linear_layers
from tandem.samples.model_files import load_tokenizer
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep
from tandem.trainer.backends.holding import OffloadedStorages, exchanged, function_of_scores
from tandem.trainer.backends.megatron import groups, optimizer_state, pipeline
from tandem.trainer.backends.megatron.adapters import adapt, as_fused, layers_with_adapters, new_values, switched_off
from tandem.trainer.backends.megatron.converted import open_tensors
from tandem.trainer.backends.megatron.model import LayerChunk, build_chunks
from tandem.trainer.backends.megatron.rows import MegatronRow
from tandem.trainer.backends.megatron.settings import (
    add_gradient_buffers,
    clip,
    make_optimizer,
    make_schedule,
    settings_of,
    state_of,
)
from tandem.trainer.backends.megatron.weights import (
    AdapterTensorSource,
    CheckpointTensors,
    RankWeights,
    SafetensorsFolder,
    TensorsInMemory,
)
from tandem.trainer.batching.masks import compares_whole
from tandem.trainer.files import adapter_files, box_files, checkpoints
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.models import build_without_weights
from tandem.trainer.scores import Scores

if TYPE_CHECKING:
    from tandem.trainer.backends.megatron.vision import MegatronImageInputs


class ModelDescription:
    """A model before it is built: its configuration, its tensors, and its settings for Megatron-Core.

    Raises `ModelError`.
    """

    def __init__(self, name: Model, config: Config, number: int = 0) -> None:
        """Read a model's configuration; `number` selects one of several teachers."""
        self.name, self.number, self.section = name, number, config.settings_of(name, number)
        self.head = config.declaration.head_of(name)
        source, dtype = self.section.model_name, getattr(torch, self.section.precision)
        self.hugging_face = build_without_weights(source, dtype, self.head, self.section.hf_config_overrides)
        if self.head == "score":
            # Loaders tell padding by it, and so find the token with the score.
            self.hugging_face.config.pad_token_id = load_tokenizer(config).pad_id
        self.model: dict[str, Any] = self.hugging_face.config.to_dict()
        self.shape = catalogue.make_shape(self.model)
        self.linear_elsewhere: tuple[str, ...] = ()
        """Linear layers outside of the language model, which have no adapters."""
        if not is_text_only(self.section):
            from tandem.trainer.backends.megatron import vision  # text runs need none of it

            self.model = vision.language_of(self.model)
            self.linear_elsewhere = vision.linear_in_tower(self.hugging_face)
        if self.head != "vocabulary":
            self.shape = self.shape.add_scalar_head(has_bias=self.head == "value")
        self.settings = settings_of(config, self.model, dist.get_world_size(), name)
        has_adapters = name == "policy" and self.section.adapters is not None
        self.adapters = self.section.megatron_cfg.peft if has_adapters else None
        self.linear = linear_layers(self.shape) if has_adapters else {}
        self.layers = layers_with_adapters(self.linear, self.shape, self.adapters) if self.adapters is not None else {}
        """Megatron-Core's layers with adapters, each with its layers in a checkpoint."""
        if self.adapters is not None:
            self.shape = self.shape.add_adapters(self.layers_in_checkpoint, self.adapters.dim)

    @property
    def layers_in_checkpoint(self) -> list[str]:
        """The layers with adapters, by their names in a checkpoint."""
        return [layer for layers in self.layers.values() for layer in layers]


class MegatronHeldModel:
    """A rank's part of one model, with its scorer, and its optimizer if it is trained.

    It starts from the ``model_name`` of its section or, if it is trained and there is one, from a checkpoint. Build it,
    and have it train and score, in its `RankDivision`. Raises `ModelError` or `CheckpointError`.
    """

    def __init__(
        self,
        described: ModelDescription,
        config: Config,
        division: groups.RankDivision,
        device: torch.device,
        *,
        checkpoint: Path | None,
    ) -> None:
        """Build and fill the model. If it is trained, `start` makes its optimizer. Collective."""
        self.name = name = described.name
        self.device = device
        self._described, self._config, self.division = described, config, division
        self.settings = settings = described.settings
        self.is_trained = name in config.declaration.trains
        media = self._media = self._attach_media()
        built_chunks = build_chunks(
            described.section,
            described.model,
            settings,
            described.head,
            None if media is None else media.chunk_of(described.hugging_face.config),
        )
        chunks: list[LayerChunk] = [chunk.to(device) for chunk in built_chunks]
        for chunk in chunks:
            if described.adapters is not None:
                adapt(chunk, described.layers, described.adapters)
            elif media is not None:
                media.freeze(chunk)
        self.weights = RankWeights(chunks, settings.sizes, described.shape, described.adapters)
        self._start: dict[torch.Tensor, torch.Tensor] | None = None
        """This rank's parameters of adapters, with the values that training starts from; None if the reference has
        none."""
        if described.adapters is not None:
            self._load_adapters(described.adapters, checkpoint)
        elif self.is_trained and checkpoint is not None:
            self._load_model(checkpoint)
        else:
            self.weights.load(self._tensors())
        self.chunks: list[Any] = (
            add_gradient_buffers(chunks, settings)
            if self.is_trained
            else [chunk.requires_grad_(False).eval() for chunk in chunks]
        )
        self.pipeline = pipeline.ModelPipeline(
            self.chunks,
            settings.sizes,
            described.shape.as_text.required_geometry.vocabulary_size,
            config.scoring_temperature,
            num_likeliest=config.topk_logits_k if name == "teacher" else 0,
            judged_by=config.weighs_teachers_by if name == "teacher" else "",
            learns_entropy=self.is_trained and config.learns_entropy,
            needs_whole=compares_whole(config),
            media=media,
            undrawable=() if media is None else media.undrawable,
            score=function_of_scores(config.settings_of(name)),
            row_divisor=settings.row_divisor,
        )
        self.optimizer: Any
        """The optimizer of a trained model."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_schedule_steps = 0
        """Steps of the schedules of learning rate and weight decay."""
        self.recent = RecentSteps()
        self._offloaded: OffloadedStorages | None = None

    def start(self, checkpoint: Path | None) -> None:
        """Make the optimizer and its schedule, from a checkpoint if given. Collective. Raises `CheckpointError`."""
        self.optimizer = make_optimizer(self.chunks, self.settings)
        if checkpoint is not None:
            self._load_optimizer(checkpoint)
        section, num_steps = self._described.section, self.num_schedule_steps
        self._schedule = make_schedule(self._config, section, self.optimizer, num_steps)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, *, refuses_outliers: bool = False
    ) -> OptimizerStep:
        """Take an optimizer step, as `tandem.trainer.backend.TrainerBackend.train_step` does.

        Raises `NotFiniteError` or `OutlierError`.
        """
        self.forget_gradient()
        biases = self.balancing_biases()
        rows = self.pipeline.rows(micro_batches)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        # Megatron-Core divides by the tokens of all rows, which is right for the losses that balance experts.
        self.pipeline.run(rows, adding(total, loss), scale=self.num_tokens(rows))
        total_loss = float(self.division.sum_over_replicas(total)[0])
        compared = self.recent if refuses_outliers else None
        step = self.take_step(total_loss, biases, self.optimizer.config.clip_grad, compared=compared)
        self.recent.add(step.loss, step.grad_norm)
        return step

    def advance_schedule(self) -> None:
        """Advance the schedules of learning rate and weight decay by one step."""
        self._schedule.step(1)
        self.num_schedule_steps += 1

    def take_step(
        self,
        loss: float,
        biases: Sequence[tuple[torch.Tensor, torch.Tensor]],
        max_grad_norm: float,
        *,
        largest: float = sys.float_info.max,
        compared: RecentSteps | None = None,
    ) -> OptimizerStep:
        """Clip the gradient, which is that of `loss` and has been reduced, and step.

        Args:
            loss: loss on all ranks.
            biases: `balancing_biases` before the gradient was reduced.
            max_grad_norm: norm that larger gradients are scaled down to; zero for none.
            largest: largest loss and norm of the gradient.
            compared: the steps before, if the step is not to be out of all proportion to them.

        Raises:
            NotFiniteError: the loss or the gradient is not finite, or beyond `largest`. No weight has changed.
            OutlierError: the loss or the gradient is out of all proportion. No weight has changed.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        is_bounded = abs(loss) <= largest and norm <= largest
        excess = "" if compared is None or not is_bounded else compared.excess(loss, norm)
        if excess or not is_bounded:
            for buffer, before in biases:
                buffer.copy_(before)
            if excess:
                raise OutlierError(excess)
            of_model = "" if self.name == "policy" else f" of the {self.name} model"
            raise NotFiniteError(
                f"optimizer step {self.num_steps + 1}{of_model} was not taken: loss {loss}, gradient norm {norm}"
                f"{'' if largest == sys.float_info.max else f', and {largest:g} is the most'}"
            )
        clip(self.optimizer, norm, max_grad_norm)
        learning_rate = float(get_canonical_lr_for_logging(self.optimizer.param_groups))
        self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()  # it has its own gradients in float32, and engines may need the memory
        self.num_steps += 1
        return OptimizerStep(loss=loss, grad_norm=norm, learning_rate=learning_rate)

    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint, bit for bit, in the parameters' own memory. Raises `CheckpointError`."""
        self.forget_steps()
        if self._described.adapters is None:
            self._load_model(folder)
        else:
            self.weights.load_adapters(TensorsInMemory(self._read_adapters(folder / self.name)))
        self._load_optimizer(folder)

    def _load_optimizer(self, folder: Path) -> None:
        counts = load_optimizer(folder, self.weights, self.optimizer, self.name)
        self.num_steps = counts.steps
        self.num_schedule_steps = counts.schedule_steps_of(self._config.num_optimizer_steps_per_pass)
        self.recent = counts.recent_steps

    def forget_steps(self) -> None:
        """Leave the optimizer no state, as if no step had been taken; forget the gradient."""
        self.forget_gradient()
        optimizer_state.take(self.optimizer)
        self.num_steps = self.num_schedule_steps = 0
        self.recent = RecentSteps()

    def forget_gradient(self) -> None:
        """Make all gradients zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], *, as_reference: bool = False) -> list[Scores]:
        """Return the model's scores of each micro-batch without gradient, on every stage.

        Args:
            micro_batches: micro-batches to score.
            as_reference: whether to score as if the model's adapters, which it must have, had never been trained.
        """
        batch_scores: list[Scores] = []

        def scored(batch: MicroBatch, scores_BT: Scores) -> torch.Tensor:
            batch_scores.append(scores_BT)
            return scores_BT[0].sum()

        with self._as_at_the_start() if as_reference else nullcontext():
            self.pipeline.run(self.pipeline.rows(micro_batches), scored, forward_only=True)
        if self.settings.sizes.pp == 1:
            return batch_scores
        blanks = [self.pipeline.blank(batch) for batch in micro_batches]
        flat = _bits(batch_scores or blanks)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(flat, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        parts = iter(torch.split(flat, [values.numel() for scores_BT in blanks for values in scores_BT]))
        return [
            type(scores_BT)(*(next(parts).view(values.dtype).view(values.shape) for values in scores_BT))
            for scores_BT in blanks
        ]

    def state(self) -> checkpoints.ModelState:
        """Return a checkpoint's contents: weights in the precision of the parameters, and the optimizer's state."""
        parts = partial(optimizer_state.parts_of, self.optimizer, self.weights)
        gathered, num_bytes = self.weights.gathered(), self.weights.num_bytes
        counts = checkpoints.OptimizerCounts.of(self.num_steps, self.num_schedule_steps, self.recent)
        return checkpoints.ModelState(self._described.hugging_face, gathered, num_bytes, parts, counts, self._written())

    def offload(self) -> None:
        """Move gradients and the optimizer's state from the GPU to host memory; on a CPU they are already there.

        Also move the parameters, unless engines may be reading them.
        """
        if self.device.type == "cpu" or self._offloaded is not None:
            return
        parameters = () if self.name == "policy" else self.weights.parameters.values()
        state: list[torch.Tensor] = []
        if self.is_trained:
            for chunk in self.chunks:
                chunk.offload_grad_buffers()
            state = list(state_of(self.optimizer, self.chunks))
        self._offloaded = OffloadedStorages([*state, *(each.detach() for each in parameters)])

    def reload(self) -> None:
        """Move back what `offload` moved, to tensors that are the same as before."""
        if self._offloaded is None:
            return
        if self.is_trained:
            for chunk in self.chunks:
                chunk.restore_grad_buffers()
        self._offloaded.reload()
        self._offloaded = None

    def _load_model(self, folder: Path) -> None:
        files = {} if self._media is None else {"opened": self._media.opened}
        load_model(folder, self.weights, self.name, **files)

    def _load_adapters(self, adapters: PeftConfig, checkpoint: Path | None) -> None:
        """Fill it with the model in ``model_name``, and with adapters from a checkpoint, from a folder, or new."""
        keeps_start = self._config.needs_reference and adapter_files.change_start(adapters)
        if checkpoint is not None and not keeps_start:
            values = self._read_adapters(checkpoint / self.name)
        elif adapters.restore_from is not None:
            values = self._read_adapters(Path(adapters.restore_from))
        else:
            shapes, parts = self.weights.adapter_shapes, self._described.layers
            values = new_values(shapes, parts, adapters, self._config.algorithm_section.seed)
        self.weights.load(AdapterTensorSource(values, self._tensors()))
        if keeps_start:
            parameters = (each for each in self.weights.parameters.values() if each.requires_grad)
            self._start = {parameter: parameter.detach().clone() for parameter in parameters}
            if checkpoint is not None:
                self.weights.load_adapters(TensorsInMemory(self._read_adapters(checkpoint / self.name)))

    def _as_at_the_start(self) -> AbstractContextManager[None]:
        """Let the chunks compute as the policy that training starts from, as long as the context lasts."""
        return switched_off(self.chunks) if self._start is None else exchanged(self._start)

    def _read_adapters(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return whole adapters from their folder. Raises `CheckpointError`."""
        shapes, parts, described = self.weights.adapter_shapes, self._described.layers, self._written()
        assert described is not None, "only called for a model with adapters"
        return checkpoints.agree(lambda: as_fused(adapter_files.read(folder, described, shapes), parts))

    def _attach_media(self) -> MegatronImageInputs | None:
        """Return what gives the chunks images; None for a model of text."""
        if is_text_only(self._described.section):
            return None
        from tandem.trainer.backends.megatron import vision  # text runs need none of it

        return vision.attach(self._config, self._described.section, self.device)

    def _tensors(self) -> CheckpointTensors:
        """Return the weights that the model starts from, without adapters. Collective. Raises `ModelError`."""
        source = self._described.section.model_name
        if self._media is not None:
            return self._media.tensors()
        return open_tensors(source, self._config, self.name)

    def _written(self) -> adapter_files.AdapterDescription | None:
        """Describe the adapters that a checkpoint has in place of the model, if any."""
        described = self._described
        if described.adapters is None:
            return None
        linear = [layer for layers in described.linear.values() for layer in layers] + [*described.linear_elsewhere]
        source, has_experts = (
            described.section.model_name,
            described.shape.as_text.required_geometry.experts is not None,
        )
        return adapter_files.AdapterDescription(
            source, described.adapters, described.layers_in_checkpoint, linear, has_experts
        )

    def num_tokens(self, rows: Sequence[MegatronRow]) -> int:
        """Return the tokens of all rows of all replicas. Each context-parallel rank has its share."""
        num_local = sum(row.token_ids_1M.numel() for row in rows)
        total = torch.tensor(num_local, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return int(total)

    def balancing_biases(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the biases that balance experts without a gradient, each with a copy.

        They change when a gradient is reduced, before its step is known to be good.
        """
        buffers = (item for chunk in self.chunks for item in chunk.named_buffers())
        return [(buffer, buffer.clone()) for name, buffer in buffers if name.endswith("router.expert_bias")]


def adding(total: torch.Tensor, loss: LossOfMicroBatch) -> pipeline.Scored:
    """Return a loss that is also added to a total."""

    def scored(batch: MicroBatch, scores_BT: Scores) -> torch.Tensor:
        value = loss(batch, scores_BT)
        total.add_(value.detach())
        return value

    return scored


def _bits(scores: Sequence[Scores]) -> torch.Tensor:
    """Return all numbers end to end, with other four-byte types as floats of the same bits."""
    return torch.cat([values.flatten().view(torch.float32) for scores_BT in scores for values in scores_BT])


def load_model(
    folder: Path, weights: RankWeights, model: Model, opened: Callable[[Path], CheckpointTensors] = SafetensorsFolder
) -> None:
    """Fill the parameters of a model from a checkpoint, in their own memory; `opened` opens its files.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """

    def load() -> None:
        try:
            weights.load(opened(folder / model))
        except ModelError as error:
            raise CheckpointError(str(error)) from error

    checkpoints.agree(load)


def load_optimizer(folder: Path, weights: RankWeights, optimizer: Any, model: Model) -> checkpoints.OptimizerCounts:
    """Fill a model's optimizer from a checkpoint; return the number of steps that it has taken, and its schedule.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """
    counts = checkpoints.agree(lambda: checkpoints.read_counts(folder, model))

    def read(files: box_files.BoxFiles) -> None:
        optimizer_state.read(optimizer, weights, files, counts.steps)

    checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, model))
    return counts
