"""Train with Megatron-Core: tensor, pipeline, context, expert and data parallel.

Parameters have the precision of the passes; where that is bfloat16 the optimizer keeps them in float32 as well. On the
CPU they lie in shared memory for as long as the backend lives, at the same addresses, so that engines can copy straight
out of them or read them in place.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.common.errors import TrainingError
from tandem.refit.adapters import catalogue
from tandem.refit.endpoint import Weights
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, Writing
from tandem.trainer.backends.devices import device_of
from tandem.trainer.backends.megatron import checkpoints
from tandem.trainer.backends.megatron.converted import open_tensors
from tandem.trainer.backends.megatron.model import Chunk, build_chunks, make_groups
from tandem.trainer.backends.megatron.optimizer import clip, make_optimizer, make_schedule, state_of, with_gradients
from tandem.trainer.backends.megatron.pipeline import Pipeline
from tandem.trainer.backends.megatron.settings import settings_of
from tandem.trainer.backends.megatron.sources import folder_of
from tandem.trainer.backends.megatron.weights import RankWeights
from tandem.trainer.checkpoints import Proof, files_to_load
from tandem.trainer.models import without_weights
from tandem.trainer.offload import Offloaded
from tandem.trainer.packing import MicroBatch
from tandem.trainer.scoring import TokenScores


class MegatronBackend:
    """One rank of the default process group; obeys `tandem.trainer.backend.Backend`.

    After `tandem.trainer.backends.megatron.cpu.prepare`. The policy starts from ``policy.model_name`` or, where given,
    from a checkpoint of Tandem. The reference, which exists only if the loss reads it, is always
    ``policy.model_name``.

    Raises `ModelError` or `CheckpointError`.
    """

    shares_prompts = False

    def __init__(self, config: Config, *, checkpoint: Path | None) -> None:
        self._config = config
        self.device = device_of(dist.get_rank())
        proof = Proof(files_to_load(config, checkpoint))
        dtype = getattr(torch, config.policy.precision)
        self._described = without_weights(str(folder_of(config.policy.model_name)), dtype)
        self._model: dict[str, Any] = self._described.config.to_dict()
        self._shape = catalogue.from_config(self._model)
        self.num_parameters = self._shape.num_parameters
        self._settings = settings = settings_of(config, self._model, dist.get_world_size())
        if dist.get_rank() == 0:
            for notice in settings.notices:
                print(notice, flush=True)
        make_groups(settings, datetime.timedelta(seconds=config.cluster.deadlines.train_s))
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = settings.sizes.dp
        sizes = settings.sizes
        self.sequence_divisor = 2 * sizes.cp if sizes.cp > 1 else 1
        if settings.transformer.sequence_parallel:
            self.sequence_divisor *= sizes.tp

        chunks, self._weights = self._build()
        if checkpoint is None:
            self._weights.load(open_tensors(config.policy.model_name, config))
        else:
            checkpoints.load_policy(checkpoint, self._weights)
        self._policy = with_gradients(chunks, settings)
        self._pipelines = {"policy": self._pipeline(self._policy)}
        if config.needs_reference:
            self._pipelines["reference"] = self._reference()
        self._optimizer = make_optimizer(self._policy, settings)
        self._offloaded: Offloaded | None = None
        state = self._weights, self._optimizer
        self._num_steps = 0 if checkpoint is None else checkpoints.load_optimizer(checkpoint, *state)
        self._schedule = make_schedule(config, self._optimizer, self._num_steps)
        proof.conclude()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, model: Model = "policy"
    ) -> OptimizerStep:
        """Forward and backward over this replica's micro-batches, clip, and step optimizer and schedule once.

        Raises `TrainingError`, before anything has changed, if the loss or the gradient is no finite number.
        """
        assert model == "policy", "the configuration's checks let this backend train no other"
        for chunk in self._policy:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        biases = [(buffer, buffer.clone()) for buffer in self._balancing_biases()]
        pipeline = self._pipelines["policy"]
        rows = pipeline.rows(micro_batches)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)

        def scored(batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
            value = loss(batch, scores_BT)
            total.add_(value.detach())
            return value

        # Megatron-Core divides by the tokens of all rows, which is right for the losses that balance experts.
        pipeline.run(rows, scored, scale=self._num_tokens(sum(row.token_ids_1M.numel() for row in rows)))
        self._optimizer.prepare_grads()
        total_loss = float(self.sum_over_ranks(total)[0])
        norm = float(self._optimizer.get_grad_norm())
        if not (math.isfinite(total_loss) and math.isfinite(norm)):
            for buffer, before in biases:
                buffer.copy_(before)
            raise TrainingError(
                f"optimizer step {self._num_steps + 1} was not taken: loss {total_loss}, gradient norm {norm}"
            )
        clip(self._optimizer, norm)
        learning_rate = float(get_canonical_lr_for_logging(self._optimizer.param_groups))
        self._optimizer.step_with_ready_grads()
        self._schedule.step(1)
        self._num_steps += 1
        return OptimizerStep(loss=total_loss, grad_norm=norm, learning_rate=learning_rate)

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], model: Model) -> list[TokenScores]:
        """Return the scores of each micro-batch without gradient, zero where no token counts, on every stage."""
        found: list[TokenScores] = []

        def scored(batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
            found.append(scores_BT)
            return scores_BT.logprobs.sum()

        pipeline = self._pipelines[model]
        pipeline.run(pipeline.rows(micro_batches), scored, forward_only=True)
        if self._settings.sizes.pp == 1:
            return found
        shapes = [batch.token_ids_BT.shape for batch in micro_batches]
        numbers = len(TokenScores._fields)
        flat = torch.empty(numbers * sum(shape.numel() for shape in shapes), dtype=torch.float32, device=self.device)
        if found:
            torch.cat([values_BT.flatten() for scores_BT in found for values_BT in scores_BT], out=flat)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(flat, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        parts = torch.split(flat, [numbers * shape.numel() for shape in shapes])
        return [TokenScores(*part.view(numbers, *shape)) for part, shape in zip(parts, shapes, strict=True)]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the replicas: of each, what its last stage has counts, once."""
        is_heard = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        total = values.detach().to(self.device, copy=True)
        if not is_heard:
            total.zero_()
        dist.all_reduce(total)
        return total

    def weights(self) -> Weights:
        """Return the weights this rank holds: the memory that it trains in."""
        return self._weights.shared

    def save(self, folder: Path) -> Writing:
        """Copy the policy, in the precision of the parameters, and the optimizer's state, and begin to write them.

        Raises `CheckpointError` for an optimizer whose state cannot be saved.
        """
        return checkpoints.save(folder, self._described, self._weights, self._optimizer, self._num_steps, self._config)

    def offload(self) -> None:
        """Move gradients and the optimizer's state from the GPU to host memory; on a CPU that is where they are."""
        if self.device.type == "cpu" or self._offloaded is not None:
            return
        for chunk in self._policy:
            chunk.offload_grad_buffers()
        self._offloaded = Offloaded(state_of(self._optimizer, self._policy))

    def reload(self) -> None:
        """Take back what `offload` gave up, to tensors that are the same as before."""
        if self._offloaded is None:
            return
        for chunk in self._policy:
            chunk.restore_grad_buffers()
        self._offloaded.reload()
        self._offloaded = None

    def close(self) -> None:
        """Release models and optimizer, and leave Megatron-Core's groups."""
        self._pipelines.clear()
        self._policy.clear()
        del self._weights, self._optimizer, self._schedule
        parallel_state.destroy_model_parallel()

    def _build(self) -> tuple[list[Chunk], RankWeights]:
        """Return a model's chunks on this rank, and what fills them."""
        made = build_chunks(self._config, self._model, self._settings)
        chunks: list[Chunk] = [chunk.to(self.device) for chunk in made]
        return chunks, RankWeights(chunks, self._settings.sizes, self._shape)

    def _pipeline(self, chunks: Sequence[torch.nn.Module]) -> Pipeline:
        return Pipeline(
            chunks, self._settings.sizes, self._shape.known.vocabulary_size, self._config.scoring_temperature
        )

    def _reference(self) -> Pipeline:
        chunks, weights = self._build()
        weights.load(open_tensors(self._config.policy.model_name, self._config))
        return self._pipeline([chunk.requires_grad_(False).eval() for chunk in chunks])

    def _num_tokens(self, here: int) -> int:
        """Return the tokens of all rows of all replicas: each rank of context parallelism has its share."""
        total = torch.tensor(here, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return int(total)

    def _balancing_biases(self) -> list[torch.Tensor]:
        """Return what balances experts without a gradient, and changes before a step is known to be good."""
        buffers = (item for chunk in self._policy for item in chunk.named_buffers())
        return [buffer for name, buffer in buffers if name.endswith("router.expert_bias")]
