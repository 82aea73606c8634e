"""Tiny models, batches and real processes for the tests of the trainer's inside."""

from __future__ import annotations

import datetime
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tandem.config import Config, build_config
from tandem.config.placement import find_model_group
from tandem.config.schema import NewModel
from tandem.config.schema.columns import Model
from tandem.refit.digests.comparison import combine
from tandem.refit.digests.task import digest_layout
from tandem.refit.program import ProcessVerification
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.samples.batch_sharding import NO_RANK, BatchSharding
from tandem.samples.model_files import write_new_model
from tandem.trainer import step
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.backends import make_backend
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.batching.shard import unpad_into
from tandem.trainer.exchange import RankExchange, meet, moved
from tandem.trainer.files import box_files, policy_files
from tandem.trainer.scorers.columns import scored_by
from tandem.trainer.step import evaluate

VOCABULARY = 24
DEADLINE_S = 120.0
_GRACE_S = 2.0
ADAMW = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
"""With a large epsilon: where the true gradient is zero, AdamW would otherwise make full steps of rounding errors."""

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL},
    "llama with biases": {"model_type": "llama", **_SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", **_SMALL},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, **_SMALL},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        **_SMALL,
    },
}
_DELTA_NET: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A layer of gated delta nets, and one of attention."""
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
}
"""State-space layers beside attention."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", **_SMALL, "sliding_window": 5},
    "gemma3": {
        "model_type": "gemma3_text",
        **_SMALL,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
        },
    },
    "phi3": {
        "model_type": "phi3",
        **_SMALL,
        "tie_word_embeddings": True,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SMALL,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SMALL,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
}
"""Families with parts of their own: attention that slides, or has sinks, fused layers, routers with a bias.

They run through fewer cases than `ARCHITECTURES`.
"""
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"model_type": "smollm3", **_SMALL, "no_rope_layers": [1, 0]},
    "seed_oss": {"model_type": "seed_oss", **_SMALL, "head_dim": 8},
    "helium": {"model_type": "helium", **_SMALL, "head_dim": 8},
    "gemma": {"model_type": "gemma", **_SMALL, "head_dim": 8},
}
"""Families without a plan here; Transformers' own plans cut all but the first as they cut Llama."""
STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SMALL,
        **_DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_SMALL, **_DELTA_NET},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **_SMALL,
        **_DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {"model_type": "falcon_h1", **_SMALL, "head_dim": 8, **_MAMBA},
    "nemotron_h": {
        "model_type": "nemotron_h",
        **_SMALL,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "lfm2": {"model_type": "lfm2", **_SMALL, "layer_types": ["conv", "full_attention"]},
}
"""Families whose layers carry a state: no rank has a part of a sequence, nor of such a layer."""

OTHER_ATTENTION: dict[str, dict[str, Any]] = {
    "gemma2": {
        "model_type": "gemma2",
        **_SMALL,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 0.5,
    },
    "llama4_text": {
        "model_type": "llama4_text",
        **_SMALL,
        "head_dim": 8,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 4,
        "floor_scale": 3,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
}
"""Families whose attention caps its scores, or is in chunks."""
_INDEXED: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
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
    "index_topk": 3,
}
UNSHARED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"model_type": "deepseek_v32", **_INDEXED},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **_INDEXED, "indexer_types": ["full", "shared"]},
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        **_INDEXED,
        "o_groups": 2,
        "o_lora_rank": 8,
        "head_dim": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "sliding_window": 5,
    },
    "minimax": {
        "model_type": "minimax",
        **_SMALL,
        "head_dim": 8,
        "num_local_experts": 4,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon": {"model_type": "falcon", **_SMALL, "ffn_hidden_size": 48, "alibi": True},
}
"""Families with attention or states of their own, which share no prompts."""

# Importing torch and transformers takes seconds; a server that has done it forks ranks in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", __name__, "tests.harness.runs.preloaded"])


def start_server() -> None:
    """Start what ranks are forked from, unless it runs; it ends with this process."""
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()


CHARACTERS = "0123456789+-= abcdefg"


