"""What does a refit of adapters cost beside one of all weights?

The same weights, from one process of this host to another, one thread each: all of them, as when all are trained; and
adapters of every linear layer, with a base that the engine has copied, or reads where the trainer keeps it. Both are
streamed over gloo besides, through this machine's own network. Every round runs every way, and every element of what
the engine then computes with is compared. A refit of adapters ends when the last weight is merged.

``BENCHMARK_LAYERS=1`` makes a quick run of the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch
from measure import Turns, report, seconds_of
from processes import Asked, EndpointService, Plane, config_json, started
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

from tandem.launch.service import ServiceContext
from tandem.refit import layout
from tandem.refit.layout import LayoutBuilder, contiguous_strides, whole
from tandem.refit.transports import shm
from tandem.refit.weight_client import WeightClient
from tandem.refit.weights import Weights

NUM_LAYERS = int(os.environ.get("BENCHMARK_LAYERS", sized("8", "1")))
RANK, SCALE = 16, 2.0
NUM_ROUNDS = 7
LAYER = {  # of Qwen3-0.6B
    "self_attn.q_proj": (2048, 1024),
    "self_attn.k_proj": (1024, 1024),
    "self_attn.v_proj": (1024, 1024),
    "self_attn.o_proj": (1024, 2048),
    "mlp.gate_proj": (3072, 1024),
    "mlp.up_proj": (3072, 1024),
    "mlp.down_proj": (1024, 3072),
}
WEIGHTS = {f"model.layers.{i}.{name}.weight": shape for i in range(NUM_LAYERS) for name, shape in LAYER.items()}
ADAPTERS = {
    f"{name.removesuffix('weight')}lora_{kind}.weight": (RANK, columns) if kind == "A" else (rows, RANK)
    for name, (rows, columns) in WEIGHTS.items()
    for kind in "AB"
}


def base_of(index: int) -> float:
    return float(index % 127 + 1)


def change_of(index: int, version: int) -> float:
    """Return what a version has in all elements of the second matrix of an adapter; the first one has ones."""
    return float((index + version) % 13 + 1)


class Process(EndpointService):
    """A trainer of all weights or of adapters, or an engine; the weights of each tensor are all the same number."""

    def __init__(self, context: ServiceContext, *, trains: str, streams: bool) -> None:
        self.trains = trains
        self.is_trainer = context.name.startswith("trainer")
        shapes = {**WEIGHTS, **ADAPTERS} if self.is_trainer and trains == "adapters" else WEIGHTS
        self.tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        # Of two hosts, as far as the planner knows, weights are streamed.
        builder = LayoutBuilder("host" if self.is_trainer or not streams else "another host")
        for name, tensor in self.tensors.items():
            storage = builder.storage(name, tensor.nbytes, shm.share(tensor) if self.is_trainer else None)
            builder.add(
                builder.tensor(name, tensor.shape, "float32"),
                whole(tensor.shape),
                storage,
                0,
                contiguous_strides(tensor.shape, 4),
            )
        self.layout = builder.build()
        if self.is_trainer and trains == "adapters":
            told = (
                msgspec.structs.replace(
                    each, is_frozen="lora_" not in each.name, product_scale=SCALE if "lora_B" in each.name else 0.0
                )
                for each in self.layout.tensors
            )
            self.layout = msgspec.structs.replace(self.layout, tensors=tuple(told))
        self.write(0, first=True)
        self._weights = Weights(self.layout, self.tensors)
        self.weight_client = WeightClient(context, self._weights)

    def close(self) -> None:
        """Leave all meshes."""
        super().close()
        self._weights.close()

    def write(self, version: int, *, first: bool = False) -> None:
        """Be the optimizer."""
        if not self.is_trainer:
            return
        for index, name in enumerate(WEIGHTS):
            if self.trains == "all":
                self.tensors[name].fill_(base_of(index) + RANK * SCALE * change_of(index, version))
                continue
            layer = name.removesuffix("weight")
            if first:
                self.tensors[name].fill_(base_of(index))
                self.tensors[f"{layer}lora_A.weight"].fill_(1.0)
            self.tensors[f"{layer}lora_B.weight"].fill_(change_of(index, version))

    def check(self, version: int) -> None:
        """Compare all that the engine computes with."""
        for index, name in enumerate(WEIGHTS):
            least, most = self.tensors[name].aminmax()
            assert least == most == base_of(index) + RANK * SCALE * change_of(index, version), name


def make(context: ServiceContext, _connection: Connection, trains: str, streams: bool) -> tuple[Process, Asked]:
    process = Process(context, trains=trains, streams=streams)
    ways: tuple[Callable[..., None], ...] = (process.write, process.check, process.verify)
    return process, {"layout": lambda: layout.encode(process.layout), **{way.__name__: way for way in ways}}


class Way:
    """A trainer and an engine, and a refit between them."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.version = 0
        self.num_bytes: list[int] = []

    def seconds(self, *, is_first: bool = False, verify: str = "off") -> float:
        """Move a new version, and have it verified unless `verify` is off; return what that took."""
        (trainer,), (engine,) = self.plane.trainers, self.plane.engines
        self.version += 1
        for remote in (trainer, engine):
            remote.ask("verify", "full")
        trainer.ask("write", self.version)

        def transaction() -> None:
            self.num_bytes.append(self.plane.refit(self.version, is_first=is_first))
            if verify != "off":
                self.plane.verify(self.version)

        seconds = seconds_of(transaction)
        if verify == "off":
            self.plane.verify(self.version)  # beside the next generation, and not counted
        engine.ask("check", self.version)
        return seconds


