"""How fast are digests of weights taken, beside a plain memcpy and beside hashes that depend on the sharding?

One process, one thread, weights in memory that no cache holds from the round before (but those of the small model,
which may). Every round runs every way, so that whatever else the machine does meets all of them. Other hashes read
each tensor's bytes in order: their numbers say what they hashed, but not whether two shardings of it agree.
"""

from __future__ import annotations

import ctypes
import importlib.util
import statistics
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture

from tandem.refit.digests.slices import ElementSampling
from tandem.refit.digests.task import digest_layout
from tandem.refit.layout import Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.program import ProcessVerification

NUM_ROUNDS = 9
ONE_IN = 16

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def model(num_layers: int, vocabulary: int, hidden: int, heads: int, kv: int, head: int, mlp: int) -> Shapes:
    """Return the shapes of a Qwen3; `heads` and `kv` are the query's and the key's dimensions."""
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = {f"layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    return {"embed_tokens.weight": (vocabulary, hidden), **layers, "norm.weight": (hidden,)}


MODELS = {
    "14 MB, 35 tensors": model(3, 384, 256, 256, 128, 64, 1152),
    "512 MB, 90 tensors": model(8, 2048, 1024, 2048, 1024, 128, 3072),
}


class Weights:
    """Weights, another copy of them to copy to, and every way to go over them."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()}
        self._layout = self._make_layout(str(dtype).removeprefix("torch."), dtype.itemsize)
        rows = np.arange(len(self._layout.pieces))
        self._as_bfloat16 = ProcessVerification(rows, ("bfloat16",) * len(shapes))
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._version = 0

    def _make_layout(self, dtype: str, item_size: int) -> Layout:
        builder = LayoutBuilder("host")
        for name, tensor in self._tensors.items():
            shape = tuple(tensor.shape)
            storage = builder.storage(name, tensor.nbytes)
            builder.add(
                builder.tensor(name, shape, dtype), whole(shape), storage, 0, contiguous_strides(shape, item_size)
            )
        return builder.build()

    def tandem(self) -> None:
        digest_layout(self._layout, self._tensors)

    def tandem_as_bfloat16(self) -> None:
        digest_layout(self._layout, self._tensors, self._as_bfloat16)

    def tandem_sampled(self) -> None:
        self._version += 1
        digest_layout(self._layout, self._tensors, sampling=ElementSampling(self._version, ONE_IN))

    def memcpy(self) -> None:
        for name, tensor in self._tensors.items():
            ctypes.memmove(self._copies[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)

    def xxh3(self) -> None:
        import xxhash

        for tensor in self._tensors.values():
            xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy())

    def hash_tensor(self) -> None:
        for tensor in self._tensors.values():
            torch.hash_tensor(tensor)

    def crc32(self) -> None:
        for tensor in self._tensors.values():
            zlib.crc32(tensor.view(torch.uint8).numpy())

    @property
    def others(self) -> list[Callable[[], None]]:
        hashes = [self.xxh3] if importlib.util.find_spec("xxhash") else []
        return [self.tandem_as_bfloat16, self.tandem_sampled, *hashes, self.hash_tensor, self.crc32, self.memcpy]


def seconds_of(way: Callable[[], None]) -> float:
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", MODELS)
def test_digests(benchmark: BenchmarkFixture, size: str, dtype: torch.dtype) -> None:
    weights = Weights(MODELS[size], dtype)
    ways = weights.others
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}

    def run_the_others() -> None:
        ways.append(ways.pop(0))  # nobody always comes first
        for way in ways:
            seconds[way.__name__].append(seconds_of(way))

    benchmark.pedantic(weights.tandem, setup=run_the_others, rounds=NUM_ROUNDS, warmup_rounds=1)
    seconds["tandem"] = benchmark.stats.stats.data
    report(
        benchmark, {way: times[-NUM_ROUNDS:] for way, times in seconds.items()}, weights.num_bytes, f"{size}, {dtype}"
    )


def report(benchmark: BenchmarkFixture, seconds: dict[str, list[float]], num_bytes: int, title: str) -> None:
    """Print and keep what was measured; rates are of the bytes of all weights, also where only some are read."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    rates = {way: num_bytes / median / 1e9 for way, median in medians.items()}
    ratios = {way: medians["memcpy"] / median for way, median in medians.items()}
    benchmark.extra_info.update(
        {
            "num_bytes": num_bytes,
            "seconds": seconds,
            "median seconds": medians,
            "median GB/s": rates,
            "times memcpy's rate, medians": ratios,
        }
    )
    keep_ratios(benchmark, "rate, share of memcpy", {way: ratio for way, ratio in ratios.items() if way != "memcpy"})
    print(f"\n{title} ({num_bytes / 1e6:.1f} MB); sampled: one row in {ONE_IN}")
    print(f"{'way':24}{'median ms':>11}{'GB/s':>8}{'of memcpy':>11}{'best ms':>9}")
    for way, median in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{way:24}{1e3 * median:11.2f}{rates[way]:8.2f}{ratios[way]:11.3f}{1e3 * min(seconds[way]):9.2f}")