def make_model(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, characters: str = CHARACTERS, **sizes: int
) -> Path:
    """Write a random model with its tokenizer, 24 tokens, to `folder`; `sizes` replace some of the architecture's."""
    new_model = NewModel(
        config=(ARCHITECTURES | FAMILIES | STATEFUL | OTHER_ATTENTION | UNSHARED | OTHERS)[architecture] | sizes,
        characters=characters,
        seed=seed,
    )
    write_new_model(folder, new_model)
    torch.manual_seed(seed)
    settings = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases as well
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and name.endswith("bias"):  # what a router adds to its scores
                buffer.add_(torch.randn_like(buffer) * 0.05)
    model.save_pretrained(folder)
    return folder


def add_mtp_layers(folder: Path, num: int = 1) -> list[str]:
    """Add multi-token prediction layers to a model's files, like its last layer; return the names of their tensors.

    They have the names of Qwen3-Next and Qwen3.5, or else of DeepSeek-V3 and GLM-4.5, with copies of the embedding and
    the output layer.
    """
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    text = settings.get("text_config", settings)
    num_layers, size = text["num_hidden_layers"], text["hidden_size"]
    of_layer = re.compile(rf"^model\.(?:language_model\.)?layers\.{num_layers - 1}\.")
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    added: dict[str, torch.Tensor] = {}
    for number in range(num):
        prefix, fc, before, after = "mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_", "mtp.norm"
        enorm, hnorm = f"{before}embedding", f"{before}hidden"
        if not text["model_type"].startswith(("qwen3_next", "qwen3_5")):
            prefix = f"model.layers.{num_layers + number}."
            fc, enorm, hnorm, after = (f"{prefix}{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
            added[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            added[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        added |= {f"{norm}.weight": 1.0 + noise(size) for norm in (enorm, hnorm, after)}
        added[f"{fc}.weight"] = noise(size, 2 * size)
        for name, tensor in tensors.items():
            if of_layer.search(name):
                added[of_layer.sub(prefix, name)] = tensor + noise(*tensor.shape)
    save_file(tensors | added, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": num}))
    return [*added]


def make_config(
    model: Path,
    *,
    algorithm: str = "grpo",
    loss: Mapping[str, Any] | None = None,
    estimator: str = "grpo",
    dpo: Mapping[str, Any] | None = None,
    rm: Mapping[str, Any] | None = None,
    ppo: Mapping[str, Any] | None = None,
    grpo: Mapping[str, Any] | None = None,
    value: Mapping[str, Any] | None = None,
    value_loss: Mapping[str, Any] | None = None,
    teacher: Mapping[str, Any] | None = None,
    teachers: Sequence[Mapping[str, Any]] | None = None,
    topk: int = 64,
    routes: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    trainers: int = 1,
    processes_of: Mapping[str, int] | None = None,
    **policy: Any,
) -> Config:
    """Return a configuration whose ``policy``, ``loss_fn``, ``dpo``, ``rm`` and ``ppo`` sections have the given keys.

    So have ``grpo``, ``value``, ``teacher`` or ``teachers`` (of whose likeliest tokens `topk` count) and, from
    `value_loss`, ``value_loss_fn``.

    `trainers` matters only where several share a copy of the model, or models have `processes_of` their own.
    """
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "adv_estimator": {"name": estimator},
            **(grpo or {}),
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, **(loss or {})},
        "dpo": {"val_micro_batch_size": 1, **(dpo or {})},
        **({} if rm is None else {"rm": {"val_micro_batch_size": 1, **rm}}),
        **({} if ppo is None else {"ppo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, **ppo}}),
        **({} if value is None else {"value": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAMW}, **value}}),
        "value_loss_fn": value_loss or {},
        "distillation": {"num_prompts_per_step": 8, "topk_logits_k": topk},
        "off_policy_distillation": {"topk_logits_k": topk, "val_micro_batch_size": 2},
        "teacher": teacher,
        "teachers": teachers,
        "on_policy_distillation": routes,
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 3,
            "max_total_sequence_length": 32,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": dict(ADAMW)},
            "generation": {"temperature": temperature},
            **policy,
        },
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "no"},
        "cluster": {"trainers": trainers, "processes_of": processes_of or {}},
    }
    return build_config(settings)


