"""How fast do 512 MB of weights cross to another process, beside a plain memcpy and beside other ways to move them?

Two processes, one thread each. Every round runs every way, so that whatever else the machine does meets all of them.
What is timed is what one refit costs: from the receiver's order until the last element is in its parameters, which
exist beforehand. Setting up (binding, process groups, queues) is not timed; nor is training, which ours needs to be
finished just as every other way does.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.torch import load_file, save_file

from tandem.refit import layout
from tandem.refit.layout import Layout, Piece, PrivateMemory, Storage, TensorLayout, contiguous_strides, whole
from tandem.refit.planner import plan
from tandem.refit.transports import shm

NUM_ROUNDS = 9
NUM_LAYERS = 8
TIMEOUT_S = 60.0

LAYER = {  # of Qwen3-0.6B
    "self_attn.q_proj": (2048, 1024),
    "self_attn.k_proj": (1024, 1024),
    "self_attn.v_proj": (1024, 1024),
    "self_attn.o_proj": (1024, 2048),
    "self_attn.q_norm": (128,),
    "self_attn.k_norm": (128,),
    "mlp.gate_proj": (3072, 1024),
    "mlp.up_proj": (3072, 1024),
    "mlp.down_proj": (1024, 3072),
    "input_layernorm": (1024,),
    "post_attention_layernorm": (1024,),
}
SHAPES = {
    "model.embed_tokens.weight": (2048, 1024),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(NUM_LAYERS) for name, shape in LAYER.items()},
    "model.norm.weight": (1024,),
}

Tensors = dict[str, torch.Tensor]


def make_tensors(value: float) -> Tensors:
    return {name: torch.full(shape, value + index) for index, (name, shape) in enumerate(SHAPES.items())}


def make_layout(tensors: Tensors, *, shared: bool) -> Layout:
    held, storages = {}, {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        held[name] = TensorLayout(shape, "float32", (Piece(whole(shape), name, 0, contiguous_strides(shape, 4)),))
        storages[name] = Storage(tensor.nbytes, shm.share(tensor) if shared else PrivateMemory())
    return Layout("host", held, storages)


def join_group(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)


def send(connection: Connection, store: str, file: str) -> None:
    """Be the trainer: share the tensors, and send them in the way that each order names."""
    torch.set_num_threads(1)
    tensors = make_tensors(1.0)
    connection.send_bytes(layout.encode(make_layout(tensors, shared=True)))
    join_group(0, store)
    while (order := connection.recv_bytes()) != b"stop":
        match order:
            case b"broadcast":
                for tensor in tensors.values():
                    dist.broadcast(tensor, src=0)
            case b"save":
                save_file(tensors, file)
                connection.send_bytes(b"saved")
            case b"queue":
                connection.send(tensors)  # torch.multiprocessing pickles handles, not elements
    dist.destroy_process_group()


@contextmanager
def sender(store: str, file: str) -> Iterator[Connection]:
    context = torch.multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, store, file), daemon=True)
    process.start()
    theirs.close()
    try:
        yield connection
        connection.send_bytes(b"stop")
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(TIMEOUT_S)


class Receiver:
    """Be the engine: parameters that exist, and every way to fill them."""

    def __init__(self, connection: Connection, file: str) -> None:
        self._connection = connection
        self._file = file
        self._parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.num_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        assert connection.poll(TIMEOUT_S)
        sources = {"trainer-0": layout.decode(connection.recv_bytes())}
        wanted = {"rollout-0": make_layout(self._parameters, shared=False)}
        program = plan(sources, wanted, allow_alias=False).programs["rollout-0"]
        self.bound = shm.bind(program, self._parameters)
        self._local = make_tensors(1.0)

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.zero_()

    def check(self) -> None:
        for index, parameter in enumerate(self._parameters.values()):
            assert (parameter == 1.0 + index).all()

    def memcpy(self) -> None:
        """Copy the same from memory of this process with the C library, a range for each tensor."""
        for name, parameter in self._parameters.items():
            ctypes.memmove(parameter.data_ptr(), self._local[name].data_ptr(), parameter.nbytes)

    def gloo(self) -> None:
        self._connection.send_bytes(b"broadcast")
        for parameter in self._parameters.values():
            dist.broadcast(parameter, src=0)

    def safetensors(self) -> None:
        self._connection.send_bytes(b"save")
        assert self._connection.poll(TIMEOUT_S)
        self._connection.recv_bytes()
        self._copy(load_file(self._file))
        Path(self._file).unlink()

    def torch_multiprocessing(self) -> None:
        self._connection.send_bytes(b"queue")
        assert self._connection.poll(TIMEOUT_S)
        self._copy(self._connection.recv())

    def _copy(self, tensors: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])


def seconds_of(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_refit_over_shared_memory(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, sender(store, f"{folder}/weights") as connection:
        receiver = Receiver(connection, f"{folder}/weights")
        join_group(1, store)
        ways = [receiver.gloo, receiver.safetensors, receiver.torch_multiprocessing]
        seconds: dict[str, list[float]] = {way.__name__: [] for way in [*ways, receiver.memcpy]}

        processor: dict[str, list[float]] = {"memcpy": [], "tandem": []}

        def refit() -> int:
            started = time.thread_time()
            num_bytes = receiver.bound.run()
            processor["tandem"].append(time.thread_time() - started)
            return num_bytes

        def run_the_others() -> None:
            ways.append(ways.pop(0))  # nobody always comes first
            for way in [*ways, receiver.memcpy]:  # memcpy last: the machine is then as ours meets it
                receiver.clear()
                started = time.thread_time()
                seconds[way.__name__].append(seconds_of(way))
                if way == receiver.memcpy:
                    processor["memcpy"].append(time.thread_time() - started)
                receiver.check()
            receiver.clear()

        moved = benchmark.pedantic(refit, setup=run_the_others, rounds=NUM_ROUNDS, warmup_rounds=1)
        receiver.check()
        assert moved == receiver.num_bytes
        dist.destroy_process_group()
        receiver.bound.close()

    seconds["tandem"] = benchmark.stats.stats.data
    report(benchmark, *({way: times[-NUM_ROUNDS:] for way, times in of.items()} for of in (seconds, processor)), moved)


def report(
    benchmark: BenchmarkFixture, seconds: dict[str, list[float]], processor: dict[str, list[float]], num_bytes: int
) -> None:
    """Print and keep what was measured; `processor` is the processor time of the ways that need one thread alone."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    rates = {way: num_bytes / median / 1e9 for way, median in medians.items()}
    ratios = {way: medians["memcpy"] / median for way, median in medians.items()}
    best = {way: min(seconds["memcpy"]) / min(times) for way, times in seconds.items()}
    processor_medians = {way: statistics.median(times) for way, times in processor.items()}
    processor_ratio = processor_medians["memcpy"] / processor_medians["tandem"]
    benchmark.extra_info.update(
        {
            "num_bytes": num_bytes,
            "seconds": seconds,
            "median seconds": medians,
            "median GB/s": rates,
            "times memcpy's rate, medians": ratios,
            "times memcpy's rate, best rounds": best,
            "processor seconds": processor,
            "times memcpy's rate, medians of processor time": processor_ratio,
        }
    )
    print(f"\n{num_bytes / 1e6:.0f} MB, {len(SHAPES)} tensors, {NUM_ROUNDS} interleaved rounds; best: of all rounds")
    print(f"{'way':24}{'median s':>9}{'GB/s':>8}{'of memcpy':>11}{'best s':>9}{'of memcpy':>11}")
    for way, median in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{way:24}{median:9.4f}{rates[way]:8.2f}{ratios[way]:11.3f}{min(seconds[way]):9.4f}{best[way]:11.3f}")
    times = ", ".join(f"{way} {median:.4f} s" for way, median in processor_medians.items())
    print(f"processor time, which other work on the machine disturbs less: {times}, {processor_ratio:.3f} of memcpy")
