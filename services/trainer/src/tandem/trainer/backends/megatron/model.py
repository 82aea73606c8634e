"""A rank's share of the model: process groups, and the chunks that Megatron-Core's pipeline runs."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear

from tandem.common.config import Config
from tandem.refit.adapters.geometry import biased_projections
from tandem.trainer.backends.megatron.architecture import embedding_arguments, geometry_in
from tandem.trainer.backends.megatron.layers import layers_of
from tandem.trainer.backends.megatron.settings import VOCABULARY_DIVISOR, Settings


class Chunk(GPTModel):  # type: ignore[misc]
    """Some consecutive layers of a model, with the embedding before the first ones.

    After the last ones come the final norm and nothing: ``forward`` returns hidden states ``[N, 1, E]``, and the output
    layer is only a weight for whoever scores tokens with it.
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


def make_groups(settings: Settings, timeout: datetime.timedelta) -> None:
    """Divide the default process group into Megatron-Core's groups, for this process. Collective."""
    sizes = settings.sizes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
        create_gloo_process_groups=False,
    )
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # which modules ask for, though nothing random is left


def build_chunks(config: Config, model: Mapping[str, Any], settings: Settings) -> list[Chunk]:
    """Return this rank's chunks, with no values in their parameters yet. After `make_groups`.

    Args:
        config: of the run.
        model: the Hugging Face configuration of the model.
        settings: what the configuration comes to.

    Raises:
        ModelError: Megatron-Core does not have what the model is made of.
    """
    sizes = settings.sizes
    multiple = VOCABULARY_DIVISOR * sizes.tp
    num_rows = -(-geometry_in(model).vocabulary_size // multiple) * multiple
    chunks = []
    for number in range(sizes.vpp):
        stage = number if sizes.vpp > 1 else None
        chunk = Chunk(
            config=settings.transformer,
            transformer_layer_spec=layers_of(settings.transformer, biased_projections(model), stage),
            vocab_size=num_rows,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
            **embedding_arguments(model),
        )
        _mark(chunk, freezes_routers=config.policy.megatron_cfg.freeze_moe_router)
        chunks.append(chunk)
    return chunks


def _mark(chunk: Chunk, *, freezes_routers: bool) -> None:
    """Say which parameters are not trained, and which add up their gradients over tensor-parallel ranks."""
    for module in chunk.modules():
        if isinstance(module, Linear):
            module.weight.sequence_parallel = chunk.config.sequence_parallel
    for name, parameter in chunk.named_parameters():
        if freezes_routers and name.endswith("router.weight"):
            parameter.requires_grad_(False)
