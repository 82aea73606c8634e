"""Tiny random models, and the embedded engine filled from them, for the engine's tests."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray

from tandem.common.messages import SamplingParameters
from tandem.common.worker_shards import worker_shard_names
from tandem.refit.layout import Layout
from tandem.refit.planner import plan
from tandem.refit.program import TransferProgram
from tandem.rollout.engine import Engine, EngineCompletion, SequenceRequest
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.trainer.exposed_weights import weights_of
from tandem.trainer.files.policy_files import saved_buffers

VOCABULARY = 61
MANY_DESCRIPTORS = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # with 0.3 Transformers' own float32 rounds by the tolerance on some processors
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
DELTA_NETS: dict[str, Any] = {
    "head_dim": 16,
    "initializer_range": 0.1,  # with larger weights Transformers' own two ways to compute it round apart
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Layers with a state, and one of attention."""
INDEXED: dict[str, Any] = {
    **SIZES,
    "pad_token_id": None,  # a token of zeros scores all keys the same
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 4,
}
"""Attention to the few keys that an indexer chooses, fewer than there are."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 16},
    # Windows shorter than what is generated, and than some prompts.
    "mistral": {**SIZES, "sliding_window": 7},
    "gemma3_text": {
        **SIZES,
        "initializer_range": 0.3,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 4.0,
    },
    # Caps that limit scores, not only touch them.
    "gemma2": {
        **SIZES,
        "initializer_range": 0.3,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 1.5,
    },
    "vaultgemma": {
        **SIZES,
        "initializer_range": 0.3,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 1.5,
    },
    # Chunks shorter than what is generated, and queries without rotary embeddings that grow with their positions.
    "llama4_text": {
        **SIZES,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    # These run with caches of their own. So many heads of indexers that hardly any two keys score the same: zero.
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    "deepseek_v4": {
        **INDEXED,
        "initializer_range": 0.1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "head_dim": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "sliding_window": 5,
    },
    "minimax": {
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    # Its indexer keeps positions, whose second axis counts sequences.
    "qwen4_exp_text": {
        **SIZES,
        **EXPERTS,
        **DELTA_NETS,
        "pad_token_id": None,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "shared_expert_intermediate_size": 24,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "bloom": {**SIZES, "n_layer": 3, "n_head": 4},
    "falcon": {**SIZES, "ffn_hidden_size": 48, "alibi": True},
    "stablelm": SIZES,
    "phi3": {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    "gpt_oss": {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "glm4_moe": {
        **SIZES,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3_next": {**SIZES, **EXPERTS, **DELTA_NETS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**SIZES, **DELTA_NETS},
    "qwen3_5_moe_text": {**SIZES, **EXPERTS, **DELTA_NETS, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {**SIZES, **DELTA_NETS},
    "falcon_h1": {
        **SIZES,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "nemotron_h": {
        **SIZES,
        "head_dim": 16,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "jamba": {
        **SIZES,
        "initializer_range": 0.15,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "mamba2": {**SIZES, "num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention", "conv"]},
}


def make_model(architecture: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Build a random float32 model the way a trainer would, and leave its config.json in `folder`."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(architecture, **{**ARCHITECTURES.get(architecture, SIZES), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and name.endswith("bias"):  # what a router adds to its scores
                buffer.copy_(torch.randn_like(buffer))
    config.save_pretrained(folder)
    return model


def shared_layout(model: Any) -> Layout:
    """Move a model's parameters into shared memory, and describe them as a trainer would."""
    return weights_of(dict(model.named_parameters()) | saved_buffers(model)).layout


def make_programs(source: Layout, engine: Engine, *, allow_alias: bool = False) -> list[TransferProgram]:
    """Plan how the parts of an engine get their weights from one trainer rank."""
    layouts = engine.layouts()
    wanted = dict(zip(worker_shard_names("rollout-0", len(layouts)), layouts, strict=True))
    programs = plan({"trainer-0": source}, wanted, allow_alias=allow_alias).programs
    return [programs[part] for part in wanted]


def refit(engine: Engine, model: Any, version: int) -> None:
    """Bring an engine to what `model` holds, by a whole refit out of the memory of a copy of it."""
    source = copy.deepcopy(model)
    engine.install(make_programs(shared_layout(source), engine))
    engine.apply(version, 60.0)


def make_engine(folder: Path, model: Any, *, num_slots: int = 8, max_length: int = 64) -> TransformersEngine:
    """Build an engine that holds version 0, the weights of the model."""
    if len(os.listdir("/proc/self/fd")) > MANY_DESCRIPTORS:
        gc.collect()  # engines of earlier tests, which hold shared memory: each refers to itself
    engine = TransformersEngine(folder, num_slots=num_slots, max_total_sequence_length=max_length, dtype="float32")
    refit(engine, model, 0)
    return engine


