"""A refit that reshards, over gloo between real processes: bytes on the wire against the fewest there can be, and time
against a broadcast of full tensors between the same processes.

Trainers hold shards as Megatron-Core or FSDP2 does, engines as vLLM does; the adapters say which, for a model of about
150 MB in bfloat16. Each side is one host as the planner sees it, so what several engines need crosses once. The other
way is the usual one: each tensor is gathered on the first trainer, broadcast whole, and each engine takes its part.
Each process has one thread, and all share this machine's cores. Checked: every element of every engine, both ways.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from measure import Turns, report, seconds_of
from processes import Asked, Remote, config_json, started
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from torch.distributed import PrefixStore, TCPStore

from tandem.common.curve import new_key_pair
from tandem.common.keys import KeyPair
from tandem.launch.service import ServiceContext
from tandem.refit import layout, planner, program
from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import HostNames, ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import ITEM_SIZES, Layout
from tandem.refit.transports import process_group
from tandem.refit.transports.meeting import GroupStore
from tandem.refit.transports.process_group import GroupKeys
from tandem.refit.weights import bind

NUM_ROUNDS = 5
TIMEOUT_S = 120.0
NUM_LAYERS = int(os.environ.get("BENCHMARK_LAYERS", sized("4", "1")))

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CASES: dict[str, tuple[dict[str, Any], ParallelDeployment, ParallelDeployment]] = {
    "FSDP4 to TP2": (QWEN3, DTensor(shard=4), Vllm(tp=2)),
    "TP2×PP2 to TP4": (QWEN3, Megatron(tp=2, pp=2), Vllm(tp=4)),
    "EP4 to TP2": (QWEN3_MOE, Megatron(dp=4, ep=4), Vllm(tp=2)),
}

Boxes = list[tuple[int, tuple[slice, ...], torch.Tensor]]


def values(index: int, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Return a whole tensor of a version: neighbours differ, and so do tensors and versions."""
    first = index * 7919 + version * 31
    return ((torch.arange(int(np.prod(shape))) + first) % 251).to(torch.bfloat16).reshape(shape)


