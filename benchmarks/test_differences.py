"""Differences instead of whole weights: how much changes in a step, what sending it costs, and what finding it costs.

1. The share of bfloat16 elements that an optimizer step changes, by learning rate and optimizer: of a model of 41M
   parameters under the real trainer's steps. ``BENCHMARK_LAYERS=14`` makes it one of 100M.
2. Bytes and seconds of a refit against the stream of whole weights, over a cable between two network namespaces that is
   held to a rate: one trainer, one engine, a thread each. Both ways take turns; every element is compared after each.
   Bytes are those that came out of the cable, whatever they were. Verified: until both sides have their digests.
3. Processor time to find, write and apply what changed, beside a memcpy of all weights, in one thread. The floor of it
   is also measured: the C library's `memcmp` of as many equal bytes, which takes longer than the memcpy already.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from measure import keep_ratios
from one_trainer import LENGTH, MODEL, NUM_SEQUENCES, make_batch, one_trainer
from processes import Asked, Remote, config_json, enter_network, limit_rate, started
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from torch.distributed import PrefixStore, TCPStore

from tandem.config import Config
from tandem.launch.service import ServiceContext
from tandem.refit import layout, program
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.digests.task import digest_layout
from tandem.refit.layout import Layout
from tandem.refit.planner import plan
from tandem.refit.transports import encoding, process_group
from tandem.refit.transports.sizes import largest_difference
from tandem.refit.weights import bind
from tandem.samples.batch import build_given_table
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.runs import hosts_harness
from tests.harness.runs.hosts_harness import ADDRESSES

hosts = hosts_harness.hosts

SHARES = sized((0.0, 0.001, 0.01, 0.03, 0.1, 0.5), (0.01,))
NUM_ROUNDS = sized(2, 1, long=5)
TIMEOUT_S = 120.0
PORT = 29556
"""Of the store, inside a namespace that nobody else is in."""


# --- how much changes ------------------------------------------------------------------------------------------------

RATES = sized((1e-7, 1e-6, 1e-5, 1e-4, 1e-3), (1e-5,))
OPTIMIZERS = {
    "AdamW": {"name": "torch.optim.AdamW"},
    "AdamW, no decay": {"name": "torch.optim.AdamW", "kwargs": {"weight_decay": 0.0}},
    "SGD": {"name": "torch.optim.SGD"},
}
NUM_STEPS = sized(12, 2)
NUM_LAYERS = int(os.environ.get("BENCHMARK_LAYERS", MODEL["num_hidden_layers"]))


def shares_of_steps(config: Config, optimizer: dict[str, Any], rate: float) -> list[float]:
    """Return the share of bfloat16 elements that each step changes: of every step a different batch."""
    kwargs = {**optimizer.get("kwargs", {}), "lr": rate}
    chosen = msgspec.structs.replace(config.policy.optimizer, name=optimizer["name"], kwargs=kwargs)
    config = msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, optimizer=chosen))
    backend = DTensorBackend(config, checkpoint=None)
    storages = backend.weights().storages
    shares, random = [], np.random.default_rng(0)
    before = {name: tensor.to(torch.bfloat16) for name, tensor in storages.items()}
    for _ in range(NUM_STEPS):
        batch = make_batch()
        batch = batch.replace(
            token_ids_T=random.permutation(batch.token_ids_T),
            advantages_S=random.normal(0.0, 1.0, NUM_SEQUENCES).astype(np.float32),
        )
        step.train(backend, build_given_table(batch), batch, config)
        num_changed = 0
        for name, tensor in storages.items():
            now = tensor.to(torch.bfloat16)
            num_changed += int((now.view(torch.int16) != before[name].view(torch.int16)).sum())
            before[name] = now
        shares.append(num_changed / sum(tensor.numel() for tensor in storages.values()))
    return shares


def commit() -> str:
    """Return the commit that is measured."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


