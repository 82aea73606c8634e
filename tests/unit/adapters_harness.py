"""Models small enough to lay out element by element, and what a layout makes of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.layout import Layout

Arrays = dict[str, NDArray[Any]]
Weights = dict[str, torch.Tensor]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 150,
    "tie_word_embeddings": False,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 6, "tie_word_embeddings": True}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "vocab_size": 150,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "head_dim": None}
GEMMA3 = QWEN3 | {"model_type": "gemma3_text"}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
GPT_OSS = QWEN3 | {"model_type": "gpt_oss", "num_local_experts": 4, "tie_word_embeddings": False}
GLM4_MOE: dict[str, Any] = QWEN3_MOE | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
}
_EACH = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK, MISTRAL, GEMMA3, PHI3, GPT_OSS, GLM4_MOE)
EVERY = {config["model_type"]: config for config in _EACH}


def model_of(config: Mapping[str, Any]) -> ModelShape:
    """A model whose elements are integers, to be told apart; float32 where weights always are."""
    return make_shape(config, dtype="int32")


def weights_of(model: ModelShape) -> Weights:
    """No two elements of the model are equal, none is zero, and all are exact in float32."""
    weights, first = {}, 1
    for tensor in model.tensors:
        n = int(np.prod(tensor.shape))
        weights[tensor.name] = torch.arange(first, first + n).reshape(tensor.shape).to(getattr(torch, tensor.dtype))
        first += n
    assert first < 2**24
    return weights


def unfused(weights: Weights) -> Weights:
    """The weights of `PHI3` by the names of `LLAMA`, whose layers are not fused."""
    found: Weights = {}
    heads = [16, 8, 8]  # rows of 8 heads of queries, 4 of keys and 4 of values, of 2 elements each
    for name, weight in weights.items():
        if name.endswith("qkv_proj.weight"):
            parts = zip(("q_proj", "k_proj", "v_proj"), weight.split(heads), strict=True)
            found |= {name.replace("qkv_proj", part): rows for part, rows in parts}
        elif name.endswith("gate_up_proj.weight"):
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            found |= {name.replace("gate_up_proj", part): rows for part, rows in parts}
        else:
            found[name] = weight
    return found


def assert_same_shards(deployments: Sequence[ParallelDeployment]) -> None:
    """Ranks have the same of a model whose checkpoint fuses layers as of one whose does not."""
    weights = weights_of(model_of(PHI3))
    for sizes in deployments:
        for rank in range(sizes.num_ranks):
            fused = materialise(sizes.layout(model_of(PHI3), rank, "here"), weights)
            plain = materialise(sizes.layout(model_of(LLAMA), rank, "here"), unfused(weights))
            assert fused.keys() == plain.keys()
            for name, memory_B in plain.items():
                np.testing.assert_array_equal(fused[name], memory_B, name)


def materialise(layout: Layout, weights: Weights) -> Arrays:
    """The storages of a process once every piece is written: bytes by name, zero where there is no piece."""
    memory = {storage.name: np.zeros(storage.num_bytes, np.uint8) for storage in layout.storages}
    written = {name: np.zeros(len(memory_B), np.int8) for name, memory_B in memory.items()}
    for row in range(len(layout.pieces)):
        piece, tensor = layout.piece(row), layout.tensors[layout.pieces.tensor_P[row]]
        values = weights[tensor.name].numpy()
        inside = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        assert values[inside].shape == piece.box.shape, "the box lies inside the tensor"
        shape, offset, strides = piece.box.shape, piece.offset, piece.strides
        np.ndarray(shape, values.dtype, memory[piece.parameter], offset, strides)[...] = values[inside]
        for byte in range(values.itemsize):
            np.ndarray(shape, np.int8, written[piece.parameter], offset + byte, strides)[...] += 1
    assert all((counts_B <= 1).all() for counts_B in written.values()), "no byte is written twice"
    return memory


def assert_holds(layout: Layout, weights: Weights, expected: Mapping[str, torch.Tensor]) -> None:
    """A process has the parameters expected of it, byte by byte; padding is zero in both, if it is described at all."""
    memory = materialise(layout, weights)
    assert set(expected) >= set(memory) >= {name for name, each in expected.items() if each.count_nonzero()}
    for name, memory_B in memory.items():
        parameter = expected[name].contiguous().numpy()
        assert memory_B.nbytes == parameter.nbytes, name
        np.testing.assert_array_equal(memory_B.view(parameter.dtype).reshape(parameter.shape), parameter, name)


def replicas(layouts: Sequence[Layout]) -> dict[str, set[int]]:
    """How often the elements of each tensor are held over all processes: one number where it is the same for all."""
    tensors = layouts[0].tensors
    counts = {tensor.name: np.zeros(tensor.shape, np.int64) for tensor in tensors}
    for layout in layouts:
        for row in range(len(layout.pieces)):
            piece = layout.piece(row)
            inside = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            counts[layout.tensors[layout.pieces.tensor_P[row]].name][inside] += 1
    return {name: set(np.unique(counts_).tolist()) for name, counts_ in counts.items()}
