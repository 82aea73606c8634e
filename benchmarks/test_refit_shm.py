"""How fast do weights cross to other processes of one host, beside a plain memcpy and every other way to move them?

One thread a process. Every round runs every way, so that whatever else the machine does meets all of them. What is
timed is what one refit costs, from the command until the last element is in the parameters of every receiver, which
exist beforehand: ours as the whole transaction. The default verifies in full, beside the next generation, which begins
when the last element is there; `until verified` waits for the digests of both sides, with nothing beside them. What the
digests cost a generation that runs beside them is measured by `test_refit_verify.py`.
Setting up (binding, process groups, queues) is not timed; nor is training, which ours needs to be finished just as
every other way does. With two senders each holds half of the rows of each tensor, and sends them to every receiver.

``BENCHMARK_MB=64`` makes a quick run of the same. Ray takes part where it is installed. 4 GB, and other numbers of
senders and receivers than one, are for ``--long``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import Turns, report, seconds_of
from processes import Asked, EndpointService, Plane, Remote, config_json, started
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.torch import load_file, save_file
from smoke import sized

from tandem.launch.service import ServiceContext
from tandem.refit import layout
from tandem.refit.layout import Box, LayoutBuilder, contiguous_strides
from tandem.refit.transports import shm
from tandem.refit.weight_client import WeightClient
from tandem.refit.weights import Weights

SIZES_MB = {"512 MB": 512, "4 GB": 4096}
if size := os.environ.get("BENCHMARK_MB", sized("", "63")):
    SIZES_MB = {f"{size} MB": int(size)}
LARGE_MB = 1000
MB_A_LAYER = 62.93
LOCAL_LAYERS = 8
"""What memcpy copies from, over and over: far more than any cache."""
BUCKET_BYTES = 64 << 20
TIMEOUT_S = 300.0

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

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def shapes_of(num_layers: int) -> Shapes:
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in LAYER.items()}
    return {"model.embed_tokens.weight": (2048, 1024), **layers, "model.norm.weight": (1024,)}


def value_of(index: int, version: int) -> float:
    """Return what all elements of a tensor are in a version; never 0, which receivers hold before."""
    return float((index * 7 + version) % 127 + 1)


def rows_of(shape: tuple[int, ...], sender: int, num_senders: int) -> slice:
    return slice(shape[0] * sender // num_senders, shape[0] * (sender + 1) // num_senders)


class Process(EndpointService):
    """What senders and receivers have in common: tensors, an endpoint, a group of all processes."""

    def __init__(
        self, context: ServiceContext, connection: Connection, num_layers: int, places: dict[str, Any]
    ) -> None:
        self.connection, self.places = connection, places
        self.shapes = shapes_of(num_layers)
        self.num_senders: int = places["senders"]
        self.is_sender = context.name.startswith("trainer")
        self.rank = context.index + (0 if self.is_sender else self.num_senders)
        self.tensors: Tensors = {}
        shards = range(context.index, context.index + 1) if self.is_sender else range(self.num_senders)
        self.held = {
            (s, name): rows_of(shape, s, self.num_senders) for s in shards for name, shape in self.shapes.items()
        }
        for name, shape in self.shapes.items():
            rows = rows_of(shape, context.index, self.num_senders) if self.is_sender else slice(0, shape[0])
            self.tensors[name] = torch.zeros(rows.stop - rows.start, *shape[1:])
        self.layout = self._describe()
        self.weight_client = WeightClient(context, Weights(self.layout, self.tensors))
        self.bucket = torch.zeros(BUCKET_BYTES // 4)

    def _describe(self) -> layout.Layout:
        builder = LayoutBuilder("host")
        for name, tensor in self.tensors.items():
            shape, first = self.shapes[name], self.held[self.rank, name].start if self.is_sender else 0
            address = shm.share(tensor) if self.is_sender else None
            storage = builder.storage(name, tensor.nbytes, address)
            box = Box((first,) + (0,) * (len(shape) - 1), tuple(tensor.shape))
            builder.add(builder.tensor(name, shape, "float32"), box, storage, 0, contiguous_strides(tensor.shape, 4))
        return builder.build()

    def close(self) -> None:
        """Leave the group of all processes too."""
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- what is asked for beside commands ---

    def asked(self) -> Asked:
        ways = (self.join, self.verify, self.broadcast, self.buckets, self.safetensors, self.disk, self.queue)
        mine = (self.write,) if self.is_sender else (self.clear, self.check, self.memcpy)
        return {"layout": lambda: layout.encode(self.layout), **{way.__name__: way for way in (*ways, *mine)}}

    def join(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        world_size = self.num_senders + self.places["receivers"]
        dist.init_process_group(
            "gloo", store=dist.FileStore(self.places["store"], world_size), rank=self.rank, world_size=world_size
        )
        receivers = list(range(self.num_senders, world_size))
        self.groups = [dist.new_group([sender, *receivers]) for sender in range(self.num_senders)]

    def write(self, version: int) -> None:
        for index, tensor in enumerate(self.tensors.values()):
            tensor.fill_(value_of(index, version))

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def check(self, version: int) -> None:
        for index, (name, tensor) in enumerate(self.tensors.items()):
            least, most = tensor.aminmax()
            assert least == most == value_of(index, version), f"{name} is not that of version {version}"

    def memcpy(self) -> float:
        """Copy as much from memory of this process with the C library, a range for each tensor."""
        if not hasattr(self, "local"):
            self.local = [torch.ones(shape) for shape in shapes_of(LOCAL_LAYERS).values()]
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for tensor in self.local:
                by_shape.setdefault(tensor.shape, []).append(tensor)
            self.from_: list[torch.Tensor] = []
            for tensor in self.tensors.values():
                by_shape[tensor.shape].append(by_shape[tensor.shape].pop(0))
                self.from_.append(by_shape[tensor.shape][-1])
        return seconds_of(self._memcpy)

    def _memcpy(self) -> None:
        for tensor, local in zip(self.tensors.values(), self.from_, strict=True):
            ctypes.memmove(tensor.data_ptr(), local.data_ptr(), tensor.nbytes)

    def _parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for (sender, name), rows in self.held.items():
            yield sender, self.tensors[name] if self.is_sender else self.tensors[name][rows]

    def broadcast(self) -> None:
        """Broadcast a tensor at a time."""
        for sender, part in self._parts():
            dist.broadcast(part, src=sender, group=self.groups[sender])

    def buckets(self) -> None:
        """Broadcast buckets of 64 MB, packed and unpacked by copies."""
        parts: dict[int, list[torch.Tensor]] = {}
        for sender, part in self._parts():
            parts.setdefault(sender, []).append(part.view(-1))
        for sender, mine in parts.items():
            batch: list[torch.Tensor] = []
            for part in [*mine, None]:
                if part is not None and sum(p.numel() for p in batch) + part.numel() <= self.bucket.numel():
                    batch.append(part)
                    continue
                self._broadcast_bucket(sender, batch)
                batch = [] if part is None else [part]

    def _broadcast_bucket(self, sender: int, batch: list[torch.Tensor]) -> None:
        sizes = [part.numel() for part in batch]
        bucket = self.bucket[: sum(sizes)]
        if self.is_sender:
            torch.cat(batch, out=bucket)
        dist.broadcast(bucket, src=sender, group=self.groups[sender])
        if not self.is_sender:
            for part, piece in zip(batch, bucket.split(sizes), strict=True):
                part.copy_(piece)

    def safetensors(self) -> None:
        self._file(self.places["tmpfs"])

    def disk(self) -> None:
        self._file(self.places["disk"])

    def _file(self, folder: str) -> None:
        if self.is_sender:
            save_file(self.tensors, f"{folder}/{self.rank}.safetensors")
            return
        for sender in range(self.num_senders):
            self._copy(sender, load_file(f"{folder}/{sender}.safetensors"))

    def queue(self, sender: int) -> None:
        """Hand over the tensors themselves, which lie in shared memory already: handles travel, not elements."""
        if self.is_sender:
            for queue in self.places["queues"][self.rank]:
                queue.put(self.tensors)
        else:
            self._copy(sender, self.places["queues"][sender][self.rank - self.num_senders].get(timeout=TIMEOUT_S))

    def _copy(self, sender: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor[self.held[sender, name]].copy_(tensors[name])


def make(context: ServiceContext, connection: Connection, *arguments: Any) -> tuple[Process, Asked]:
    process = Process(context, connection, *arguments)
    return process, process.asked()


class Bench:
    """All processes, and every way to fill the receivers."""

    def __init__(self, senders: list[Remote], receivers: list[Remote], config: bytes, places: dict[str, Any]) -> None:
        self.senders, self.receivers, self.places = senders, receivers, places
        self.all = [*senders, *receivers]
        self.plane = Plane(senders, receivers, config, alias=False)
        self.everywhere("join")
        self.version = 0

    def turn(self, way: Callable[[], float | None]) -> Callable[[], float]:
        """Return a way with a new version to move before it, and a check of every element after it."""

        def measured() -> float:
            self.prepare()
            own: list[float | None] = []
            seconds = seconds_of(lambda: own.append(way()))
            if own[0] is None:  # memcpy moves nothing from the senders
                self.check()
            return own[0] or seconds

        return measured

    def prepare(self) -> None:
        self.version += 1
        for sender in self.senders:
            sender.tell("write", self.version)
        for receiver in self.receivers:
            receiver.tell("clear")
        for remote in self.all:
            remote.answer()

    def check(self) -> None:
        for receiver in self.receivers:
            receiver.ask("check", self.version)

    def everywhere(self, ask: str, *arguments: Any) -> None:
        for remote in self.all:
            remote.tell(ask, *arguments)
        for remote in self.all:
            remote.answer()

    def verifying(self, verify: str) -> Callable[[], float]:
        def transaction() -> None:
            self.plane.refit(self.version)
            self.plane.verify(self.version)

        measured = self.turn(transaction)

        def prepared() -> float:
            self.everywhere("verify", verify)
            return measured()

        return prepared

    def verifying_beside(self) -> float:
        """Do as a run does by default: an engine generates once it holds the version, and digests are taken beside."""

        def refit() -> None:
            self.plane.refit(self.version)

        self.everywhere("verify", "full")
        seconds = self.turn(refit)()
        self.plane.verify(self.version)
        return seconds

    def memcpy(self) -> float:
        for receiver in self.receivers:
            receiver.tell("memcpy")
        return max(receiver.answer() for receiver in self.receivers)

    def together(self, ask: str) -> Callable[[], None]:
        return lambda: self.everywhere(ask)

    def one_after_another(self, ask: str) -> Callable[[], None]:
        """Let senders write before receivers read."""

        def run() -> None:
            for side in (self.senders, self.receivers):
                for remote in side:
                    remote.tell(ask)
                for remote in side:
                    remote.answer()

        return run

    def queue(self) -> None:
        for number, sender in enumerate(self.senders):
            sender.tell("queue", number)
        for number, _ in enumerate(self.senders):
            for receiver in self.receivers:
                receiver.tell("queue", number)
        for sender in self.senders:
            sender.answer()
        for _ in self.senders:
            for receiver in self.receivers:
                receiver.answer()


def ray_object_store(num_layers: int, num_senders: int, num_receivers: int) -> tuple[Callable[[], float], Any]:
    """Return a way of its own processes, Ray's: senders put their tensors, receivers get and copy them."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    num_bytes = int(num_layers * MB_A_LAYER * 1e6)
    ray.init(
        num_cpus=num_senders + num_receivers,
        object_store_memory=int(2.5 * num_bytes) + (200 << 20),
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_python_path())}},
    )

    class Actor:
        def __init__(self, sender: int | None) -> None:
            torch.set_num_threads(1)
            self.tensors = {}
            for name, shape in shapes_of(num_layers).items():
                rows = slice(0, shape[0]) if sender is None else rows_of(shape, sender, num_senders)
                self.tensors[name] = torch.zeros(rows.stop - rows.start, *shape[1:])

        def write(self, version: int) -> None:
            for index, tensor in enumerate(self.tensors.values()):
                tensor.fill_(value_of(index, version))

        def put(self) -> Any:
            return {name: tensor.numpy() for name, tensor in self.tensors.items()}

        def get(self, *parts: Any) -> None:
            for sender, part in enumerate(parts):
                for name, shape in shapes_of(num_layers).items():
                    self.tensors[name][rows_of(shape, sender, num_senders)].copy_(torch.from_numpy(part[name]))

        def check(self, version: int) -> None:
            for index, tensor in enumerate(self.tensors.values()):
                least, most = tensor.aminmax()
                assert least == most == value_of(index, version)

    remote = ray.remote(Actor)
    senders = [remote.remote(sender) for sender in range(num_senders)]
    receivers = [remote.remote(None) for _ in range(num_receivers)]
    versions = itertools.count(1)

    def move() -> None:
        parts = [sender.put.remote() for sender in senders]
        ray.get([receiver.get.remote(*parts) for receiver in receivers])

    def measured() -> float:
        version = next(versions)
        ray.get([sender.write.remote(version) for sender in senders])
        seconds = seconds_of(move)
        ray.get([receiver.check.remote(version) for receiver in receivers])
        return seconds

    return measured, ray