def sampling(**changes: Any) -> SamplingParameters:
    """Plain sampling of 12 tokens, with changes."""
    plain: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 12,
        "stop_token_ids": (),
        "stop_strings": (),
    }
    return SamplingParameters(**{**plain, **changes})


def request(
    request_id: int, prompt_ids: tuple[int, ...], *, seed: int | None = None, **changes: Any
) -> SequenceRequest:
    """Build a request; its seed is its id unless given."""
    return SequenceRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=sampling(**changes),
        seed=request_id if seed is None else seed,
    )


def random_prompts(num_prompts: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Return distinct prompts of 1 to 20 tokens."""
    generator = np.random.default_rng(seed)
    return [
        (*generator.integers(1, VOCABULARY, generator.integers(1, 21)).tolist(), index) for index in range(num_prompts)
    ]


def run_all(engine: Engine, requests: list[SequenceRequest]) -> dict[int, EngineCompletion]:
    """Add the requests, step until all have finished, return completions by request id."""
    for one in requests:
        engine.add_request(one)
    finished: dict[int, EngineCompletion] = {}
    while engine.num_unfinished:
        for completion in engine.step():
            assert completion.request_id not in finished
            finished[completion.request_id] = completion
    return finished


def reference_logprobs(
    model: Any, prompt_ids: tuple[int, ...], token_ids_T: NDArray[np.int32], temperature: float = 1.0
) -> NDArray[Any]:
    """Log-probabilities of a response the trainer's way: one Hugging Face forward over the whole sequence."""
    sequence = torch.tensor([[*prompt_ids, *token_ids_T.tolist()]])
    with torch.no_grad():
        logits_TV = model(input_ids=sequence).logits[0, len(prompt_ids) - 1 : -1]
    logprobs_TV = (logits_TV / temperature).log_softmax(dim=-1)
    result: NDArray[Any] = logprobs_TV.gather(1, sequence[0, len(prompt_ids) :, None]).squeeze(1).numpy()
    return result


def exact(model: Any) -> Any:
    """Return the model in float64, which shows how far float32 rounds it on this processor."""
    wide = copy.deepcopy(model).double()
    if getattr(wide.config, "_experts_implementation", "eager") != "eager":
        wide.set_experts_implementation("eager")  # the grouped product of matrices has no float64
    return wide


def assert_close_to_transformers(
    model: Any,
    completions: Iterable[tuple[SequenceRequest, EngineCompletion]],
    tolerance: float = 1e-5,
    temperature: float = 1.0,
) -> None:
    """Log-probabilities are those of Transformers' forward pass, or nearer to the exact ones than that is.

    Two ways to round cannot be closer than either is to the truth: on some processors Transformers' own float32 is
    further than the tolerance from float64.
    """
    wide, apart, off, rounding = exact(model), 0.0, 0.0, 0.0
    for sent, completion in completions:
        expected_T = reference_logprobs(model, sent.prompt_ids, completion.token_ids_T, temperature)
        exact_T = reference_logprobs(wide, sent.prompt_ids, completion.token_ids_T, temperature)
        apart = max(apart, np.abs(completion.logprobs_T - expected_T).max())
        off = max(off, np.abs(completion.logprobs_T - exact_T).max())
        rounding = max(rounding, np.abs(expected_T - exact_T).max())
    assert min(apart, off) < max(tolerance, 2 * rounding), (apart, off, rounding)
    assert rounding < 2 * tolerance


def write_byte_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer whose ids spell single bytes, some of them halves of a character; return the text by id."""
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return [tokenizer.decode([index]) for index in range(VOCABULARY)]


def logprobs_without(
    model: Any, prompt_ids: tuple[int, ...], tokens: list[int], forbidden: tuple[tuple[int, ...], ...]
) -> list[float]:
    """Log-probabilities of a response whose tokens were drawn from all but those that end a forbidden sequence."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, len(prompt_ids) - 1 : -1].float()
    for place in range(len(tokens)):
        for *before, last in forbidden:
            if len(before) <= place and tokens[place - len(before) : place] == before:
                logits_TV[place, last] = -torch.inf
    logprobs_TV = logits_TV.log_softmax(dim=-1)
    return [logprobs_TV[place, token].item() for place, token in enumerate(tokens)]


def sequences_in(tokens: list[int], length: int) -> set[tuple[int, ...]]:
    """Return the sequences of this many tokens that a response contains."""
    return {tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)}
