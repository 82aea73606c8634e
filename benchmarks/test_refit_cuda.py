"""How fast do weights cross from a trainer to an engine on one GPU, beside the usual way and a copy on the device?

Two processes on one device. The trainer holds a Qwen3-8B in bfloat16 with the parameters that transformers gives it;
the engine holds vLLM's fused parameters of the same model. Ours: the engine opens the trainer's memory once and copies
out of it, one copy a byte. The usual way, as post-training systems around vLLM do it: the trainer packs parameters into
a bucket, sends a CUDA IPC handle to it, and the engine opens it and loads each tensor by name into its place; bucket
after bucket. What is timed is from the command until the engine holds the last element. Setting up is not timed.
Checked after every turn: each element, at a place that is computed here and not by an adapter.

Without a GPU this skips. ``BENCHMARK_DEVICE=cpu BENCHMARK_LAYERS=1`` runs all of it in shared memory, to try the code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch
from measure import Turns, report, seconds_of
from processes import Asked, EndpointService, Plane, Remote, config_json, started
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.launch.service import ServiceContext
from tandem.refit import layout
from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import Address
from tandem.refit.transports import cuda_ipc, shm
from tandem.refit.weight_client import WeightClient
from tandem.refit.weights import Weights, device_name

DEVICE = os.environ.get("BENCHMARK_DEVICE", sized("cuda", "cpu"))
NUM_ROUNDS = 7
BUCKET_BYTES = sized(512, 64) << 20
TIMEOUT_S = 300.0
MODEL = {  # Qwen3-8B
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": int(os.environ.get("BENCHMARK_LAYERS", sized("36", "1"))),
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936 if DEVICE == "cuda" else 2048,
    "tie_word_embeddings": False,
}
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
ROWS = {"q": (0, 4096), "k": (4096, 5120), "v": (5120, 6144), "gate": (0, 12288), "up": (12288, 24576)}
"""Of the fused parameter, by what is fused into it."""


def value_of(index: int, version: int) -> float:
    """Return what all elements of a tensor are in a version; bfloat16 holds it, and it is never 0."""
    return float((index * 7 + version) % 127 + 1)


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def share(tensor: torch.Tensor) -> Address:
    return cuda_ipc.share(tensor) if DEVICE == "cuda" else shm.share(tensor)


class Process(EndpointService):
    """What both have in common: parameters by name, flat, and an endpoint."""

    def __init__(self, context: ServiceContext, described: layout.Layout, queue: Any) -> None:
        self.shapes = {tensor.name: tensor.shape for tensor in described.tensors}
        self.parameters = {
            storage.name: torch.zeros(storage.num_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
            for storage in described.storages
        }
        self.layout = described
        self.queue = queue
        self.context = context

    def serve(self) -> None:
        self.weight_client = WeightClient(self.context, Weights(self.layout, self.parameters))


class Trainer(Process):
    def __init__(self, context: ServiceContext, model: ModelShape, device: str, queue: Any) -> None:
        super().__init__(context, HuggingFace().layout(model, 0, "host", device), queue)
        self.layout = msgspec.structs.replace(
            self.layout,
            storages=tuple(
                msgspec.structs.replace(storage, address=share(self.parameters[storage.name]))
                for storage in self.layout.storages
            ),
        )
        self.bucket = torch.empty(BUCKET_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
        self.serve()

    def write(self, version: int) -> None:
        for index, name in enumerate(sorted(self.shapes)):
            self.parameters[name].fill_(value_of(index, version))
        synchronise()

    def by_name(self) -> None:
        """Pack and send bucket after bucket; the engine says when it has read one."""
        packed: list[tuple[str, int, int]] = []
        at = 0
        for name, tensor in self.parameters.items():
            for first in range(0, tensor.numel(), self.bucket.numel()):  # a tensor may be larger than a bucket
                part = tensor[first : first + self.bucket.numel()]
                if at + part.numel() > self.bucket.numel():
                    self._send(packed)
                    packed, at = [], 0
                self.bucket[at : at + part.numel()].copy_(part)
                packed.append((name, first, part.numel()))
                at += part.numel()
        self._send(packed)
        self.queue[0].put(None)

    def _send(self, packed: list[tuple[str, int, int]]) -> None:
        synchronise()
        self.queue[0].put((self.bucket, packed))
        self.queue[1].get(timeout=TIMEOUT_S)


class Engine(Process):
    def __init__(self, context: ServiceContext, model: ModelShape, device: str, queue: Any) -> None:
        super().__init__(context, Vllm().layout(model, 0, "host", device), queue)
        self.places = {name: self._place(name, shape) for name, shape in self.shapes.items()}
        self.other = {name: torch.ones_like(tensor) for name, tensor in self.parameters.items()}
        self.serve()

    def _place(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return where a tensor lies in vLLM's parameters, flat."""
        part = name.split(".")[-2].removesuffix("_proj")
        if part not in FUSED:
            return self.parameters[name]
        first, last = ROWS[part]
        fused = self.parameters[name.replace(f"{part}_proj", f"{FUSED[part]}_proj")]
        return fused[first * shape[1] : last * shape[1]]

    def clear(self) -> None:
        for tensor in self.parameters.values():
            tensor.zero_()
        synchronise()

    def check(self, version: int) -> None:
        for index, name in enumerate(sorted(self.places)):
            least, most = self.places[name].aminmax()
            assert least == most == value_of(index, version), f"{name} is not that of version {version}"

    def memcpy(self) -> float:
        """Copy as much on the device, a parameter at a time."""

        def copy() -> None:
            torch._foreach_copy_([*self.parameters.values()], [*self.other.values()])
            synchronise()

        return seconds_of(copy)

    def by_name(self) -> None:
        """Load what arrives, by name."""
        while (received := self.queue[0].get(timeout=TIMEOUT_S)) is not None:
            bucket, packed = received
            at = 0
            for name, first, num in packed:
                self.places[name][first : first + num].copy_(bucket[at : at + num])
                at += num
            synchronise()
            del bucket, received
            self.queue[1].put(True)