def _python_path() -> list[str]:
    return [str(Path(__file__).parent), *[path for path in sys.path if path]]


@contextmanager
def processes(num_layers: int, num_senders: int, num_receivers: int, folder: Path) -> Iterator[Bench]:
    context = torch.multiprocessing.get_context("spawn")
    config = config_json("full")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs:
        places = {
            "senders": num_senders,
            "receivers": num_receivers,
            "store": str(folder / "store"),
            "tmpfs": tmpfs,
            "disk": str(folder),
            "queues": [[context.Queue() for _ in range(num_receivers)] for _ in range(num_senders)],
        }
        names = [f"trainer-{i}" for i in range(num_senders)] + [f"rollout-{i}" for i in range(num_receivers)]
        with started(make, config, dict.fromkeys(names, (num_layers, places))) as remotes:
            yield Bench(
                [remotes[name] for name in names[:num_senders]],
                [remotes[name] for name in names[num_senders:]],
                config,
                places,
            )


def free_gigabytes(place: str) -> float:
    return shutil.disk_usage(place).free / 1e9


def available_gigabytes() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 / 1e9


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_senders", "num_receivers"),
    [(1, 1), *(pytest.param(*both, marks=pytest.mark.long(minutes=1)) for both in [(1, 2), (2, 1), (2, 2)])],
)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=[pytest.mark.long(minutes=2)] if megabytes > LARGE_MB else [])
        for size, megabytes in SIZES_MB.items()
    ],
)
def test_refit_over_shared_memory(
    benchmark: BenchmarkFixture, tmp_path: Path, size: str, num_senders: int, num_receivers: int
) -> None:
    is_large = SIZES_MB[size] > LARGE_MB
    gigabytes = SIZES_MB[size] / 1000
    num_layers, num_rounds = max(1, round(SIZES_MB[size] / MB_A_LAYER)), 3 if is_large else 5
    needed = (2 if is_large and num_receivers == 1 else 1) + num_receivers + 0.5
    if available_gigabytes() < needed * gigabytes + 2 or free_gigabytes("/dev/shm") < 2.1 * gigabytes:
        pytest.skip(f"{size} to {num_receivers} processes needs {needed * gigabytes:.0f} GB of memory")
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        bench = stack.enter_context(processes(num_layers, num_senders, num_receivers, tmp_path))
        ways: dict[str, Callable[[], float]] = {
            "memcpy": bench.turn(bench.memcpy),
            "tandem, verified in full beside": bench.verifying_beside,
            "tandem, until verified in samples": bench.verifying("sampled"),
            "tandem, until verified in full": bench.verifying("full"),
            "gloo broadcast, each tensor": bench.turn(bench.together("broadcast")),
            "gloo broadcast, 64 MB buckets": bench.turn(bench.together("buckets")),
            "torch.multiprocessing": bench.turn(bench.queue),
        }
        files = {"safetensors, tmpfs": "safetensors", "safetensors, disk": "disk"}
        if is_large:
            left_out |= {"ray object store": "no memory for it beside the others", "safetensors, disk": "slow"}
            files.pop("safetensors, disk")
            if num_receivers > 1:
                left_out["safetensors, tmpfs"] = "no memory for it beside the others"
                files.pop("safetensors, tmpfs")
        ways |= {name: bench.turn(bench.one_after_another(way)) for name, way in files.items()}
        if not is_large and importlib.util.find_spec("ray"):
            way, ray = ray_object_store(num_layers, num_senders, num_receivers)
            stack.callback(ray.shutdown)
            ways["ray object store"] = way
        elif not is_large:
            left_out["ray object store"] = "ray is not installed"
        turns = Turns(ways)

        def set_up() -> None:
            turns.round()
            bench.prepare()

        benchmark.pedantic(
            lambda: bench.plane.refit(bench.version),
            setup=set_up,
            teardown=bench.check,
            rounds=num_rounds,
            warmup_rounds=1,
        )
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes_of(num_layers).values())
    num_tensors = len(shapes_of(num_layers))
    report(
        benchmark,
        {"tandem, not verified": benchmark.stats.stats.data, **turns.last(num_rounds)},
        title=f"{num_bytes / 1e6:.0f} MB, {num_tensors} tensors, {num_senders} senders, {num_receivers} receivers",
        num_bytes=num_bytes,
        against="memcpy",
        left_out=left_out,
        load=os.getloadavg(),
    )
