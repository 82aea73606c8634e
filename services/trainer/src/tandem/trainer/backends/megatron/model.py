"""A rank's part of the model: the chunks that Megatron-Core's pipeline runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear

from tandem.config.schema import ModelConfig
from tandem.config.schema.columns import Head
from tandem.refit.adapters.geometry import SCALAR_HEAD, biased_projections
from tandem.trainer.backends.megatron.architecture import embedding_arguments, geometry_in
from tandem.trainer.backends.megatron.layers import layers_of
from tandem.trainer.backends.megatron.routing import replay_routes
from tandem.trainer.backends.megatron.settings import VOCABULARY_DIVISOR, MegatronSettings


class LayerChunk(GPTModel):  # type: ignore[misc]
    """Some consecutive layers of a model, with the embedding before the first ones.

    The last ones are followed only by the final norm. ``forward`` returns hidden states ``[N, 1, E]``, and the output
    layer is only a weight for scoring tokens.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, ``[V / tp, E]``. On the last stage only."""
        weight: torch.Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight


class ScalarChunk(LayerChunk):
    """A chunk with a layer that makes one number from a hidden state, in place of the output layer.

    Every tensor-parallel rank of the last stage has all of it.
    """

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            dtype = self.output_layer.weight.dtype
            del self.output_layer
            head = torch.nn.Linear(self.config.hidden_size, 1, bias=has_bias, dtype=dtype)
            self.add_module(SCALAR_HEAD, head)

    @property
    def head(self) -> torch.nn.Module:
        """The layer that makes one number from a hidden state. On the last stage only."""
        head: torch.nn.Module = getattr(self, SCALAR_HEAD)
        return head


def build_chunks(
    section: ModelConfig,
    model: Mapping[str, Any],
    settings: MegatronSettings,
    head: Head = "vocabulary",
    make: Callable[..., LayerChunk] | None = None,
) -> list[LayerChunk]:
    """Return this rank's chunks, without values in their parameters. Call it in the model's
    `tandem.trainer.backends.megatron.groups.RankDivision`.

    Args:
        section: the model's section of the configuration.
        model: the Hugging Face configuration of the model.
        settings: settings that follow from the section.
        head: head on top of the last layers.
        make: what makes a chunk, in place of a class of this module.

    Raises:
        ModelError: Megatron-Core does not support the model.
    """
    sizes = settings.sizes
    multiple = VOCABULARY_DIVISOR * sizes.tp
    num_rows = -(-geometry_in(model).vocabulary_size // multiple) * multiple
    if make is None:
        make = LayerChunk if head == "vocabulary" else functools.partial(ScalarChunk, has_bias=head == "value")
    chunks = []
    for number in range(sizes.vpp):
        stage = number if sizes.vpp > 1 else None
        chunk = make(
            config=settings.transformer,
            transformer_layer_spec=layers_of(settings.transformer, biased_projections(model), stage),
            vocab_size=num_rows,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
            **embedding_arguments(model),
        )
        if section.router_replay.enabled:
            replay_routes(chunk)
        _mark(chunk, freezes_routers=section.megatron_cfg.freeze_moe_router)
        if chunk.pre_process and (padding := model.get("pad_token_id")) is not None:
            chunk.embedding.word_embeddings.register_forward_hook(functools.partial(_leave_padding, padding))
        chunks.append(chunk)
    return chunks


def _leave_padding(padding: int, module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Give the padding token no gradient where it is read, as torch's ``padding_idx`` does in Transformers' models.

    Its embedding begins with zeros. A norm divides by their size, so that a model which draws the token would have
    gradients of it that hide all others.
    """
    is_padding_BT = inputs[0] == padding
    if module.reduce_scatter_embeddings:  # sequence first, and of it this rank's share
        group = module.tp_group
        is_padding_BT = is_padding_BT.T.chunk(group.size())[group.rank()]
    return torch.where(is_padding_BT[..., None], output.detach(), output)


def _mark(chunk: LayerChunk, *, freezes_routers: bool) -> None:
    """Mark the parameters that are not trained, and those with gradients to sum over tensor-parallel ranks."""
    for module in chunk.modules():
        if isinstance(module, Linear):
            module.weight.sequence_parallel = chunk.config.sequence_parallel
    for name, parameter in chunk.named_parameters():
        if freezes_routers and name.endswith("router.weight"):
            parameter.requires_grad_(False)