@pytest.mark.long(minutes=7)
@pytest.mark.timeout(3600)
def test_share_that_changes(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL, "num_hidden_layers", NUM_LAYERS)
    found: dict[str, dict[str, list[float]]] = {}

    def measure() -> None:
        for name, optimizer in OPTIMIZERS.items():
            for rate in RATES:
                found.setdefault(name, {})[f"{rate:g}"] = shares_of_steps(config, optimizer, rate)

    with one_trainer(tmp_path) as config:
        benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info["commit"] = commit()
    benchmark.extra_info.update({"layers": NUM_LAYERS, "tokens a step": NUM_SEQUENCES * LENGTH, "shares": found})
    print(
        f"\nshare of bfloat16 elements that a step changes: the first, and the median of the last half of {NUM_STEPS}"
    )
    print(f"{'optimizer':18}" + "".join(f"{f'lr {rate:g}':>18}" for rate in RATES))
    for name, by_rate in found.items():
        cells = (f"{each[0]:8.2%} {statistics.median(each[len(each) // 2 :]):8.2%}" for each in by_rate.values())
        print(f"{name:18}" + "".join(f"{cell:>18}" for cell in cells))
    changing = {
        f"{name}, lr {rate}": statistics.median(each[len(each) // 2 :])
        for name, by_rate in found.items()
        for rate, each in by_rate.items()
    }
    keep_ratios(benchmark, "share of elements that a step changes", changing)


# --- over a cable ----------------------------------------------------------------------------------------------------

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(3072, 256),
    "num_hidden_layers": sized(4, 1),
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": sized(128, 16),
    "vocab_size": sized(4096, 512),
    "tie_word_embeddings": False,
}
WAYS = ("whole", "differences")


class End:
    """A trainer or an engine: for each way memory of its own, as its layout says."""

    def __init__(
        self, context: ServiceContext, connection: Connection, encoded: bytes, made: bytes, rate: float
    ) -> None:
        self.layout, self.program = layout.decode(encoded), program.decode(made)
        self.memory = {
            way: {s.name: torch.zeros(s.num_bytes, dtype=torch.uint8) for s in self.layout.storages} for way in WAYS
        }
        self.groups: dict[str, process_group.ConnectedGroup] = {}
        largest = {"whole": 0.0, "differences": largest_difference(rate)}
        programs = {way: msgspec.structs.replace(self.program, largest_difference=largest[way]) for way in WAYS}
        self.bound = {way: bind(programs[way], self.memory[way], self.groups) for way in WAYS}
        self.store: TCPStore | None = None

    def asked(self) -> Asked:
        asked = (enter_network, self.host, self.connect, self.write, self.run, self.digest)
        return {each.__name__: each for each in asked}

    def handle(self, command: Any, arrays: Any) -> None:
        raise AssertionError("no commands are given")

    def work(self) -> bool:
        return False

    def close(self) -> None:
        for bound in self.bound.values():
            bound.close()
        for group in self.groups.values():
            group.close()

    def host(self, address: str) -> None:
        self.store = TCPStore(address, PORT, is_master=True, wait_for_workers=False)

    def connect(self, address: str) -> None:
        store = TCPStore(address, PORT, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        for group in self.program.transfer_groups:
            self.groups[group.name] = process_group.connect(
                group, self.program.member, PrefixStore("benchmark", store), torch.device("cpu"), TIMEOUT_S
            )

    def write(self, version: int, share: float) -> None:
        """Change so many elements of both ways' weights, by the last bit as most steps do."""
        for number, name in enumerate(self.memory["whole"]):
            values = self.memory["whole"][name].view(torch.int16)
            generator = torch.Generator().manual_seed(version * 1000 + number)
            if version == 0:
                values.copy_(torch.randint(0x3000, 0x3F00, values.shape, generator=generator, dtype=torch.int16))
            else:
                values ^= torch.rand(values.shape, generator=generator) < share
            self.memory["differences"][name].copy_(self.memory["whole"][name])

    def run(self, way: str) -> int:
        return sum(self.bound[way].run(TIMEOUT_S).values())

    def digest(self, way: str) -> list[int]:
        digests: list[int] = digest_layout(self.layout, self.memory[way], self.program.verification).tolist()
        return [digest >> 1 for digest in digests]  # msgpack has them as signed numbers


def make(context: ServiceContext, connection: Connection, *arguments: Any) -> tuple[End, Asked]:
    end = End(context, connection, *arguments)
    return end, end.asked()


def sides() -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Return one trainer's layout and one engine's, which fuses some weights."""
    model = make_shape(SHAPE, "bfloat16")
    (source,) = Megatron().layouts(model, HostNames("trainers", 1, has_gpus=False))
    (engine,) = Vllm().layouts(model, HostNames("engines", 1, has_gpus=False))
    return {"trainer-0": source}, {"rollout-0": engine}


class Cable:
    """The end of the cable at the trainer, held to a rate; and what came out at the engine."""

    def __init__(self, namespaces: Mapping[str, str], gigabytes_per_s: float) -> None:
        self._engines = namespaces["engines"]
        limit_rate(namespaces["trainers"], gigabytes_per_s)

    def carried(self) -> int:
        command = ["ip", "netns", "exec", self._engines, "cat", "/sys/class/net/cable/statistics/rx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=20).stdout)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "gigabytes_per_s",
    [1.0, pytest.param(0.1, marks=pytest.mark.long(minutes=1)), pytest.param(10.0, marks=pytest.mark.long(minutes=1))],
)
def test_over_a_cable(benchmark: BenchmarkFixture, hosts: dict[str, str], gigabytes_per_s: float) -> None:
    sources, engines = sides()
    made = plan(sources, engines, allow_alias=False)
    layouts = {**sources, **engines}
    members = {
        name: (layout.encode(held), program.encode(made.programs[name]), gigabytes_per_s)
        for name, held in layouts.items()
    }
    cable = Cable(hosts, gigabytes_per_s)
    num_bytes = sum(link.num_bytes for link in made.links)
    results: dict[str, Any] = {}
    with started(make, config_json("off"), members) as remotes:
        everywhere(remotes, "enter_network", {"trainer-0": hosts["trainers"], "rollout-0": hosts["engines"]})
        remotes["trainer-0"].ask("host", ADDRESSES["trainers"])
        everywhere(remotes, "connect", ADDRESSES["trainers"])
        benchmark.pedantic(lambda: results.update(measure(remotes, cable)), rounds=1)
    benchmark.extra_info.update(
        {
            "commit": commit(),
            "GB/s": gigabytes_per_s,
            "num_bytes": num_bytes,
            "load": os.getloadavg(),
            "by share": results,
        }
    )
    print(f"\n{num_bytes / 1e6:.0f} MB in bfloat16 over {gigabytes_per_s:g} GB/s; the best of {NUM_ROUNDS} rounds")
    print("changed    MB whole  differing   fewer     ms whole  differing  sooner   verified: whole  differing  sooner")
    sooner: dict[str, float] = {}
    for share, each in results.items():
        (mb, mb_d), (s, s_d), (v, v_d) = (
            [min(each[way][what]) for way in WAYS] for what in ("bytes", "seconds", "verified")
        )
        print(
            f"{share:>7} {mb / 1e6:11.1f} {mb_d / 1e6:10.2f} {mb / mb_d:7.1f} {1e3 * s:12.1f} {1e3 * s_d:10.1f} "
            f"{s / s_d:7.2f} {1e3 * v:17.1f} {1e3 * v_d:10.1f} {v / v_d:7.2f}"
        )
        sooner[f"{share} changed"] = s / s_d
    keep_ratios(benchmark, f"times as fast as whole messages, {gigabytes_per_s:g} GB/s", sooner)


def everywhere(remotes: Mapping[str, Remote], ask: str, arguments: Any) -> list[Any]:
    """Ask every process at once; of a dictionary, each with its own argument."""
    for name, remote in remotes.items():
        each = arguments[name] if isinstance(arguments, dict) else arguments
        remote.tell(ask, *(each if isinstance(each, tuple) else (each,)))
    return [remote.answer() for remote in remotes.values()]


def measure(remotes: Mapping[str, Remote], cable: Cable) -> dict[str, Any]:
    """Return bytes, seconds, and seconds until verified, of every round and way, by share."""
    version = 0

    def refit(way: str) -> tuple[int, float, float]:
        before, begun = cable.carried(), time.perf_counter()
        everywhere(remotes, "run", way)
        moved = time.perf_counter() - begun
        digests = everywhere(remotes, "digest", way)
        verified = time.perf_counter() - begun
        assert digests[0] == digests[1], f"{way}, version {version}"
        return cable.carried() - before, moved, verified

    remotes["trainer-0"].ask("write", 0, 0.0)
    for way in WAYS:
        refit(way)
    found: dict[str, Any] = {}
    for share in SHARES:
        each = found[f"{share:g}"] = {way: {"bytes": [], "seconds": [], "verified": []} for way in WAYS}
        for number in range(NUM_ROUNDS):
            version += 1
            remotes["trainer-0"].ask("write", version, share)
            for way in WAYS[:: (1, -1)[number % 2]]:
                for what, value in zip(("bytes", "seconds", "verified"), refit(way), strict=True):
                    each[way][what].append(value)
    return found


# --- in one process --------------------------------------------------------------------------------------------------

NUM_ELEMENTS = sized(64 << 20, 1 << 20)
MESSAGE = 2 << 20
"""Elements of a message, in bfloat16."""
MEMCMP = ctypes.CDLL(None).memcmp
MEMCMP.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Weights:
    """Weights that a sender and a receiver hold, and of which a share changes each round."""

    def __init__(self, share: float) -> None:
        self.share = share
        generator = torch.Generator().manual_seed(0)
        self.new = torch.randint(0x3000, 0x3F00, (NUM_ELEMENTS,), generator=generator, dtype=torch.int16)
        self.old = torch.from_numpy(self.new.numpy().copy())  # as a sender keeps it
        self.received, self.copied = self.new.clone(), torch.empty_like(self.new)
        self.changes: list[encoding.MessageDifference] = []

    def find(self) -> None:
        messages = zip(self.old.split(MESSAGE), self.new.split(MESSAGE), strict=True)
        self.changes = [encoding.advance(*each) for each in messages]

    def apply(self) -> None:
        for change, message in zip(self.changes, self.received.split(MESSAGE), strict=True):
            encoding.apply(change, message)

    def memcmp(self) -> None:
        assert MEMCMP(self.old.data_ptr(), self.received.data_ptr(), self.old.nbytes) == 0

    def memcpy(self) -> None:
        self.copied.copy_(self.new)

    def round(self, seconds: dict[str, list[float]]) -> None:
        """Time each once."""
        self.new ^= torch.rand(self.new.shape) < self.share
        for way in (self.memcmp, self.find, self.apply, self.memcpy):
            begun = time.process_time()
            way()
            seconds.setdefault(way.__name__, []).append(time.process_time() - begun)
        assert torch.equal(self.received, self.new)


def test_beside_memcpy(benchmark: BenchmarkFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}

    def measure() -> None:
        for share in SHARES:
            weights, seconds = Weights(share), dict[str, list[float]]()
            for _ in range(NUM_ROUNDS + 1):
                weights.round(seconds)
            num_bytes = sum(change.bytes_.numel() for change in weights.changes)
            found[f"{share:g}"] = {"bytes": num_bytes, "seconds": seconds, "kind": weights.changes[0].kind.name}

    benchmark.pedantic(measure, rounds=1)
    torch.set_num_threads(before)
    benchmark.extra_info["commit"] = commit()
    benchmark.extra_info.update({"num_bytes": 2 * NUM_ELEMENTS, "load": os.getloadavg(), "by share": found})
    print(f"\n{2 * NUM_ELEMENTS / 1e6:.0f} MB in bfloat16, processor time of one thread; best of {NUM_ROUNDS} rounds")
    costs: dict[str, float] = {}
    print("changed  written as     fewer bytes   memcmp ms   find and write ms   apply ms   memcpy ms   in memcpys:")
    print(" " * 97 + "memcmp   find to apply")
    for share, each in found.items():
        memcmp, write, apply_, memcpy_ = (min(times[-NUM_ROUNDS:]) for times in each["seconds"].values())
        fewer = 2 * NUM_ELEMENTS / max(each["bytes"], 1)
        print(
            f"{share:>7}  {each['kind']:12}{fewer:14,.1f}{1e3 * memcmp:12.1f}{1e3 * write:20.1f}{1e3 * apply_:11.1f}"
            f"{1e3 * memcpy_:12.1f}{memcmp / memcpy_:7.2f}{(write + apply_) / memcpy_:16.2f}"
        )
        costs[f"{share} changed"] = (write + apply_) / memcpy_
    keep_ratios(benchmark, "processor time of both ends, times memcpy's", costs)
