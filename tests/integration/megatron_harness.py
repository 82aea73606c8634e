"""Checkpoints and ranks of Megatron-Core models that are as small as every way of cutting them allows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from tandem.common.config.schema import NewModel
from tandem.common.tokenizer import write_new_model
from tandem.refit.adapters.catalogue import ModelShape, from_checkpoint
from tandem.refit.adapters.megatron import Megatron

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_SIZES},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 8, **_SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, **_SIZES, **_EXPERTS},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SIZES,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}


def make_checkpoint(folder: Path, model: str, *, seed: int = 0, max_file_size: str = "5GB") -> Path:
    """Write a random model with its tokenizer, 26 tokens, to `folder`, in float32, in files of this size."""
    write_new_model(folder, NewModel(config=MODELS[model], characters="0123456789+-= abcdefghi", seed=seed))
    settings = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for tensor in made.state_dict().values():
                tensor.add_(torch.randn_like(tensor) * 0.05)  # norms and biases as well
    made.save_pretrained(folder, max_shard_size=max_file_size)
    return folder


@contextmanager
def parallel(sizes: Megatron) -> Iterator[None]:
    """Make Megatron-Core's process groups of the default group's ranks, for as long as the block runs."""
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build_chunks(folder: Path, sizes: Megatron, dtype: torch.dtype = torch.float32) -> tuple[list[Any], ModelShape]:
    """Return the ``GPTModel`` of each virtual stage of this rank, with random weights, and the shape of the whole."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    model, settings = from_checkpoint(folder), transformers.AutoConfig.from_pretrained(folder)
    transformer = _transformer_config(settings, model, sizes, dtype)
    # Its constructors look the device up, and move the embedding there.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]
    multiple = sizes.vocabulary_divisor * sizes.tp
    chunks = []
    for number in range(sizes.vpp):
        stage = number if sizes.vpp > 1 else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        spec = get_gpt_decoder_block_spec(
            transformer, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        )
        chunk = GPTModel(
            transformer,
            spec,
            vocab_size=-(-settings.vocab_size // multiple) * multiple,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=settings.tie_word_embeddings,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        chunks.append(chunk)
    return chunks, model


def _transformer_config(settings: Any, model: ModelShape, sizes: Megatron, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    experts = model.known.experts
    if experts is not None:
        more |= {
            "num_moe_experts": experts.num_experts,
            "moe_layer_freq": [int(layer in experts.layers) for layer in range(settings.num_hidden_layers)],
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_router_topk": settings.num_experts_per_tok,
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.expert_tensor_size,
        }
    if sizes.vpp > 1:
        more["virtual_pipeline_model_parallel_size"] = sizes.vpp
    if model.known.model_type.startswith("qwen3"):
        more["kv_channels"] = settings.head_dim
    return TransformerConfig(
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.num_key_value_heads,
        ffn_hidden_size=settings.intermediate_size,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=settings.model_type == "qwen2",
        qk_layernorm=settings.model_type not in ("llama", "qwen2"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        overlap_p2p_comm=sizes.vpp > 1,
        batch_p2p_comm=sizes.vpp == 1,
        **more,
    )