def make(context: ServiceContext, connection: Connection, queue: Any) -> tuple[Process, Asked]:
    model = make_shape(MODEL, "bfloat16")
    device = device_name(torch.device(DEVICE))
    process: Trainer | Engine = (Trainer if context.name.startswith("trainer") else Engine)(
        context, model, device, queue
    )
    mine: tuple[Callable[..., Any], ...] = (
        (process.write,) if isinstance(process, Trainer) else (process.clear, process.check, process.memcpy)
    )
    ways = (process.verify, process.by_name, *mine)
    return process, {"layout": lambda: layout.encode(process.layout), **{way.__name__: way for way in ways}}


class Bench:
    """A new version, a way to move it, and a check of every element."""

    def __init__(self, trainer: Remote, engine: Remote, config: bytes) -> None:
        self.trainer, self.engine = trainer, engine
        self.plane = Plane([trainer], [engine], config, alias=False)
        self.version = 0

    def turn(self, way: Callable[[], None], verify: str = "off", after: Callable[[], None] | None = None) -> float:
        self.version += 1
        for remote in (self.trainer, self.engine):
            remote.ask("verify", verify)
        self.trainer.ask("write", self.version)
        self.engine.ask("clear")
        seconds = seconds_of(way)
        self.engine.ask("check", self.version)
        if after is not None:
            after()
        return seconds

    def refit(self) -> None:
        self.plane.refit(self.version)

    def verify(self) -> None:
        self.plane.verify(self.version)

    def refit_and_verify(self) -> None:
        self.refit()
        self.verify()

    def by_name(self) -> None:
        for remote in (self.trainer, self.engine):
            remote.tell("by_name")
        for remote in (self.trainer, self.engine):
            remote.answer()


@pytest.mark.timeout(900)
@pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU here")
def test_refit_on_one_gpu(benchmark: BenchmarkFixture) -> None:
    config = config_json("full")
    context = torch.multiprocessing.get_context("spawn")
    queue = (context.Queue(), context.Queue())
    with started(make, config, {"trainer-0": (queue,), "rollout-0": (queue,)}) as remotes:
        bench = Bench(remotes["trainer-0"], remotes["rollout-0"], config)
        transport = "cuda_ipc" if DEVICE == "cuda" else "shm"
        num_bytes = sum(bench.plane.planned.num_bytes.values())
        assert num_bytes == 2 * sum(math.prod(tensor.shape) for tensor in make_shape(MODEL, "bfloat16").tensors)
        turns = Turns(
            {
                "copy on the device": lambda: float(bench.engine.ask("memcpy")),
                f"tandem, {transport}, not verified": lambda: bench.turn(bench.refit),
                f"tandem, {transport}, verified beside": lambda: bench.turn(bench.refit, "full", bench.verify),
                f"tandem, {transport}, until verified": lambda: bench.turn(bench.refit_and_verify, "full"),
                "buckets, loaded by name": lambda: bench.turn(bench.by_name),
            }
        )
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"{num_bytes / 1e9:.1f} GB on {device}",
        num_bytes=num_bytes,
        against="copy on the device",
        device=device,
    )
