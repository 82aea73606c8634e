"""A version through a store beside one that is streamed: seconds and bytes, by the share of elements that changed.

One trainer and one engine, a process and a thread each. Both ways take turns. A version's seconds last from the moment
at which the trainer has it until the engine computes with it; for the store that is: compare, write, read, check,
change the mirror, copy. Bytes are those of payloads and parts. The weights are bfloat16, and every element is compared
by its digest.

On one machine, streams go over gloo and loopback, and the store is a folder. Over links, the trainer, the engine and
moto's S3 server are in network namespaces on one switch, and what each sends is held to a rate: a streamed version
crosses one link, a stored one two. That server is Python, and shares the processors with both ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import keep_ratios
from processes import Asked, Remote, config_json, enter_network, limit_rate, started
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from torch.distributed import PrefixStore, TCPStore

from tandem.launch.service import ServiceContext
from tandem.refit import layout, planner, program
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.digests.task import digest_layout
from tandem.refit.store import published
from tandem.refit.store.mirror import StoreMirror
from tandem.refit.store.objects import ObjectStore
from tandem.refit.store.publisher import StoreAccess, StorePublisher
from tandem.refit.transports import process_group
from tandem.refit.weights import bind
from tests.harness.ports import free_port
from tests.harness.runs import hosts_harness
from tests.harness.runs.hosts_harness import ADDRESSES, on

SHARES = sized((1.0, 0.03, 0.007), (0.03,))
NUM_ROUNDS = sized(3, 1, long=7)
TIMEOUT_S = 120.0
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(3072, 256),
    "num_hidden_layers": sized(8, 1),
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": sized(128, 16),
    "vocab_size": sized(32768, 512),
    "tie_word_embeddings": False,
}


class End:
    """A trainer or an engine, with its weights and both ways to move them."""

    def __init__(
        self,
        context: ServiceContext,
        connection: Connection,
        encoded: bytes,
        streamed: bytes,
        stored: bytes,
        url: str,
        namespace: str = "",
    ) -> None:
        if namespace:  # before anything that has a thread
            enter_network(namespace)
        self.layout, self.programs = layout.decode(encoded), [program.decode(each) for each in (streamed, stored)]
        self.memory = {each.name: torch.zeros(each.num_bytes, dtype=torch.uint8) for each in self.layout.storages}
        self.groups: dict[str, process_group.ConnectedGroup] = {}
        self.stream = bind(self.programs[0], self.memory, self.groups)
        access = StoreAccess(ObjectStore(url), b"k" * 32, "run")
        self.publisher = StorePublisher(access, 16, print)
        self.mirror = StoreMirror(access, "rollout-0", lambda: None, print)
        member = self.programs[1].member
        if member.startswith("trainer"):
            self.publisher.bind(member, self.layout, self.memory, self.programs[1].verification)
        else:
            (redirected,) = self.mirror.redirect([self.programs[1]])
            self.copy = bind(redirected, self.memory)
        self.store: TCPStore | None = None

    def asked(self) -> Asked:
        weights = (self.write, self.stream_version, self.publish, self.take, self.num_read, self.digest)
        asked = (self.make_bucket, self.connect, *weights)
        return {each.__name__: each for each in asked}

    def handle(self, command: Any, arrays: Any) -> None:
        raise AssertionError("no commands are given")

    def work(self) -> bool:
        return False

    def close(self) -> None:
        self.mirror.close()
        self.publisher.close()
        self.stream.close()
        for group in self.groups.values():
            group.close()

    def connect(self, address: str, port: int, is_master: bool) -> None:
        self.store = TCPStore(address, port, is_master=is_master, wait_for_workers=False)
        for group in self.programs[0].transfer_groups:
            self.groups[group.name] = process_group.connect(
                group, self.programs[0].member, PrefixStore("benchmark", self.store), torch.device("cpu"), TIMEOUT_S
            )

    def write(self, version: int, share: float) -> None:
        """Make so many elements the next larger number, as most steps do."""
        for number, name in enumerate(self.memory):
            values = self.memory[name].view(torch.int16)
            generator = torch.Generator().manual_seed(version * 1000 + number)
            if version == 0:
                values.copy_(torch.randint(0x3000, 0x3F00, values.shape, generator=generator, dtype=torch.int16))
            else:
                # Never back to what it was: parts that the store still has are not written again.
                values += torch.rand(values.shape, generator=generator) < share

    def make_bucket(self) -> None:
        """Make a bucket, as soon as the server answers."""
        import s3fs

        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def stream_version(self) -> int:
        return sum(self.stream.run(TIMEOUT_S).values())

    def publish(self, version: int) -> None:
        self.publisher.publish(version)

    def take(self, version: int) -> None:
        self.mirror.want(version)
        until = time.monotonic() + TIMEOUT_S
        while not self.mirror.is_held(version):
            assert time.monotonic() < until, self.mirror.trouble
            time.sleep(0.001)
        with self.mirror.lock:
            self.copy.run(TIMEOUT_S)
        self.mirror.settle()

    def num_read(self) -> int:
        return self.mirror.num_read

    def digest(self) -> list[int]:
        digests: list[int] = digest_layout(self.layout, self.memory, self.programs[1].verification).tolist()
        return [digest >> 1 for digest in digests]  # msgpack has them as signed numbers


def make(context: ServiceContext, connection: Connection, *arguments: Any) -> tuple[End, Asked]:
    end = End(context, connection, *arguments)
    return end, end.asked()


def measure(trainer: Remote, engine: Remote) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return seconds and bytes of every round, by share and way."""
    version = 0

    def stream() -> int:
        trainer.tell("stream_version")
        num_bytes = int(engine.ask("stream_version"))
        trainer.answer()
        return num_bytes

    def through_store() -> int:
        before = int(engine.ask("num_read"))
        trainer.tell("publish", version)
        engine.ask("take", version)
        trainer.answer()
        return int(engine.ask("num_read")) - before

    trainer.ask("write", 0, 0.0)
    through_store()
    by_share: dict[str, dict[str, dict[str, list[float]]]] = {}
    for share in SHARES:
        ways = {"stream": stream, "store": through_store}
        by_way = by_share[f"{share:.1%}"] = {way: {"seconds": [], "bytes": []} for way in ways}
        for number in range(NUM_ROUNDS):
            for way in [*ways][:: (1, -1)[number % 2]]:
                version += 1
                trainer.ask("write", version, share)
                if way == "stream":
                    trainer.ask("publish", version)  # the store's differences are from version to version
                    engine.ask("take", version)
                begun = time.perf_counter()
                num_bytes = ways[way]()
                by_way[way]["seconds"].append(time.perf_counter() - begun)
                by_way[way]["bytes"].append(num_bytes)
                assert trainer.ask("digest") == engine.ask("digest"), f"{way}, version {version}"
    return by_share


