"""One model that a rank of the DTensor backend holds: policy, reference, value model, teacher.

The same code builds, shards, trains, saves and resumes each of them, and scores with it. The model's section of the
configuration has the settings, and the algorithm's declaration the models to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from tandem.common.errors import CheckpointError, ConfigError, ModelError, NotFiniteError
from tandem.common.segments import sliding_windows
from tandem.config import Config
from tandem.config.models.lora import is_adapter, tensor_name
from tandem.config.models.vision_families import family_of
from tandem.config.schema import columns
from tandem.config.schema.adapters import LoraCfg
from tandem.samples.model_files import load_tokenizer
from tandem.samples.routed_experts import replayed_experts
from tandem.trainer import context, shards
from tandem.trainer.attention import prepare_to_pack, prepare_to_share, use_attention
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep
from tandem.trainer.backends import optimizer_state
from tandem.trainer.backends.offload import Offloaded, state_of
from tandem.trainer.backends.scores import function_of_scores
from tandem.trainer.backends.sharding import Ranks
from tandem.trainer.dropout import Place
from tandem.trainer.files import adapter_files, checkpoints, policy_files
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.models import checkpoint_activations, has_linear_head, load_model, load_scalar_model
from tandem.trainer.optimizers import advance, make_optimizer, make_scheduler
from tandem.trainer.routing import RoutingReplay
from tandem.trainer.scorers import ScalarScorer, Scorer, TokenScorer, TopScorer
from tandem.trainer.scoring import Scores

if TYPE_CHECKING:
    from tandem.trainer.backends.pictures import Pictures


class HeldModel:
    """A rank's part of one model, with its scorer, and its optimizer if it is trained.

    It starts from the ``model_name`` of its section or, if it is trained and there is one, from a checkpoint. Raises
    `ModelError`, `ConfigError` or `CheckpointError`.
    """

    def __init__(
        self, name: columns.Model, config: Config, ranks: Ranks, *, checkpoint: Path | None, number: int = 0
    ) -> None:
        """Load and shard the model. If it is trained, `start` makes its optimizer. Collective.

        `number` selects one of several models of the name.
        """
        self.name = name
        self._config, self._ranks = config, ranks
        self._settings = settings = config.settings_of(name, number)
        self.is_trained = name in config.declaration.trains
        self._head = config.declaration.head_of(name)
        self.device = ranks.device
        self._adapters = settings.dtensor_cfg.lora_cfg if name == "policy" and settings.adapters is not None else None
        trains_all = self.is_trained and self._adapters is None
        source = settings.model_name if checkpoint is None or not trains_all else str(checkpoint / name)
        # Trained parameters are float32, whatever the precision of the passes.
        model = self._load(source, torch.float32 if trains_all else getattr(torch, settings.precision))
        linear_head = self._head == "vocabulary" and has_linear_head(model)
        self.shares_prompts = self._prepare_attention(model)
        if not self.is_trained:
            model.requires_grad_(False)
        self._pictures = self._see(model, freezes=trains_all)
        self._place: Place | None = None
        """The present place in the run for dropout masks; None without dropout."""
        if self._adapters is not None:
            self._described = self._adapt(model, self._adapters, checkpoint)
        recomputes = settings.activation_checkpointing_enabled or settings.dtensor_cfg.activation_checkpointing
        recomputes = self.is_trained and recomputes
        compiles_attention = settings.compile and self._has_kernel_of_rows()
        if settings.compile:
            from tandem.trainer.backends.compiling import compile_layers  # it imports torch's compiler

            compile_layers(model, with_attention=compiles_attention, recomputes=recomputes)
        elif recomputes:
            checkpoint_activations(model)
        ranks.shard(model, settings)
        self.model = model
        self.parameters: dict[str, torch.nn.Parameter] = {
            tensor_name(name): parameter for name, parameter in model.named_parameters()
        }
        self.buffers = policy_files.saved_buffers(model)
        """Buffers, whole on every rank and never trained."""
        group = ranks.context.get_group() if ranks.context.size() > 1 else None
        self._scorer = self._make_scorer(model, group, linear_head=linear_head)
        self._scorer.compiles_attention = compiles_attention
        self.optimizer: torch.optim.Optimizer
        """The optimizer of a trained model."""
        self.num_steps = 0
        self._offloaded: Offloaded | None = None

    def _has_kernel_of_rows(self) -> bool:
        """Tell whether attention is one kernel (`tandem.common.segments.attend_on_gpu`) for all micro-batches."""
        is_packed = self._config.policy.sequence_packing.enabled and self._ranks.context.size() == 1
        takes_it = self.device.type == "cuda" and self._settings.precision == "bfloat16" and self._pictures is None
        return is_packed and takes_it

    def _make_scorer(self, model: Any, group: dist.ProcessGroup | None, *, linear_head: bool) -> Scorer:
        if self._head != "vocabulary":
            return ScalarScorer(model, context=group)
        config = self._config
        temperature = config.scoring_temperature
        if self.name == "teacher" and config.topk_logits_k:
            return TopScorer(
                model,
                temperature,
                num=config.topk_logits_k,
                linear_head=linear_head,
                context=group,
                pictures=self._pictures,
                undrawable=() if self._pictures is None else self._pictures.undrawable,
            )
        return TokenScorer(
            model,
            temperature,
            linear_head=linear_head,
            context=group,
            learns_entropy=config.learns_entropy,
            replay=self._replay(model),
            pictures=self._pictures,
            undrawable=() if self._pictures is None else self._pictures.undrawable,
            score=function_of_scores(self._settings),
        )

    def start(self, checkpoint: Path | None) -> None:
        """Make the optimizer and its schedule, from a checkpoint if given. Collective. Raises `CheckpointError`."""
        if checkpoint is None:
            self._start_optimizer(num_steps=0)
        else:
            self._load_optimizer(checkpoint)

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> OptimizerStep:
        """Take an optimizer step, as `tandem.trainer.backend.Backend.train_step` does. Raises `NotFiniteError`."""
        return self.take_step(self.add_gradient(micro_batches, loss), self._settings.max_grad_norm)

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of the loss of these micro-batches on all ranks to what there is. Return the loss."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            self._communicate(last=index == len(micro_batches) - 1)
            if self._place is not None:
                self._place.enter(self.num_steps, index)
            value = loss(batch, self._scorer(batch))
            # FSDP2 averages gradients over the ranks, but the loss is a sum.
            torch.autograd.backward(value * self._ranks.num_shards)
            total += value.detach()
        if self._place is not None:
            self._place.leave()
        return float(self._ranks.sum_over_replicas(total)[0])

    def take_step(self, loss: float, max_grad_norm: float | None) -> OptimizerStep:
        """Clip the gradient, which is that of `loss`, step, and forget it. Raises `NotFiniteError`."""
        grad_norm = self._clip(max_grad_norm)
        if not (abs(loss) < float("inf") and grad_norm < float("inf")):
            self.optimizer.zero_grad(set_to_none=True)
            of_model = "" if self.name == "policy" else f" of the {self.name} model"
            raise NotFiniteError(
                f"optimizer step {self.num_steps + 1}{of_model} was not taken: loss {loss}, gradient norm {grad_norm}"
            )
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        advance(self.scheduler)
        self.num_steps += 1
        return OptimizerStep(loss=loss, grad_norm=grad_norm, learning_rate=learning_rate)

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter that the optimizer changes, by reference."""
        return {name: shards.local_of(parameter) for name, parameter in self._trained().items()}

    def forget_steps(self) -> None:
        """Make a new optimizer, without state, as if no step had been taken; forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self._start_optimizer(num_steps=0)

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], *, as_reference: bool = False) -> list[Scores]:
        """Return the model's scores of each micro-batch without gradient, zero for tokens that are not valid.

        Args:
            micro_batches: micro-batches to score.
            as_reference: whether to score as if the model's adapters, which it must have, had never been trained.
        """
        with self._without_adapters() if as_reference else nullcontext():
            found = [self._scorer(batch) for batch in micro_batches]
        for module in _fsdp_modules(self.model):
            module.reshard()  # by itself, only a backward pass would do it
        return found

    def state(self) -> checkpoints.State:
        """Return the contents of a checkpoint. The schedule needs only the number of steps."""
        parts = partial(optimizer_state.parts_of, self._optimizer_tensors())
        if self._adapters is not None:
            trained = self._trained()
            gathered, num_bytes = adapter_files.gathered(trained), sum(each.nbytes for each in trained.values())
            return checkpoints.State(self.model, gathered, num_bytes, parts, self.num_steps, self._described)
        gathered = policy_files.gathered(self.model, self.parameters)
        num_bytes = sum(parameter.nbytes for parameter in self.parameters.values())
        return checkpoints.State(self.model, gathered, num_bytes, parts, self.num_steps)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint, bit for bit, in the parameters' own memory."""
        held: dict[str, torch.Tensor] = {**self._trained()}
        if self._adapters is not None:
            shapes = {name: parameter.shape for name, parameter in held.items()}
            tensors = adapter_files.read(folder / self.name, self._adapters, shapes)
        else:
            held |= self.buffers
            tensors = self._whole_tensors(folder)
        for name, parameter in held.items():
            shards.local_of(parameter).copy_(tensors[name][shards.box_of(parameter).region])
        self._load_optimizer(folder)

    def _whole_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint of a model that is trained whole. Raises `CheckpointError`."""
        try:
            loaded = self._load(str(folder / self.name), torch.float32)
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        tensors: dict[str, torch.Tensor] = loaded.state_dict()
        for name, parameter in (self.parameters | self.buffers).items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise CheckpointError(f"{folder} is a checkpoint of another model: {name} differs")
        return tensors

    def offload(self) -> None:
        """Free the gradients and move the optimizer's state from the GPU to pinned host memory.

        Also move the parameters, unless engines may be reading them. On a CPU, all of it is already in host memory, and
        only the gradients are freed.
        """
        if self.is_trained:
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu" and self._offloaded is None:
            self._offloaded = Offloaded(self.movable())

    def movable(self) -> list[torch.Tensor]:
        """Return this rank's tensors on its device that are only needed to train, or score with, the model."""
        parameters = () if self.name == "policy" else self.parameters.values()
        here = [shards.local_of(each) for each in parameters if each.device.type == self.device.type]
        return [*(state_of(self.optimizer, self.device) if self.is_trained else ()), *here]

    def reload(self) -> None:
        """Move back the offloaded tensors, which are the same as before."""
        if self._offloaded is not None:
            self._offloaded.reload()
            self._offloaded = None

    def _load(self, source: str, dtype: torch.dtype) -> Any:
        if self._head == "vocabulary":
            return load_model(source, self._settings, dtype)
        model = load_scalar_model(source, self._settings, dtype, self._head)
        if self._head == "score":
            # Loaders tell padding by it, and so find the token with the score.
            model.config.pad_token_id = load_tokenizer(self._config).pad_id
        return model

    def _adapt(self, model: Any, adapters: LoraCfg, checkpoint: Path | None) -> adapter_files.Described:
        """Give a whole model adapters, from a checkpoint, from ``restore_from``, or new; describe them."""
        from tandem.trainer import lora  # PEFT takes seconds to import

        linear = lora.linear_layers(model)
        layers = lora.inject(model, adapters, self._config.algorithm_section.seed)
        if adapters.dropout:
            ranks = self._ranks
            self._place = Place(
                self._config.algorithm_section.seed, ranks.sequences_rank, ranks.tensor.get_local_rank()
            )
            lora.add_dropout(model, adapters, self._place)
        source = checkpoint / self.name if checkpoint is not None else adapters.restore_from
        if source is not None:
            found = {name: each for name, each in lora.parameters_of(model).items() if is_adapter(name)}
            shapes = {name: parameter.shape for name, parameter in found.items()}
            lora.fill(model, adapter_files.read(Path(source), adapters, shapes))
        has_experts = lora.has_experts(model)
        return adapter_files.Described(self._settings.model_name, adapters, layers, linear, has_experts)

    def _without_adapters(self) -> AbstractContextManager[None]:
        from tandem.trainer import lora

        return lora.switched_off(self.model)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that an optimizer changes."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def _prepare_attention(self, model: Any) -> bool:
        """Make the model take packed rows, its share of each sequence, or shared prompts, as configured.

        Return whether it takes shared prompts, with a notice if it should and cannot. Raises `ConfigError` if it cannot
        take packed rows, or its share.
        """
        settings, is_shared = self._settings, self._ranks.context.size() > 1
        by_tokens = settings.sequence_packing.enabled or settings.dynamic_batching.enabled
        wants_prompts = self._config.declaration.shares_prompts and settings.share_prompts and not by_tokens
        name, longest, reason = type(model).__name__, settings.max_total_sequence_length, None
        section = "policy" if self.name == "reference" else self.name
        if is_shared or settings.sequence_packing.enabled:
            reason = prepare_to_pack(model, longest)
            if reason is not None:
                key, what = "sequence_packing.enabled", "packed rows"
                if is_shared:
                    key, what = "dtensor_cfg.context_parallel_size", "parts of sequences"
                raise ConfigError(f"{section}.{key}: {name} cannot take {what}: {reason}")
            if is_shared:
                use_attention(model, context.ATTENTION_NAME)
                reason = f"{section}.dtensor_cfg.context_parallel_size makes ranks share each sequence"
        else:
            if wants_prompts:
                reason = prepare_to_share(model, longest)
                reason = None if reason is None else f"{name} cannot share: {reason}"
            if not wants_prompts or reason is not None:
                self._avoid_masks(model, section)
        if wants_prompts and reason is not None and self.is_trained and dist.get_rank() == 0:
            print(f"{section}.share_prompts has no effect: {reason}", flush=True)
        return wants_prompts and reason is None

    def _see(self, model: Any, *, freezes: bool) -> Pictures | None:
        """Give a whole model pictures if it sees. Freeze the parts that the configuration names, if `freezes`."""
        family = family_of(self._settings)
        if family is None:
            return None
        from tandem.trainer.backends import pictures  # text runs need none of it

        if freezes:
            pictures.freeze(model, family, self._settings.dtensor_cfg)
        return pictures.Pictures(self._config, self._settings, family, model, self._ranks)

    def _replay(self, model: Any) -> RoutingReplay | None:
        """Send tokens to the experts that an engine chose, if configured. Raises `ModelError` if impossible."""
        if replayed_experts(self._config, self.name) is None:
            return None
        tensor, is_cut = self._ranks.tensor, self._settings.dtensor_cfg.sequence_parallel
        return RoutingReplay(model, (tensor.get_local_rank(), tensor.size()) if is_cut else (0, 1))

    def _avoid_masks(self, model: Any, section: str) -> None:
        """Let a model with sliding attention compute it without a mask of all pairs of tokens, if it can.

        Under sequence parallelism it must, since it would make a mask for its share of the row. Raises `ConfigError`.
        """
        if not any(sliding_windows(model.config.get_text_config())):
            return
        reason = prepare_to_pack(model, self._settings.max_total_sequence_length)
        if reason is not None and self._settings.dtensor_cfg.sequence_parallel:
            key = f"{section}.dtensor_cfg.sequence_parallel"
            raise ConfigError(f"{key}: {type(model).__name__} cannot take parts of sequences: {reason}")

    def _communicate(self, *, last: bool) -> None:
        """Reduce gradients once an optimizer step, if host memory can hold them whole until then.

        On several GPUs every backward pass is a last one to FSDP2. After others it keeps whole gradients of the
        embedding and the output layer in float32 through the next forward pass: 4.2 GB of an 8B model.
        """
        if not isinstance(self.model, FSDPModule) or (self.device.type != "cpu" and self._ranks.num_shards > 1):
            return
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        self.model.set_is_last_backward(last)

    def _clip(self, max_grad_norm: float | None) -> float:
        """Scale the gradients down to a norm; return their norm before."""
        norm = shards.norm_of(parameter.grad for parameter in self.parameters.values() if parameter.grad is not None)
        if max_grad_norm is not None:
            for parameters in self._ranks.together(self.parameters.values()):
                torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return float(norm)

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


def _fsdp_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