class Process:
    """A rank of either side: memory as its layout says, and both ways to move it."""

    def __init__(
        self, context: ServiceContext, connection: Connection, encoded: bytes, programs: bytes, facts: dict[str, Any]
    ):
        self.name, self.facts = context.name, facts
        self.layout = layout.decode(encoded)
        self.is_source = context.name.startswith("trainer")
        self.rank = context.index + (0 if self.is_source else facts["trainers"])
        self.storages = {s.name: torch.zeros(s.num_bytes, dtype=torch.uint8) for s in self.layout.storages}
        self.program = program.decode(programs)
        self.groups: dict[str, process_group.ConnectedGroup] = {}
        self.bound = bind(self.program, self.storages, self.groups)
        self.tcp_groups: dict[str, process_group.ConnectedGroup] = {}
        self.bound_over_tcp = bind(self.program, self.storages, self.tcp_groups)
        self.boxes: Boxes = list(self._boxes())
        self.owners: dict[int, list[tuple[int, tuple[slice, ...]]]] = {}

    def _boxes(self) -> Iterator[tuple[int, tuple[slice, ...], torch.Tensor]]:
        at = self.layout.pieces
        for row, index in enumerate(at.tensor_P.tolist()):
            piece = self.layout.piece(row)
            memory = self.storages[self.layout.storages[at.storage_P[row]].name].view(torch.bfloat16)
            view = memory.as_strided(piece.box.shape, [s // 2 for s in piece.strides], piece.offset // 2)
            yield index, tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True)), view

    def asked(self) -> Asked:
        ways = (self.connect, self.write, self.clear, self.check, self.run, self.run_over_tcp, self.broadcast)
        return {way.__name__: way for way in ways}

    def handle(self, command: Any, arrays: Any) -> None:
        raise AssertionError("no commands are given")

    def work(self) -> bool:
        return False

    def close(self) -> None:
        self.bound.close()
        self.bound_over_tcp.close()
        for group in (*self.groups.values(), *self.tcp_groups.values()):
            group.close()
        dist.destroy_process_group()

    def connect(self, port: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        for transfer_group in self.program.transfer_groups:
            self.groups[transfer_group.name] = process_group.connect(
                transfer_group, self.name, PrefixStore("ours", store), torch.device("cpu"), TIMEOUT_S
            )
            pairs = {name: KeyPair(*pair) for name, pair in self.facts["keys"].items()}
            keys = GroupKeys(pairs[self.name], {name: pair.public for name, pair in pairs.items()})
            met = GroupStore("127.0.0.1", port, "ours over TCP", keys)
            self.tcp_groups[transfer_group.name] = met.connect(
                transfer_group, self.name, torch.device("cpu"), TIMEOUT_S
            )
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        world_size = self.facts["trainers"] + self.facts["engines"]
        dist.init_process_group("gloo", store=PrefixStore("theirs", store), rank=self.rank, world_size=world_size)
        self.receivers = dist.new_group([0, *range(self.facts["trainers"], world_size)])
        self.trainers = dist.new_group(list(range(self.facts["trainers"])))

    def write(self, version: int) -> None:
        made: dict[int, torch.Tensor] = {}
        for index, box, view in self.boxes:
            if index not in made:
                made = {index: values(index, self.layout.tensors[index].shape, version)}
            view.copy_(made[index][box])

    def clear(self) -> None:
        for storage in self.storages.values():
            storage.fill_(0xA5)

    def check(self, version: int) -> None:
        made: dict[int, torch.Tensor] = {}
        for index, box, view in self.boxes:
            if index not in made:
                made = {index: values(index, self.layout.tensors[index].shape, version)}
            assert torch.equal(view, made[index][box]), f"{self.layout.tensors[index].name} of version {version}"

    def run(self) -> dict[str, int]:
        """Our way; return the bytes counted on each link."""
        return self.bound.run(TIMEOUT_S)

    def run_over_tcp(self) -> dict[str, int]:
        """Our way, authenticated and encrypted."""
        return self.bound_over_tcp.run(TIMEOUT_S)

    def broadcast(self) -> None:
        """Gather each tensor on the first trainer, broadcast it whole, keep a part."""
        mine: dict[int, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
        for index, box, view in self.boxes:
            mine.setdefault(index, []).append((box, view))
        for index, tensor in enumerate(self.layout.tensors):
            parts = mine.get(index, [])
            if not self.is_source:
                full = torch.empty(tensor.shape, dtype=torch.bfloat16)
                dist.broadcast(full, src=0, group=self.receivers)
                for box, view in parts:
                    view.copy_(full[box])
                continue
            # Who sends what to the first trainer was worked out beforehand.
            if self.rank:
                for owner, number in self.facts["gathers"][index]:
                    if owner == self.rank:
                        dist.send(parts[number][1].contiguous(), dst=0)
                continue
            full = torch.empty(tensor.shape, dtype=torch.bfloat16)
            for (owner, number), box in zip(self.facts["gathers"][index], self.facts["boxes"][index], strict=True):
                where = tuple(slice(*ends) for ends in box)
                if owner == 0:
                    full[where] = parts[number][1]
                else:
                    piece = torch.empty([b - a for a, b in box], dtype=torch.bfloat16)
                    dist.recv(piece, src=owner)
                    full[where] = piece
            dist.broadcast(full, src=0, group=self.receivers)


def make(context: ServiceContext, connection: Connection, *arguments: Any) -> tuple[Process, Asked]:
    process = Process(context, connection, *arguments)
    return process, process.asked()


def gathers(sources: list[Layout], num_tensors: int) -> tuple[list[Any], list[Any]]:
    """Return, for each tensor, which trainer gives which of its pieces, and the pieces' boxes; replicas give none."""
    given: list[Any] = [[] for _ in range(num_tensors)]
    boxes: list[Any] = [[] for _ in range(num_tensors)]
    for rank, held in enumerate(sources):
        count: dict[int, int] = {}
        for row, index in enumerate(held.pieces.tensor_P.tolist()):
            box = held.piece(row).box
            ends = tuple(zip(box.start, box.stop, strict=True))
            number = count[index] = count.get(index, -1) + 1
            if ends not in boxes[index]:
                given[index].append((rank, number))
                boxes[index].append(ends)
    return given, boxes


def fewest_bytes(model: ModelShape, engines: list[Layout]) -> int:
    """Return the bytes that the engines' host needs at least: each element that one of them wants, once."""
    total = 0
    for index, tensor in enumerate(model.tensors):
        wanted = np.zeros(tensor.shape, bool)
        for engine in engines:
            for row in np.flatnonzero(engine.pieces.tensor_P == index).tolist():
                box = engine.piece(row).box
                wanted[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
        total += int(wanted.sum()) * ITEM_SIZES[tensor.dtype]
    return total


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        each if not number else pytest.param(each, marks=pytest.mark.long(minutes=1))
        for number, each in enumerate(CASES)
    ],
)
def test_resharding(benchmark: BenchmarkFixture, case: str) -> None:
    config, training, serving = CASES[case]
    model = make_shape(config, "bfloat16")
    sources = list(training.layouts(model, HostNames("trainers", training.num_ranks, has_gpus=False)))
    engines = list(serving.layouts(model, HostNames("engines", serving.num_ranks, has_gpus=False)))
    layouts = {f"trainer-{rank}": held for rank, held in enumerate(sources)}
    layouts |= {f"rollout-{rank}": held for rank, held in enumerate(engines)}
    plan = planner.plan(
        {f"trainer-{rank}": held for rank, held in enumerate(sources)},
        {f"rollout-{rank}": held for rank, held in enumerate(engines)},
        allow_alias=False,
    )
    given, boxes = gathers(sources, len(model.tensors))
    pairs = {name: new_key_pair() for name in layouts}
    keys = {name: (pair.public, pair.secret) for name, pair in pairs.items()}
    facts = {"trainers": len(sources), "engines": len(engines), "gathers": given, "boxes": boxes, "keys": keys}
    members = {
        name: (layout.encode(held), program.encode(plan.programs[name]), facts) for name, held in layouts.items()
    }
    with started(make, config_json("off"), members) as remotes:
        counted = measure(benchmark, remotes)
    num_bytes = sum(int(np.prod(tensor.shape)) * 2 for tensor in model.tensors)
    planned = {link.name: link.num_bytes for link in plan.links}
    assert counted == planned
    crossing = sum(size for link, size in counted.items() if link.startswith("trainer"))
    fewest = fewest_bytes(model, engines)
    assert crossing == fewest
    to_first = sum(
        int(np.prod([b - a for a, b in box])) * 2
        for owners, parts in zip(given, boxes, strict=True)
        for (owner, _), box in zip(owners, parts, strict=True)
        if owner
    )
    turns, seconds = benchmark.extra_info.pop("turns"), benchmark.stats.stats.data
    report(
        benchmark,
        {"tandem": seconds, "tandem over TCP, encrypted": turns["tcp"], "gathered, broadcast whole": turns["whole"]},
        title=f"{case}: {num_bytes / 1e6:.0f} MB, {len(model.tensors)} tensors, {len(layouts)} processes",
        num_bytes=num_bytes,
        against="gathered, broadcast whole",
        load=os.getloadavg(),
        **{
            "bytes from trainers to engines": crossing,
            "the fewest there can be": fewest,
            "bytes from engine to engine": sum(counted.values()) - crossing,
            "bytes gathered and broadcast whole": to_first + num_bytes * len(engines),
        },
    )
    print(
        f"trainers to engines {crossing / 1e6:.1f} MB, the fewest {fewest / 1e6:.1f}; engine to engine "
        f"{(sum(counted.values()) - crossing) / 1e6:.2f}; whole: {(to_first + num_bytes * len(engines)) / 1e6:.1f}"
    )


def measure(benchmark: BenchmarkFixture, remotes: dict[str, Remote]) -> dict[str, int]:
    """Let both ways take turns; return the bytes that ours counted on each link."""
    counted: dict[str, int] = {}
    version = 0

    def everywhere(ask: str, *arguments: Any) -> list[Any]:
        for remote in remotes.values():
            remote.tell(ask, *arguments)
        return [remote.answer() for remote in remotes.values()]

    def prepare() -> None:
        nonlocal version
        version += 1
        for name, remote in remotes.items():
            remote.tell(*(("write", version) if name.startswith("trainer") else ("clear",)))
        for remote in remotes.values():
            remote.answer()

    def check() -> None:
        everywhere("check", version)

    def broadcast() -> float:
        prepare()
        seconds = seconds_of(lambda: everywhere("broadcast"))
        check()
        return seconds

    def run() -> None:
        for links in everywhere("run"):
            counted.update(links)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    everywhere("connect", port)

    def over_tcp() -> float:
        prepare()
        seconds = seconds_of(lambda: everywhere("run_over_tcp"))
        check()
        return seconds

    turns = Turns({"whole": broadcast, "tcp": over_tcp})

    def set_up() -> None:
        turns.round()
        prepare()

    benchmark.pedantic(run, setup=set_up, teardown=check, rounds=NUM_ROUNDS, warmup_rounds=1)
    benchmark.extra_info["turns"] = turns.last(NUM_ROUNDS)
    del store
    return counted
