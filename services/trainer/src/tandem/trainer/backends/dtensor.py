"""The DTensor backend: FSDP2, with tensor and context parallelism.

Parameters are float32 whatever the precision of the passes; on the CPU they lie in shared memory for as long as the
backend lives, at the same addresses, so that engines can copy straight out of them or read them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.common.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tandem.refit.endpoint import Weights
from tandem.trainer import checkpoints, context, policy_files
from tandem.trainer.attention import prepare_to_pack, prepare_to_share
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, Writing
from tandem.trainer.backends import optimizer_state, shards
from tandem.trainer.backends.devices import device_of
from tandem.trainer.backends.sharding import Ranks
from tandem.trainer.models import TokenScorer, checkpoint_activations, has_linear_head, load_model
from tandem.trainer.offload import Offloaded, state_of
from tandem.trainer.optimizers import advance, make_optimizer, make_scheduler
from tandem.trainer.packing import MicroBatch
from tandem.trainer.scoring import TokenScores


class DTensorBackend:
    """One rank of the default process group; obeys `tandem.trainer.backend.Backend`.

    The policy starts from ``policy.model_name`` or, where given, from a checkpoint of Tandem. The reference, which
    exists only if the loss reads it, is always ``policy.model_name``: the policy before any training.

    Raises `ModelError`, `ConfigError` (optimizer or schedule) or `CheckpointError`.
    """

    def __init__(self, config: Config, *, checkpoint: Path | None) -> None:
        self._config = config
        self.device = device_of(dist.get_rank())
        self._ranks = Ranks(config, self.device.type)
        self.data_parallel_rank = self._ranks.data.get_local_rank()
        self.data_parallel_size = self._ranks.data.size()
        self.sequence_divisor = self._ranks.sequence_divisor
        self._dtype: torch.dtype = getattr(torch, config.policy.precision)

        source = config.policy.model_name if checkpoint is None else str(checkpoint / checkpoints.POLICY)
        proof = checkpoints.Proof(checkpoints.files_to_load(config, checkpoint))
        self._policy = load_model(source, config, torch.float32)
        self._linear_head = has_linear_head(self._policy)
        self.shares_prompts = self._prepare_attention()
        if config.policy.activation_checkpointing_enabled or config.policy.dtensor_cfg.activation_checkpointing:
            checkpoint_activations(self._policy)
        self._ranks.shard(self._policy, self._dtype)
        self._offloaded: Offloaded | None = None
        self._scorers = {"policy": self._scorer(self._policy)}
        self._parameters: dict[str, torch.Tensor] = dict(self._policy.named_parameters())
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters.values())
        shards.share(self._parameters)
        if config.needs_reference:
            self._scorers["reference"] = self._reference()
        if checkpoint is None:
            self._start_optimizer(num_steps=0)
        else:
            self._load_optimizer(checkpoint)
        proof.conclude()

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> OptimizerStep:
        """Forward and backward over this rank's micro-batches, clip, and step optimizer and schedule once.

        Raises `TrainingError`, before anything has changed, if the loss or the gradient is no finite number.
        """
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            self._communicate(last=index == len(micro_batches) - 1)
            value = loss(batch, self._scorers["policy"](batch))
            # FSDP2 averages gradients over the ranks; the loss is a sum.
            torch.autograd.backward(value * self._ranks.num_shards)
            total += value.detach()
        total_loss = float(self.sum_over_ranks(total)[0])
        grad_norm = self._clip()
        if not (abs(total_loss) < float("inf") and grad_norm < float("inf")):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"optimizer step {self._num_steps + 1} was not taken: loss {total_loss}, gradient norm {grad_norm}"
            )
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        advance(self._scheduler)
        self._num_steps += 1
        return OptimizerStep(loss=total_loss, grad_norm=grad_norm, learning_rate=learning_rate)

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], model: Model) -> list[TokenScores]:
        """Return the scores of each micro-batch without gradient, zero where no token counts."""
        scorer = self._scorers[model]
        found = [scorer(batch) for batch in micro_batches]
        for module in _fsdp_modules(scorer.model):
            module.reshard()  # only a backward pass would do it by itself
        return found

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the data-parallel ranks."""
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total, group=self._ranks.data.get_group())
        return total

    def weights(self) -> Weights:
        """Return the shards this rank holds: the memory that it trains in."""
        return shards.weights_of(self._parameters)

    def save(self, folder: Path) -> Writing:
        """Copy the policy, in float32, and the optimizer's state, and begin to write them.

        Rank 0 gathers the policy a layer at a time. Raises `CheckpointError` for an optimizer that keeps anything but
        tensors.
        """
        return checkpoints.save(folder, self._state(), self._config)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit, on any number of ranks, in the memory the parameters lie in."""
        proof = checkpoints.Proof(checkpoints.files_of(folder))
        try:
            loaded = load_model(str(folder / checkpoints.POLICY), self._config, torch.float32)
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        tensors = dict(loaded.named_parameters())
        for name, parameter in self._parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise CheckpointError(f"{folder} is a checkpoint of another model: {name} differs")
        for name, parameter in self._parameters.items():
            shards.local_of(parameter).copy_(tensors[name][shards.box_of(parameter).region])
        self._load_optimizer(folder)
        proof.conclude()

    def offload(self) -> None:
        """Free the gradients and move the optimizer's state from the GPU to pinned host memory.

        On a CPU that is where the state already lies: there only the gradients go.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu" and self._offloaded is None:
            self._offloaded = Offloaded(state_of(self._optimizer, self.device))

    def reload(self) -> None:
        """Move the optimizer's state back, to tensors that are the same as before."""
        if self._offloaded is not None:
            self._offloaded.reload()
            self._offloaded = None

    def close(self) -> None:
        """Release models and optimizer; the process group belongs to whoever made it."""
        self._scorers.clear()
        self._parameters.clear()
        del self._policy, self._optimizer, self._scheduler

    def _reference(self) -> TokenScorer:
        model = load_model(self._config.policy.model_name, self._config, self._dtype).requires_grad_(False)
        model.set_attn_implementation(self._policy.config._attn_implementation)
        self._ranks.shard(model, self._dtype)
        return self._scorer(model)

    def _scorer(self, model: Any) -> TokenScorer:
        ranks = self._ranks.context
        group = ranks.get_group() if ranks.size() > 1 else None
        return TokenScorer(model, self._config.scoring_temperature, linear_head=self._linear_head, context=group)

    def _prepare_attention(self) -> bool:
        """Make the policy take packed rows, its share of each sequence, or shared prompts, as is wanted.

        Return whether it takes shared prompts; say so if it should and cannot. Raises `ConfigError` if it cannot take
        packed rows, or its share.
        """
        policy, is_shared = self._config.policy, self._ranks.context.size() > 1
        by_tokens = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
        wants_prompts = self._config.declaration.shares_prompts and policy.share_prompts and not by_tokens
        name, longest, reason = type(self._policy).__name__, policy.max_total_sequence_length, None
        if is_shared or policy.sequence_packing.enabled:
            reason = prepare_to_pack(self._policy, longest)
            if reason is not None:
                key, what = "sequence_packing.enabled", "packed rows"
                if is_shared:
                    key, what = "dtensor_cfg.context_parallel_size", "parts of sequences"
                raise ConfigError(f"policy.{key}: {name} cannot take {what}: {reason}")
            if is_shared:
                self._policy.set_attn_implementation(context.ATTENTION_NAME)
                reason = "policy.dtensor_cfg.context_parallel_size makes ranks share each sequence"
        elif wants_prompts:
            reason = prepare_to_share(self._policy, longest)
            reason = None if reason is None else f"{name} cannot share: {reason}"
        if wants_prompts and reason is not None and dist.get_rank() == 0:
            print(f"policy.share_prompts has no effect: {reason}", flush=True)
        return wants_prompts and reason is None

    def _communicate(self, *, last: bool) -> None:
        """Reduce gradients once an optimizer step, where host memory can hold them whole until then."""
        if not isinstance(self._policy, FSDPModule):
            return
        if self.device.type == "cpu":
            self._policy.set_requires_gradient_sync(last)
            self._policy.set_reshard_after_backward(last)
        self._policy.set_is_last_backward(last)

    def _clip(self) -> float:
        """Scale the gradients down to ``policy.max_grad_norm``; return the norm they had."""
        norm = shards.norm_of(parameter.grad for parameter in self._parameters.values() if parameter.grad is not None)
        if self._config.policy.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.policy.max_grad_norm, norm)
        return float(norm)

    def _state(self) -> checkpoints.State:
        """Return what a checkpoint is made of: the schedule needs only the number of steps."""
        gathered = policy_files.gathered(self._policy, self._parameters)
        num_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        parts = partial(optimizer_state.parts_of, self._optimizer_tensors())
        return checkpoints.State(self._policy, gathered, num_bytes, parts, self._num_steps)

    def _optimizer_tensors(self) -> dict[str, Any]:
        """Return the optimizer's state, by reference."""
        if not self._num_steps:  # no step, no state
            return {}
        return {"state": get_optimizer_state_dict(self._policy, self._optimizer)["state"]}

    def _start_optimizer(self, num_steps: int) -> None:
        """Make a new optimizer, without state, and its schedule as it stands after `num_steps`."""
        settings = self._config.policy.optimizer
        assert settings is not None, "the configuration's checks require an optimizer"
        self._optimizer = make_optimizer(settings, self._policy.parameters())
        self._scheduler = make_scheduler(self._config.policy.scheduler, self._optimizer)
        advance(self._scheduler, num_steps)
        self._num_steps = num_steps
        self._offloaded = None

    def _load_optimizer(self, folder: Path) -> None:
        self._start_optimizer(checkpoints.agree(lambda: checkpoints.read_num_steps(folder)))
        if self._num_steps:
            tensors = self._optimizer_tensors()  # of the right names, shapes and sharding, filled with anything
            checkpoints.agree(lambda: checkpoints.read_optimizer(folder, partial(optimizer_state.read, tensors)))


def _fsdp_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
