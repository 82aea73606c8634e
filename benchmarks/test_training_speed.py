"""Is a training step on either backend as fast as a plain loop over the Hugging Face model?

A Qwen3 of 10M parameters in float32, one thread, one micro-batch of 8 x 256 tokens, the mean cross entropy of all
tokens but each first. In turns in one process: the loop that anyone would write (the model's own loss, `backward`,
clipping, torch's AdamW), and `train_step` of each backend, alone in its process group. A backend computes more: the
entropy of each distribution, and in float64 what it reports. Two numbers of each turn: until the gradients are there,
and with clipping and the optimizer. Loss and gradient norm of every turn must be those of the loop.

No way can be faster than the matrix products of a step (`matrix_products`), which take their turn like everybody: what
they take alone, over what a way takes, is the share of the bound that it reaches. The aim is 0.8.

Seconds are the processor's, of all threads, so that other work on the machine disturbs them less. Freed memory stays
with the process: glibc would give it back now and then, and that what lies at the end of the heap is one way's or
another's decides who takes it again, which is up to 3% of a step.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from matrix_products import MatrixProducts, capability, products_of, seen
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.config import build_config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import make_backend
from tandem.trainer.batching.shard import pad
from tandem.trainer.losses import Counts, make_loss

NUM_SEQUENCES, LENGTH = sized((8, 256), (2, 32))
NUM_TARGETS = NUM_SEQUENCES * (LENGTH - 1)
NUM_ROUNDS = sized(7, 1, long=25)
RATE, CLIP = 1e-6, 1.0
LOOP = "hugging face"
PRODUCTS = "matrix products"
AIM = 0.8
"""Of the bound."""
ADAM = {"lr": RATE, "min_lr": RATE, "weight_decay": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    "dtensor": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE, "weight_decay": 0.0}}},
    "megatron": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, "optimizer": ADAM}},
}
MODEL: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1152,
    "vocab_size": 4096,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model; this process is the only trainer, with one thread."""
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    settings = transformers.Qwen3Config(**MODEL)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path)
    yield tmp_path
    dist.destroy_process_group()
    torch.set_num_threads(before)


def _keep_freed_memory() -> None:
    """Tell glibc never to give the end of the heap back, and to take nothing from outside of it (`mallopt(3)`)."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    assert libc.mallopt(trim_threshold, 2**31 - 1)
    assert libc.mallopt(mmap_max, 0)


class Way:
    """A kind of training step: what it did last, and the seconds until its gradients were there."""

    def __init__(self) -> None:
        self.loss = self.grad_norm = 0.0
        self.started = 0.0
        self.passes: list[float] = []
        self.faults: list[int] = []

    def turn(self) -> float:
        """Return the processor's seconds of a whole step."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.started = time.process_time()
        self.step()
        seconds = time.process_time() - self.started
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
        return seconds

    def has_gradients(self) -> None:
        """Note that forward and backward are over."""
        self.passes.append(time.process_time() - self.started)

    def step(self) -> None:
        raise NotImplementedError


class Products(Way):
    """What no step can do without."""

    def __init__(self) -> None:
        super().__init__()
        rows = NUM_SEQUENCES * LENGTH
        self.products = MatrixProducts(
            products_of(
                MODEL,
                rows=rows,
                outputs=rows,
                sequences=NUM_SEQUENCES,
                queries=LENGTH,
                keys=seen(LENGTH),
                trains=True,
            )
        )

    def step(self) -> None:
        self.products.run()


class Loop(Way):
    def __init__(self, folder: Path, token_ids_BT: torch.Tensor) -> None:
        super().__init__()
        self.token_ids_BT = token_ids_BT
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    def step(self) -> None:
        loss = self.model(input_ids=self.token_ids_BT, labels=self.token_ids_BT, use_cache=False).loss
        loss.backward()
        self.has_gradients()
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = float(loss)


