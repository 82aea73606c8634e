"""How many tokens a second does each backend train on one GPU, and what share of the GPU's FLOPs is that?

Qwen3 of 0.6B, 1.7B and 4B with random weights in bfloat16, on responses of lognormal lengths in packed rows: whole
optimizer steps, of batching, forward, backward, clipping and AdamW. Tokens are those of the sequences, without padding.
Model FLOPs a token are 6 for each weight that multiplies it (the output layer is one, the embedding is not), and for
attention 6 x layers x heads x head dimension x the length of its sequence, because it is causal half of 12 (Chowdhery
et al. 2022, arXiv:2204.02311, appendix B); what is computed again in backward does not count. Utilisation is of an
H100's dense bfloat16 peak, 989 TFLOP/s (NVIDIA's data sheet), unless ``BENCHMARK_PEAK_TFLOPS`` says otherwise.

What limits a step is told by the share of its time that kernels of matrix products, of attention and of all else take.

Each is measured as it is and with fused kernels (``policy.compile``), one after the other, and the ratio is told.

Without a GPU this skips. ``BENCHMARK_DEVICE=cpu`` runs all of it with tiny shapes, to try the code.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from measure import keep_ratios, seconds_of
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from torch.profiler import ProfilerActivity, profile

from tandem.config import Config, build_config
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.trainer import step
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.backends import make_backend

DEVICE = os.environ.get("BENCHMARK_DEVICE", sized("cuda", "cpu"))
IS_TRIAL = DEVICE == "cpu"
PEAK_FLOPS = 1e12 * float(os.environ.get("BENCHMARK_PEAK_TFLOPS", "989"))
NUM_ROUNDS = 2 if IS_TRIAL else 5
NUM_SEQUENCES, LONGEST, MEDIAN, SIGMA = (6, 64, 20, 0.8) if IS_TRIAL else (64, 4096, 800, 0.8)
RATE = 1e-6
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
}
BACKENDS: dict[str, dict[str, Any]] = {
    "dtensor": {
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE}},
        "dtensor_cfg": {"activation_checkpointing": True},
    },
    "megatron": {
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "activation_checkpointing": True,
            "optimizer": {"lr": RATE, "min_lr": RATE, "bf16": True, "use_distributed_optimizer": True},
        },
    },
}
KINDS = {"attention": ("flash", "attention", "fmha"), "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "::mm")}
"""Parts of kernels' names, of which the first that fits counts: kernels of attention name cutlass's types as well."""


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process is the only trainer."""
    backend = "gloo" if IS_TRIAL else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def random_batch(vocabulary: int) -> SampleBatch:
    random = np.random.default_rng(0)
    drawn_S = random.lognormal(np.log(MEDIAN), SIGMA, NUM_SEQUENCES)
    lengths_S = drawn_S.astype(np.int32).clip(8, LONGEST)
    num_tokens = int(lengths_S.sum())
    return SampleBatch(
        lengths_S=lengths_S,
        token_ids_T=random.integers(0, vocabulary, num_tokens).astype(np.int32),
        loss_mask_T=np.ones(num_tokens, dtype=np.bool_),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        advantages_S=np.ones(NUM_SEQUENCES, dtype=np.float32),
        rewards_S=np.zeros(NUM_SEQUENCES, dtype=np.float32),
    )


def model_flops(settings: transformers.Qwen3Config, num_parameters: int, lengths_S: np.ndarray[Any, Any]) -> float:
    """Return the FLOPs of forward and backward. Tied weights are embedding and output layer at once."""
    lengths_S = lengths_S.astype(np.float64)
    width = settings.num_hidden_layers * settings.num_attention_heads * settings.head_dim
    return float((6.0 * num_parameters * lengths_S + 6.0 * width * lengths_S**2).sum())


