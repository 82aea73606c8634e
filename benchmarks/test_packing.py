"""How much of the time that padding costs do dynamic batching and packing give back?

One optimizer step on lognormal lengths, as responses have them, in one process with one thread: rows padded in
micro-batches of 8 of like lengths, in micro-batches of as many tokens, and packed. Padding allows a speed-up of padded
tokens over real ones; the goal of packing is 0.9 of that. Seconds are of processor time, so that what else the machine
does counts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.config import build_config
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend

NUM_SEQUENCES, SIZE = sized(48, 8), 8
LONGEST, MEDIAN, SIGMA = 512, 90, 0.8
VOCABULARY = 512
NUM_ROUNDS = 5
TOKENS = {"train_mb_tokens": 2 * LONGEST, "logprob_mb_tokens": 2 * LONGEST}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "sequence_length_round": 16, **TOKENS}},
    "packed": {"sequence_packing": {"enabled": True, "sequence_length_round": 16, **TOKENS}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a model; this process is the only trainer, with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    settings = transformers.Qwen3Config(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=576,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path)
    yield tmp_path
    dist.destroy_process_group()
    torch.set_num_threads(before)


def batch_of_lengths(lengths_S: np.ndarray[Any, np.dtype[np.int32]]) -> SampleBatch:
    random = np.random.default_rng(1)
    num_tokens = int(lengths_S.sum())
    return SampleBatch(
        lengths_S=lengths_S,
        token_ids_T=random.integers(0, VOCABULARY, num_tokens).astype(np.int32),
        loss_mask_T=np.concatenate([np.arange(length) >= min(16, length // 2) for length in lengths_S]),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        advantages_S=random.normal(0.0, 1.0, len(lengths_S)).astype(np.float32),
        rewards_S=np.zeros(len(lengths_S), dtype=np.float32),
    )


class Trainer:
    """One way of batching: a step of it, and the tokens that its model is given, padding included."""

    def __init__(self, folder: Path, batch: SampleBatch, policy: dict[str, Any]) -> None:
        self._batch = batch
        self._config = build_config(
            {
                "algorithm": "grpo",
                "grpo": {"num_prompts_per_step": NUM_SEQUENCES // 2, "num_generations_per_prompt": 2},
                "loss_fn": {"reference_policy_kl_penalty": 0.0},
                "policy": {
                    "model_name": str(folder),
                    "precision": "float32",
                    "max_total_sequence_length": LONGEST,
                    "train_global_batch_size": NUM_SEQUENCES,
                    "train_micro_batch_size": SIZE,
                    "share_prompts": False,
                    **policy,
                },
                "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            }
        )
        self._backend = DTensorBackend(self._config, checkpoint=None)
        self.num_tokens = 0
        self._backend._held["policy", 0].model.register_forward_pre_hook(self._count, with_kwargs=True)

    def step(self) -> float:
        """Return the seconds of processor time it took."""
        self.num_tokens = 0
        started = time.process_time()
        step.train(self._backend, build_given_table(self._batch), self._batch, self._config)
        return time.process_time() - started

    def _count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.num_tokens += kwargs["input_ids"].numel()


@pytest.mark.long(minutes=3)
def test_packed_rows_against_padded_ones(benchmark: BenchmarkFixture, folder: Path) -> None:
    drawn_S = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, NUM_SEQUENCES)
    lengths_S = drawn_S.astype(np.int32).clip(8, LONGEST)
    batch = batch_of_lengths(lengths_S)
    trainers = {way: Trainer(folder, batch, policy) for way, policy in WAYS.items()}
    turns = Turns({way: trainer.step for way, trainer in trainers.items()})
    turns.round()
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS)

    real = int(lengths_S.sum())
    medians = {way: statistics.median(times) for way, times in turns.last(NUM_ROUNDS).items()}
    tokens = {way: trainer.num_tokens for way, trainer in trainers.items()}
    waste = {way: 1 - real / number for way, number in tokens.items()}
    allowed = tokens["padded"] / real
    speed_up = {way: medians["padded"] / median for way, median in medians.items()}
    benchmark.extra_info.update(
        {
            "sequences": NUM_SEQUENCES,
            "real tokens": real,
            "tokens computed": tokens,
            "share of padding": waste,
            "median step seconds": medians,
            "speed-up that padding allows": allowed,
            "speed-up over padded": speed_up,
            "packed: share of what padding allows": speed_up["packed"] / allowed,
        }
    )
    others = {way: times for way, times in speed_up.items() if way != "padded"}
    keep_ratios(benchmark, "times as fast as padded", others)
    keep_ratios(benchmark, "share of what padding allows", {way: s / allowed for way, s in others.items()}, aim=0.9)
    print(f"\n{NUM_SEQUENCES} sequences, {real} tokens; without padding a step could be {allowed:.2f} times as fast")
    print(f"{'way':10}{'tokens':>8}{'padding':>9}{'median s':>10}{'times':>7}{'of allowed':>12}")
    for way, median in medians.items():
        share = speed_up[way] / allowed
        print(f"{way:10}{tokens[way]:8}{waste[way]:9.1%}{median:10.3f}{speed_up[way]:7.2f}{share:12.2f}")
