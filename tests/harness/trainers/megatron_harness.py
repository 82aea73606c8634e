"""Models as small as every way of cutting them allows: their checkpoints, configurations and backends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tandem.config import Config
from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.backends import make_backend
from tests.harness.trainers.trainer_harness import ADAMW, make_batch, make_config

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
    "llama with biases": {"model_type": "llama", **_SIZES, "attention_bias": True, "mlp_bias": True},
    "llama, biases in attention": {"model_type": "llama", **_SIZES, "attention_bias": True},
    "llama, biases in feed-forward": {"model_type": "llama", **_SIZES, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_SIZES},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 8, **_SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, **_SIZES, **_EXPERTS},
    "qwen3_moe with biases": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        **_SIZES,
        **_EXPERTS,
        "attention_bias": True,
    },
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
    "mistral": {"model_type": "mistral", **_SIZES, "sliding_window": 5},
    "phi3": {
        "model_type": "phi3",
        **_SIZES,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SIZES,
        **_EXPERTS,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
}

BATCHES = tuple(make_batch(seed=seed) for seed in range(3))
OPTIMIZER = {
    "optimizer": "adam",
    "lr": ADAMW["lr"],
    "weight_decay": ADAMW["weight_decay"],
    "adam_eps": ADAMW["eps"],
    "use_distributed_optimizer": True,
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SP, VIRTUAL = {"sequence_parallel": True}, {"virtual_pipeline_model_parallel_size": 2}
PLAIN = {"optimizer": {"use_distributed_optimizer": False}}


def make_checkpoint(folder: Path, model: str, *, seed: int = 0, max_file_size: str = "5GB") -> Path:
    """Write a random model with its tokenizer, 26 tokens, to `folder`, in float32, in files of this size."""
    write_new_model(folder, NewModel(config=MODELS[model], characters="0123456789+-= abcdefghi", seed=seed))
    settings = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for tensor in made.state_dict().values():
                tensor.add_(torch.randn_like(tensor) * 0.05)  # norms and biases as well
    made.save_pretrained(folder, max_shard_size=max_file_size)
    return folder


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_for(folder: Path, num_ranks: int, megatron: dict[str, Any], **policy: Any) -> Config:
    megatron = {"enabled": True, **megatron, "optimizer": OPTIMIZER | megatron.get("optimizer", {})}
    return make_config(
        folder,
        loss={"reference_policy_kl_penalty": 0.1},
        temperature=0.7,
        trainers=num_ranks,
        megatron_cfg=megatron,
        **policy,
    )


def make(config: Config, checkpoint: Path | None = None) -> TrainerBackend:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    return make_backend(config, checkpoint=checkpoint)