def compare(
    benchmark: BenchmarkFixture,
    url: str,
    where: str,
    address: str = "127.0.0.1",
    namespaces: Mapping[str, str] | None = None,
    prepare: Callable[[Remote], None] = lambda trainer: None,
) -> None:
    """Measure both ways between two processes, which are on hosts of their own if namespaces are given."""
    model = make_shape(SHAPE, "bfloat16")
    (source,) = Megatron().layouts(model, HostNames("trainers", 1, has_gpus=False))
    (wanted,) = Vllm().layouts(model, HostNames("engines", 1, has_gpus=False))
    layouts = {"trainer-0": source, "rollout-0": wanted}
    streamed = planner.plan({"trainer-0": source}, {"rollout-0": wanted}, allow_alias=False)
    stored = published.plan_with_store(
        {"trainer-0": source}, {"rollout-0": wanted}, allow_alias=False, alias_frozen=False
    )
    members = {
        name: (
            layout.encode(each),
            program.encode(streamed.programs[name]),
            program.encode(stored.programs[name]),
            url,
            namespaces[host] if namespaces else "",
        )
        for (name, each), host in zip(layouts.items(), ("trainers", "engines"), strict=True)
    }
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    with started(make, config_json("off"), members) as remotes:
        trainer, engine = remotes["trainer-0"], remotes["rollout-0"]
        prepare(trainer)
        port = free_port()
        trainer.tell("connect", address, port, True)
        engine.ask("connect", address, port, False)
        trainer.answer()
        benchmark.pedantic(lambda: results.update(measure(trainer, engine)), rounds=1)
    num_bytes = sum(link.num_bytes for link in streamed.links)
    benchmark.extra_info.update({"num_bytes": num_bytes, "load": os.getloadavg(), "by share": results})
    print(f"\n{num_bytes / 1e6:.0f} MB in bfloat16, {where}; the best of {NUM_ROUNDS} rounds")
    print("changed  MB stream  store   fewer  ms stream   store  times as long")
    fewer, longer = {}, {}
    for share, by_way in results.items():
        (s, s_store), (mb, mb_store) = (
            [min(by_way[way][what]) for way in ("stream", "store")] for what in ("seconds", "bytes")
        )
        fewer[f"{share} changed"], longer[f"{share} changed"] = mb / mb_store, s / s_store
        print(
            f"{share:>7} {mb / 1e6:10.1f} {mb_store / 1e6:6.2f} {mb / mb_store:7.1f} {1e3 * s:10.1f} "
            f"{1e3 * s_store:7.1f} {s_store / s:14.2f}"
        )
    keep_ratios(benchmark, f"a store's bytes, {where}: times as few as streamed", fewer)
    keep_ratios(benchmark, f"a store's speed, {where}, over that of a stream", longer)


@pytest.mark.timeout(1800)
def test_through_a_store(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    compare(benchmark, f"file://{tmp_path}", "on one machine")


hosts = hosts_harness.switched_hosts
S3_PORT = 29557
BUCKET = "weights"


@pytest.fixture
def s3_client(hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Start a server on a host of its own; whoever has this environment asks it."""
    pytest.importorskip("s3fs", reason="S3's client is not installed: tox -e s3 has it")
    pytest.importorskip("moto", reason="moto is not installed: tox -e s3 has it")
    settings = {
        "AWS_ENDPOINT_URL": f"http://{ADDRESSES['store']}:{S3_PORT}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    words = [*on(hosts, "store"), sys.executable, "-m", "moto.server", "-H", ADDRESSES["store"], "-p", str(S3_PORT)]
    with (tmp_path / "moto.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as server:
        yield
        server.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gigabytes_per_s", [1.0, pytest.param(0.1, marks=pytest.mark.long(minutes=3))])
def test_through_s3_over_links(
    benchmark: BenchmarkFixture, hosts: dict[str, str], s3_client: None, gigabytes_per_s: float
) -> None:
    for host in ADDRESSES:
        limit_rate(hosts[host], gigabytes_per_s)
    compare(
        benchmark,
        f"s3://{BUCKET}/runs",
        f"over {gigabytes_per_s:g} GB/s",
        ADDRESSES["trainers"],
        hosts,
        lambda trainer: trainer.ask("make_bucket"),
    )
