"""A rank's part of the model: the chunks that Megatron-Core's pipeline runs, and their layers.

The modules are Transformer Engine's if it is installed, or torch's own. A model may have dense layers and layers with
experts. Each chunk gets the specifications of only its layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tandem.config.schema import ModelConfig
from tandem.config.schema.columns import Head
from tandem.refit.adapters.geometry import SCALAR_HEAD, find_biased_projections
from tandem.trainer.backends.megatron import architecture, preparing, routing
from tandem.trainer.backends.megatron.attention import AttentionNorm, CoreAttention
from tandem.trainer.backends.megatron.releases import keep_norms, submodules_of
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
    num_rows = -(-architecture.geometry_in(model).vocabulary_size // multiple) * multiple
    if make is None:
        make = LayerChunk if head == "vocabulary" else functools.partial(ScalarChunk, has_bias=head == "value")
    chunks = []
    for number in range(sizes.vpp):
        stage = number if sizes.vpp > 1 else None
        chunk = make(
            config=settings.transformer,
            transformer_layer_spec=_layers_of(settings.transformer, find_biased_projections(model), stage),
            vocab_size=num_rows,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
            **architecture.embedding_arguments(model),
        )
        if section.router_replay.enabled:
            routing.replay_routes(chunk)
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


def _layers_of(transformer: TransformerConfig, biased: Set[str], stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this rank's chunk.

    Args:
        transformer: configuration of the whole model. Its ``moe_layer_freq`` is a list of the layers with experts.
        biased: linear layers with a bias, by the names of transformers. Megatron-Core handles those of queries, keys
            and values itself (``add_qkv_bias``), but has only one switch for the others.
        stage: number of the chunk among those of this rank; None if it has only one.
    """
    if preparing.HAS_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm, specs = TENorm, get_gpt_decoder_layer_specs(transformer, use_transformer_engine=True)
    else:
        norm, activation = _modules()
        dense, sparse = (
            _plain(transformer, num_experts, norm, activation) for num_experts in (None, transformer.num_moe_experts)
        )
        specs = [sparse if has_experts else dense for has_experts in transformer.moe_layer_freq]
    for layer in specs:
        _add_biases(layer, biased)
        keep_norms(layer.submodules.self_attention)
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    count = get_num_layers_to_build(transformer, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=norm)


def _modules() -> tuple[type[AttentionNorm], type | None]:
    """Return the norm of plain layers, and their activation if it is a module of its own."""
    if not preparing.has_kernels():
        return AttentionNorm, None
    from tandem.trainer.backends.megatron.on_cpu import kernels, norm

    return norm.CpuNorm, kernels.SwiGlu


def _plain(
    transformer: TransformerConfig, num_experts: int | None, norm: type[AttentionNorm], activation: type | None
) -> ModuleSpec:
    """Return a layer of Megatron-Core's own modules, with this project's norm and attention."""
    is_latent = transformer.multi_latent_attention
    has_norms = is_latent or transformer.qk_layernorm
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=has_norms,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if activation is not None:
        for feed_forward in _feed_forwards(submodules_of(layer.submodules.mlp)):
            feed_forward.activation_func = activation
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if is_latent:
        # Megatron-Core's own cut along their rows, and then the part of the keys that carries positions gets only what
        # the heads of one rank add to its gradient.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        attention.q_layernorm = attention.kv_layernorm = norm
    elif has_norms:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def _add_biases(layer: ModuleSpec, biased: Set[str]) -> None:
    if "o_proj" in biased:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _add_bias(attention.linear_proj)
    if "down_proj" in biased:
        mlp = submodules_of(layer.submodules.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = _add_bias(mlp.linear_fc1), _add_bias(mlp.linear_fc2)


@functools.cache
def _add_bias(linear: type) -> type:
    """Return a linear layer of Megatron-Core with a bias, whatever the configuration says of all layers."""
    if hasattr(linear, "always_has_bias"):  # a specification may stand for several layers
        return linear

    class Biased(linear):  # type: ignore[misc]
        always_has_bias = True

        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return Biased


def _feed_forwards(submodules: MLPSubmodules | MoESubmodules) -> list[MLPSubmodules]:
    """Return the parts of a layer that have an activation function: itself, or its experts."""
    if isinstance(submodules, MLPSubmodules):
        return [submodules]
    return [submodules_of(submodules.experts), submodules_of(submodules.shared_experts)]