def shares_of_kernels(run: Any) -> dict[str, float]:
    """Return the share of the device's time by kind of kernel, in one call."""
    activities = [ProfilerActivity.CPU] if IS_TRIAL else [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        run()
    times = dict.fromkeys([*KINDS, "all else"], 0.0)
    for event in profiled.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "all else")
        times[kind] += event.self_cpu_time_total if IS_TRIAL else event.self_device_time_total
    total = sum(times.values())
    return {kind: spent / total for kind, spent in times.items()}


def configured(folder: Path, name: str, *, is_compiled: bool) -> Config:
    """Return the configuration of a backend."""
    num_tokens = LONGEST if IS_TRIAL else 2 * LONGEST
    return build_config(
        {
            "algorithm": "sft",
            "policy": {
                "model_name": str(folder),
                "precision": "bfloat16",
                "compile": is_compiled,
                "max_total_sequence_length": LONGEST,
                "train_global_batch_size": NUM_SEQUENCES,
                "train_micro_batch_size": 1,
                "sequence_packing": {
                    "enabled": True,
                    "train_mb_tokens": num_tokens,
                    "logprob_mb_tokens": num_tokens,
                    "sequence_length_round": 16,
                },
                **BACKENDS[name],
            },
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def one_step(backend: TrainerBackend, batch: SampleBatch, config: Config) -> None:
    """Take an optimizer step, and wait for it."""
    step.train(backend, build_given_table(batch), batch, config)
    if not IS_TRIAL:
        torch.cuda.synchronize()


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # of what Megatron-Core imports
@pytest.mark.skipif(not IS_TRIAL and not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.usefixtures("process_group")
def test_tokens_a_second(
    benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, name: str
) -> None:
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    torch.manual_seed(0)
    settings = transformers.Qwen3Config(**COMMON | SHAPES[size] | (TINY if IS_TRIAL else {}))
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(tmp_path)
    batch = random_batch(settings.vocab_size)
    tokens = int(batch.lengths_S.sum())
    found: dict[str, dict[str, Any]] = {}
    for kernels, is_compiled in (("plain", False), ("fused", True)):
        if not IS_TRIAL:
            torch.cuda.reset_peak_memory_stats()
        config = configured(tmp_path, name, is_compiled=is_compiled)
        backend = make_backend(config, checkpoint=None)
        train = partial(one_step, backend, batch, config)
        train()  # kernels are made
        times = [seconds_of(train) for _ in range(NUM_ROUNDS)]
        if is_compiled:
            benchmark.pedantic(train, rounds=1)
        median = statistics.median(times)
        found[kernels] = {
            "median step seconds": median,
            "tokens a second": tokens / median,
            "model FLOPs utilisation": model_flops(settings, backend.num_parameters, batch.lengths_S)
            / median
            / PEAK_FLOPS,
            "peak memory, GB": 0.0 if IS_TRIAL else torch.cuda.max_memory_allocated() / 1e9,
            "share of the device's time": shares_of_kernels(train),
        }
        num_parameters = backend.num_parameters
        backend.close()
        del backend, train
        gc.collect()
        if not IS_TRIAL:
            torch.cuda.empty_cache()
    ratio = found["plain"]["median step seconds"] / found["fused"]["median step seconds"]
    benchmark.extra_info.update(
        {
            "device": "cpu, tiny shapes" if IS_TRIAL else torch.cuda.get_device_name(),
            "parameters": num_parameters,
            "tokens": tokens,
            "plain seconds / fused seconds": ratio,
            **found,
        }
    )
    keep_ratios(benchmark, "times as fast as plain kernels", {f"{size} {name}": ratio})
    for kernels, each in found.items():
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in each["share of the device's time"].items())
        print(
            f"\n{size} {name}, {kernels}: {each['tokens a second']:.0f} tokens/s, "
            f"{each['model FLOPs utilisation']:.1%} of the peak, {each['peak memory, GB']:.1f} GB; {told}"
        )
    print(f"{size} {name}: fused kernels {ratio:.2f} times as fast")