@pytest.mark.long(minutes=3)
@pytest.mark.timeout(1200)
def test_refit_of_adapters_beside_that_of_all_weights(benchmark: BenchmarkFixture) -> None:
    config = config_json("full")
    kinds = {  # what is trained, whether it is streamed, and whether the engine may read the base in place
        "all": ("all", False, False),
        "adapters, base copied": ("adapters", False, False),
        "adapters, base in place": ("adapters", False, True),
        "all, streamed": ("all", True, False),
        "adapters, streamed": ("adapters", True, False),
    }
    if IS_SMOKE:  # two processes each
        kinds = {kind: kinds[kind] for kind in ("all", "adapters, base copied")}
    members = {}
    for number, (trains, streams, _) in enumerate(kinds.values()):
        members |= dict.fromkeys((f"trainer-{number}", f"rollout-{number}"), (trains, streams))
    with started(make, config, members) as remotes:
        ways = {
            kind: Way(
                Plane(
                    [remotes[f"trainer-{number}"]],
                    [remotes[f"rollout-{number}"]],
                    config,
                    alias=False,
                    alias_frozen=in_place,
                )
            )
            for number, (kind, (_, _, in_place)) in enumerate(kinds.items())
        }
        first = {kind: way.seconds(is_first=True) for kind, way in ways.items()}
        of_first = {kind: way.num_bytes[-1] for kind, way in ways.items()}
        turns = Turns(
            {
                f"{kind}{until}": lambda way=way, verify=verify: way.seconds(verify=verify)  # type: ignore[misc]
                for kind, way in ways.items()
                for until, verify in (("", "off"), (", until verified", "full"))
            }
        )
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=2)
        moved = {kind: way.num_bytes[-1] for kind, way in ways.items()}
    weights = 4 * sum(map(math.prod, WEIGHTS.values()))
    adapters = 4 * sum(map(math.prod, ADAPTERS.values()))
    for kind, (trains, _, in_place) in kinds.items():
        assert moved[kind] == (weights if trains == "all" else adapters)
        frozen = 0 if trains == "all" or in_place else weights
        assert of_first[kind] == moved[kind] + frozen
    report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"{weights / 1e6:.0f} MB in {len(WEIGHTS)} tensors; adapters of rank {RANK}: {adapters / 1e6:.1f} MB",
        num_bytes=weights,
        against="all",
        moved=moved,
        ratio_of_bytes=weights / adapters,
        first={kind: {"seconds": first[kind], "num_bytes": of_first[kind]} for kind in kinds},
        rank=RANK,
        load=os.getloadavg(),
    )
    print(f"bytes: 1 of {weights / adapters:.1f}; first refits: {first}")