class Backend(Way):
    def __init__(self, folder: Path, token_ids_BT: torch.Tensor, policy: dict[str, Any]) -> None:
        super().__init__()
        self.config = build_config(
            {
                "algorithm": "sft",
                "policy": {
                    "model_name": str(folder),
                    "precision": "float32",
                    "max_total_sequence_length": LENGTH,
                    "max_grad_norm": CLIP,
                    "train_global_batch_size": NUM_SEQUENCES,
                    "train_micro_batch_size": NUM_SEQUENCES,
                    **policy,
                },
                "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            }
        )
        self.backend: Any = make_backend(self.config, checkpoint=None)
        batch = SampleBatch(
            lengths_S=np.full(NUM_SEQUENCES, LENGTH, dtype=np.int32),
            token_ids_T=token_ids_BT.flatten().numpy().astype(np.int32),
            loss_mask_T=np.ones(token_ids_BT.numel(), dtype=np.bool_),
            generation_logprobs_T=np.zeros(token_ids_BT.numel(), dtype=np.float32),
            advantages_S=np.ones(NUM_SEQUENCES, dtype=np.float32),
            rewards_S=np.zeros(NUM_SEQUENCES, dtype=np.float32),
        )
        rows = range(NUM_SEQUENCES)
        read = self.config.columns_of(1)
        columns = {column: batch.of_tokens(column.name) for column in read}
        self.micro_batches = [pad(batch, rows, divisible_by=1, device=self.backend.device, columns=columns)]
        # The first thing that happens to whole gradients.
        if policy.get("megatron_cfg"):
            self._watch(self.backend._held["policy", 0].optimizer, "prepare_grads")
        else:
            self._watch(self.backend._held["policy", 0], "take_step")

    def _watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.has_gradients()
            return function(*args, **options)

        setattr(owner, name, watched)

    def step(self) -> None:
        loss = make_loss(self.config, Counts(tokens=NUM_TARGETS, sequences=NUM_SEQUENCES), self.backend.device)
        done = self.backend.train_step(self.micro_batches, loss)
        self.loss, self.grad_norm = done.loss, done.grad_norm


@pytest.mark.filterwarnings("ignore")  # of what Megatron-Core imports
def test_backends_against_a_plain_loop(benchmark: BenchmarkFixture, folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    token_ids_BT = torch.randint(MODEL["vocab_size"], (NUM_SEQUENCES, LENGTH), generator=generator)
    loop = Loop(folder, token_ids_BT)
    ways: dict[str, Way] = {name: Backend(folder, token_ids_BT, policy) for name, policy in WAYS.items()}
    ways[LOOP] = loop
    products = Products()
    turns = Turns({name: way.turn for name, way in {**ways, PRODUCTS: products}.items()})

    def a_round() -> None:
        turns.round()
        for way in ways.values():
            assert way.loss == pytest.approx(loop.loss, rel=1e-4)
            assert way.grad_norm == pytest.approx(loop.grad_norm, rel=1e-4)

    benchmark.pedantic(a_round, rounds=NUM_ROUNDS, warmup_rounds=2)
    steps = turns.last(NUM_ROUNDS)
    alone = steps.pop(PRODUCTS)
    seconds = {
        "forward and backward": {name: way.passes[-NUM_ROUNDS:] for name, way in ways.items()},
        "whole step": steps,
    }
    medians = {what: {name: statistics.median(times) for name, times in of.items()} for what, of in seconds.items()}
    shares = {
        what: {name: statistics.median(np.divide(of[LOOP], times)) for name, times in of.items()}
        for what, of in seconds.items()
    }
    reached = {
        what: {name: statistics.median(np.divide(alone, times)) for name, times in of.items()}
        for what, of in seconds.items()
    }
    rate = products.products.num_operations / statistics.median(alone)
    benchmark.extra_info.update(
        {
            "parameters": loop.model.num_parameters(),
            "load average of the machine": os.getloadavg(),
            "vectors": capability(),
            "matrix products: operations a second, one thread": rate,
            "pages taken in a step, medians": {
                name: statistics.median(way.faults[-NUM_ROUNDS:]) for name, way in ways.items()
            },
            "median seconds": medians | {PRODUCTS: statistics.median(alone)},
            f"times as fast as {LOOP}, medians of the rounds' ratios": shares,
            f"share of the bound, {PRODUCTS}, medians of the rounds' ratios": reached,
            "seconds": seconds | {PRODUCTS: alone},
        }
    )
    for what in seconds:
        of_backends = {name: shares[what][name] for name in WAYS}
        keep_ratios(benchmark, f"{what}, times as fast as {LOOP}", of_backends)
    for what in seconds:
        keep_ratios(benchmark, f"{what}, share of the bound", reached[what], aim=AIM)
    print(f"\n{loop.model.num_parameters() / 1e6:.1f}M parameters, {NUM_SEQUENCES} x {LENGTH} tokens, one thread")
    print(f"{PRODUCTS} alone: {1e3 * statistics.median(alone):.1f} ms, {rate / 1e9:.0f} GFLOP/s ({capability()})")
    print(f"{'':24}{'way':14}{'median ms':>11}{'times as fast':>15}{'of the bound':>14}")
    for what, of in medians.items():
        for name, median in of.items():
            print(f"{what:24}{name:14}{1e3 * median:11.1f}{shares[what][name]:15.3f}{reached[what][name]:14.3f}")
