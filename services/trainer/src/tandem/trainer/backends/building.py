"""The building of a model by the DTensor backend: loaded, adapted, compiled, sharded, with a scorer.

The model's section of the configuration has the settings, and the algorithm's declaration the models to train.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tandem.common.attention.settings import find_sliding_windows
from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config
from tandem.config.models.families import is_text_only
from tandem.config.models.lora import is_adapter
from tandem.config.schema import columns
from tandem.config.schema.adapters import LoraCfg
from tandem.samples.model_files import load_tokenizer
from tandem.samples.routed_experts import replayed_experts
from tandem.trainer import attention, context
from tandem.trainer.backends.holding import MediaOfModel, function_of_scores
from tandem.trainer.backends.sharding import RankMesh
from tandem.trainer.batching.masks import compares_whole
from tandem.trainer.dropout import DropoutPlace
from tandem.trainer.files import adapter_files
from tandem.trainer.models import checkpoint_activations, has_linear_head, load_model, load_scalar_model, scalar_head
from tandem.trainer.routing import RoutingReplay
from tandem.trainer.scorers.likeliest import TopScorer
from tandem.trainer.scorers.scorer import HeadTask, ModelScorer, TokenScorer
from tandem.trainer.scores import Scores, TokenValues


class BuiltModel(NamedTuple):
    """A rank's part of a model that is ready to score."""

    model: Any
    scorer: ModelScorer
    shares_prompts: bool
    """Whether it takes a `tandem.trainer.micro_batches.MicroBatch.row` with shared prompts."""
    adapters: adapter_files.AdapterDescription | None
    """Its adapters, which alone are trained; None without them."""
    place: DropoutPlace | None
    """The present place in the run for dropout masks; None without dropout."""
    start: Mapping[str, torch.Tensor] | None
    """The whole adapters that training starts from, if a reference is read that has them; else None."""