def make_batch(num_sequences: int = 8, *, seed: int = 0, max_length: int = 14) -> SampleBatch:
    """Return a random batch of ragged sequences: prompts, then counted tokens, advantages of both signs.

    They have few lengths: DTensor finds out anew for each how ranks share every operation, most of a small step.
    """
    random = np.random.default_rng(seed)
    lengths_S = random.choice([4, max_length // 2 + 2, max_length], num_sequences).astype(np.int32)
    masks = [np.arange(length) >= random.integers(1, length - 1) for length in lengths_S]
    loss_mask_T = np.concatenate(masks)
    num_tokens = int(lengths_S.sum())
    logprobs_T = np.where(loss_mask_T, random.normal(-3.0, 0.3, num_tokens), 0.0).astype(np.float32)
    return SampleBatch(
        lengths_S=lengths_S,
        token_ids_T=random.integers(3, VOCABULARY, num_tokens).astype(np.int32),
        loss_mask_T=loss_mask_T,
        generation_logprobs_T=logprobs_T,
        advantages_S=random.normal(0.0, 1.0, num_sequences).astype(np.float32),
        rewards_S=random.normal(0.0, 1.0, num_sequences).astype(np.float32),
    )


STORE: list[Any] = []
"""Where the processes of a test meet: one, in each of them."""


def begin(rank: int, config: Config, checkpoint: Path | None = None) -> tuple[TrainerBackend, RankExchange | None]:
    """Build what a rank holds; where models have processes of their own, after these have become groups."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    if len(config.processes_of) == 1:
        return make_backend(config, checkpoint=checkpoint), None
    (store,) = STORE
    exchange = meet(config, rank, store, "127.0.0.1", 60.0)
    return make_backend(config, checkpoint=checkpoint, model_group=find_model_group(config, rank)), exchange


def share_of(
    backend: TrainerBackend,
    batch: SampleBatch,
    config: Config,
    parts: Sequence[int] = (),
    exchange: RankExchange | None = None,
) -> tuple[SampleBatch]:
    """Return the table of a whole batch, as the coordinator would divide it, and this rank's share."""
    sharding, rank = BatchSharding.of(config, shares_prompts=backend.shares_prompts), backend.data_parallel_rank
    if exchange is None:  # whatever `config` says, there are as many ranks as the test has started
        sharding = msgspec.structs.replace(sharding, num_ranks=backend.data_parallel_size)
    elif not exchange.model_group.has_policy:
        rank = NO_RANK
    table = sharding.shard(build_given_table(batch), parts)
    return table, batch.replace(**table.columns).take(table.rows_of(rank))


def said_by(backend: TrainerBackend, batch: SampleBatch, config: Config, model: Model) -> NDArray[np.float32]:
    """Return the first number that a model says of each token of this rank's share of a whole batch."""
    taken = step.TrainingStep(backend, *share_of(backend, batch, config), config)
    shard = taken.shards[model]
    values_T = np.zeros(len(shard.samples.token_ids_T), dtype=np.float32)
    for micro_batch, scores_BT in scored_by(taken, model):
        unpad_into(values_T, scores_BT[0], shard.samples, micro_batch.rows)
    return moved(values_T, shard, taken.shards["policy"])


def train_on(
    backend: TrainerBackend, batch: SampleBatch, config: Config, exchange: RankExchange | None = None
) -> step.TrainResult:
    """Train on this rank's share of a whole batch."""
    return step.train(backend, *share_of(backend, batch, config, exchange=exchange), config, exchange=exchange)


def evaluate_on(
    backend: TrainerBackend,
    batch: SampleBatch,
    config: Config,
    parts: Mapping[str, int] | None = None,
    exchange: RankExchange | None = None,
) -> dict[str, float]:
    """Evaluate this rank's share of a whole batch."""
    shared = share_of(backend, batch, config, [*(parts or {}).values()], exchange)
    return evaluate(backend, *shared, config, parts, exchange)


def digest_of(backend: TrainerBackend, dtype: str = "float32") -> int:
    """Return the digest of what a rank holds, all tensors together, as engines hold it that want `dtype`."""
    weights = backend.weights()
    pieces, tensors = weights.layout.pieces, weights.layout.tensors
    verification = ProcessVerification(np.arange(len(pieces)), (dtype,) * len(tensors))
    return combine(*digest_layout(weights.layout, weights.storages, verification).tolist())


def train_rank(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path | None = None) -> Any:
    """Train on the batches one after another; return the metrics of each, and save the weights if a folder is given."""
    backend = DTensorBackend(config, checkpoint=None)
    results = [train_on(backend, batch, config) for batch in batches]
    if folder is not None:
        backend.save(folder).num_bytes.result()
    return [result.metrics for result in results], digest_of(backend)


def evaluate_rank(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    backend = DTensorBackend(config, checkpoint=None)
    before = digest_of(backend)
    metrics = evaluate_on(backend, batch, config)
    assert digest_of(backend) == before
    return metrics


@contextmanager
def busy_disk() -> Iterator[threading.Event]:
    """Have no tensor written in this process before the event is set."""
    is_free = threading.Event()

    def save_later(*args: Any, **kwargs: Any) -> None:
        assert is_free.wait(DEADLINE_S)
        save_file(*args, **kwargs)

    policy_files.save_file = box_files.save_file = save_later
    try:
        yield is_free
    finally:
        policy_files.save_file = box_files.save_file = save_file


def train_while_saving(
    backend: TrainerBackend, config: Config, seeds: Sequence[int], num_before: int, folder: Path
) -> list[dict[str, float]]:
    """Train on the batches of these seeds, and save before one of them; nothing is written before the last is done."""
    metrics: list[dict[str, float]] = []
    with busy_disk() as is_free:
        for index, seed in enumerate(seeds):
            if index == num_before:
                writing = backend.save(folder)
            metrics.append(train_on(backend, make_batch(16, seed=seed), config).metrics)
        assert not writing.num_bytes.done() or dist.get_rank(), "rank 0 has the policy to write"
        assert not list(folder.rglob("*.safetensors"))
        dist.barrier()
        is_free.set()
        writing.num_bytes.result(DEADLINE_S)
    return metrics


def make_groups(*sizes: int, seed: int = 0, max_prompt: int = 8, max_response: int = 9) -> SampleBatch:
    """Return a batch of prompt groups of these sizes: random prompts, ragged responses, one of them of two turns."""
    random = np.random.default_rng(seed)
    token_ids, masks = [], []
    for size in sizes:
        prompt = random.integers(3, VOCABULARY, random.integers(2, max_prompt + 1))
        for _ in range(size):
            response = random.integers(3, VOCABULARY, random.integers(1, max_response + 1))
            token_ids.append(np.concatenate([prompt, response]))
            masks.append(np.arange(len(token_ids[-1])) >= len(prompt))
    masks[-1][-len(masks[-1]) // 3] = False  # what an environment said between two turns
    loss_mask_T = np.concatenate(masks)
    num_tokens = len(loss_mask_T)
    return SampleBatch(
        lengths_S=np.array([len(tokens) for tokens in token_ids], dtype=np.int32),
        token_ids_T=np.concatenate(token_ids).astype(np.int32),
        loss_mask_T=loss_mask_T,
        generation_logprobs_T=np.where(loss_mask_T, random.normal(-3.0, 0.3, num_tokens), 0.0).astype(np.float32),
        advantages_S=random.normal(0.0, 1.0, len(token_ids)).astype(np.float32),
        rewards_S=random.normal(0.0, 1.0, len(token_ids)).astype(np.float32),
    )


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S, are_group: bool = True
) -> list[Any]:
    """Call ``function(rank, *args)`` in `world_size` processes that form a process group; return what each returned.

    Without `are_group` they form none, and may do so by the store in `STORE`.

    Fails if a rank raises, dies, or has not returned by the deadline.
    """
    store = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    processes, ends = [], []
    for rank in range(world_size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        size = world_size if are_group else 0
        process = CONTEXT.Process(target=_rank, args=(theirs, rank, size, store.port, function, args))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    deadline = time.monotonic() + deadline_s
    try:
        found = []
        for rank, end in enumerate(ends):
            found.append(_result(rank, end, deadline))
            if found[-1][0]:  # the others soon fail for want of this one, or it for want of them
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        errors = [error for error, _ in found if error]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]
    finally:
        for process, end in zip(processes, ends, strict=True):
            end.close()
            process.join(max(0.1, min(10.0, deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _result(rank: int, end: Connection, deadline: float) -> tuple[str, Any]:
    """Return what went wrong in a rank, empty if nothing did, and what it returned."""
    if not end.poll(max(0.0, deadline - time.monotonic())):
        return f"rank {rank} did not return in time", None
    try:
        error, value = end.recv()
    except EOFError:
        return f"rank {rank} died", None
    return f"rank {rank} raised:\n{error}" if error else "", value


def _rank(end: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any) -> None:
    """Be a rank; of no group if there is none in its world."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    STORE.append(store)
    if world_size and not any(
        isinstance(each, Config) and len(each.processes_of) > 1 for each in args
    ):  # else `begin` does it
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        end.send((None, function(rank, *args)))
    except BaseException:
        end.send((traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        end.close()