class ModelBuilder:
    """Builds one model as its section of the configuration says."""

    token_scorer: type[TokenScorer] = TokenScorer

    def __init__(self, name: columns.Model, config: Config, ranks: RankMesh, number: int = 0) -> None:
        """Prepare to build; `number` selects one of several models of the name."""
        self.name = name
        self._config, self._ranks = config, ranks
        self._settings = config.settings_of(name, number)
        self._is_trained = name in config.declaration.trains
        self._head = config.declaration.head_of(name)
        has_adapters = name == "policy" and self._settings.adapters is not None
        self._adapters = self._settings.dtensor_cfg.lora_cfg if has_adapters else None
        self._media: MediaOfModel | None = None
        self._place: DropoutPlace | None = None
        self._start: dict[str, torch.Tensor] | None = None

    def build(self, checkpoint: Path | None) -> BuiltModel:
        """Load the model, from a checkpoint if it is trained and there is one, and shard it.

        Collective. Raises `ModelError`, `ConfigError` or `CheckpointError`.
        """
        settings, ranks = self._settings, self._ranks
        trains_all = self._is_trained and self._adapters is None
        source = settings.model_name if checkpoint is None or not trains_all else str(checkpoint / self.name)
        # Trained parameters are float32, whatever the precision of the passes.
        model = self.load(source, torch.float32 if trains_all else getattr(torch, settings.precision))
        if (reason := attention.explain_lookahead(model)) is not None:
            raise ModelError(f"{settings.model_name}: {type(model).__name__} cannot be trained: {reason}")
        linear_head = self._head == "vocabulary" and has_linear_head(model)
        shares_prompts = self._prepare_attention(model)
        if not self._is_trained:
            model.requires_grad_(False)
        self._media = self._attach_media(model, freezes=trains_all)
        adapters = None if self._adapters is None else self._adapt(model, self._adapters, checkpoint)
        recomputes = settings.activation_checkpointing_enabled or settings.dtensor_cfg.activation_checkpointing
        recomputes = self._is_trained and recomputes
        compiles_attention = settings.compile and self._has_kernel_of_rows()
        if settings.compile:
            from tandem.trainer.backends.compiling import compile_layers  # it imports torch's compiler

            compile_layers(model, with_attention=compiles_attention, recomputes=recomputes)
        elif recomputes:
            checkpoint_activations(model)
        ranks.shard(model, settings)
        group = ranks.context.get_group() if ranks.context.size() > 1 else None
        scorer = self._make_scorer(model, group, linear_head=linear_head)
        scorer.compiles_attention = compiles_attention
        return BuiltModel(model, scorer, shares_prompts, adapters, self._place, self._start)

    def load(self, source: str, dtype: torch.dtype) -> Any:
        """Return the whole model of a folder or name. Raises `ModelError`."""
        if self._head == "vocabulary":
            return load_model(source, self._settings, dtype)
        model = load_scalar_model(source, self._settings, dtype, self._head)
        if self._head == "score":
            # Loaders tell padding by it, and so find the token with the score.
            model.config.pad_token_id = load_tokenizer(self._config).pad_id
        return model

    def _has_kernel_of_rows(self) -> bool:
        """Tell whether attention is one kernel for all micro-batches (`tandem.common.attention.segments`)."""
        is_packed = self._config.policy.sequence_packing.enabled and self._ranks.context.size() == 1
        takes_it = self._ranks.device.type == "cuda" and self._settings.precision == "bfloat16" and self._media is None
        return is_packed and takes_it

    def _make_scorer(self, model: Any, group: dist.ProcessGroup | None, *, linear_head: bool) -> ModelScorer:
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
                media=self._media,
                undrawable=() if self._media is None else self._media.undrawable,
                judged_by=config.weighs_teachers_by,
            )
        return self.token_scorer(
            model,
            temperature,
            linear_head=linear_head,
            context=group,
            learns_entropy=config.learns_entropy,
            needs_whole=compares_whole(config),
            replay=self._replay(model),
            media=self._media,
            undrawable=() if self._media is None else self._media.undrawable,
            score=function_of_scores(self._settings),
        )

    def _adapt(self, model: Any, adapters: LoraCfg, checkpoint: Path | None) -> adapter_files.AdapterDescription:
        """Give a whole model adapters, from a checkpoint, from ``restore_from``, or new; describe them."""
        from tandem.trainer import lora  # PEFT takes seconds to import

        described = lora.inject(model, adapters, self._config.algorithm_section.seed, self._settings.model_name)
        if adapters.dropout:
            ranks = self._ranks
            self._place = DropoutPlace(
                self._config.algorithm_section.seed, ranks.sequences_rank, ranks.tensor.get_local_rank()
            )
            lora.add_dropout(model, adapters, self._place)
        parameters = {name: each for name, each in lora.parameters_of(model).items() if is_adapter(name)}
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        keeps_start = self._config.needs_reference and adapter_files.change_start(adapters)
        if adapters.restore_from is not None and (checkpoint is None or keeps_start):
            lora.fill(model, adapter_files.read(Path(adapters.restore_from), described, shapes))
        if keeps_start:
            self._start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if checkpoint is not None:
            lora.fill(model, adapter_files.read(checkpoint / self.name, described, shapes))
        return described

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
            reason = attention.prepare_to_pack(model, longest)
            if is_shared and reason is None:
                reason = attention.explain_undivided(model)
            if reason is not None:
                key, input_form = "sequence_packing.enabled", "packed rows"
                if is_shared:
                    key, input_form = "dtensor_cfg.context_parallel_size", "parts of sequences"
                raise ConfigError(f"{section}.{key}: {name} cannot take {input_form}: {reason}")
            if is_shared:
                attention.use_attention(model, context.ATTENTION_NAME)
                reason = f"{section}.dtensor_cfg.context_parallel_size makes ranks share each sequence"
        else:
            if wants_prompts:
                reason = attention.prepare_to_share(model, longest)
                reason = None if reason is None else f"{name} cannot share: {reason}"
            if not wants_prompts or reason is not None:
                self._avoid_masks(model, section)
        if wants_prompts and reason is not None and self._is_trained and dist.get_rank() == 0:
            print(f"{section}.share_prompts has no effect: {reason}", flush=True)
        return wants_prompts and reason is None

    def _attach_media(self, model: Any, *, freezes: bool) -> MediaOfModel | None:
        """Give a whole model images, if it takes them. Freeze the parts that its section names, if `freezes`."""
        if is_text_only(self._settings):
            return None
        from tandem.trainer.backends import pictures  # text runs need none of it

        return pictures.attach(self._config, self._settings, model, self._ranks, freezes=freezes)

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
        if not any(find_sliding_windows(model.config.get_text_config())):
            return
        reason = attention.prepare_to_pack(model, self._settings.max_total_sequence_length)
        if reason is not None and self._settings.dtensor_cfg.sequence_parallel:
            key = f"{section}.dtensor_cfg.sequence_parallel"
            raise ConfigError(f"{key}: {type(model).__name__} cannot take parts of sequences: {reason}")


class ScalarScorer(ModelScorer):
    """The values of tokens: the output of `scalar_head` for the hidden state that predicts each."""

    def __init__(self, model: Any, *, context: dist.ProcessGroup | None = None) -> None:
        """Begin, as any scorer."""
        super().__init__(model, scalar_head(model), context)

    def _scores(self, inputs: dict[str, Any], task: HeadTask) -> Scores:
        return TokenValues(self.model(**inputs, use_cache=False).logits[:, 0].float())
