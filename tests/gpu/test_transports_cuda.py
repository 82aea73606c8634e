"""GPU to GPU: through handles on one device, and over NCCL between two."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit import layout, program, trials
from tandem.refit.layout import Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.planner import plan
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import cuda_ipc, process_group
from tandem.refit.transports.process_group import GroupMessage
from tandem.refit.weights import BoundProgram, bind
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process, and there is only one"
)
SHAPES = {"q": (64, 48), "k": (16, 48), "norm": (48,), "embed": (515, 1025)}


def values(name: str, version: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(version * 1000 + sum(name.encode()))
    return torch.randn(SHAPES[name], generator=seed).bfloat16()


def describe(device: str, dtype: str, storages: dict[str, torch.Tensor] | None) -> Layout:
    """Describe whole tensors, each in a storage of its own."""
    builder, size = LayoutBuilder("host", device), getattr(torch, dtype).itemsize
    for name, shape in SHAPES.items():
        address = None if storages is None else cuda_ipc.share(storages[name])
        first = 0 if storages is None else storages[name].storage_offset() * size
        num_bytes = first + int(torch.Size(shape).numel()) * size
        storage = builder.storage(name, num_bytes, address)
        builder.add(builder.tensor(name, shape, dtype), whole(shape), storage, first, contiguous_strides(shape, size))
    return builder.build()


def other_process(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def train(wire: Connection) -> None:
    """Hold bfloat16 weights on the GPU; write each version that is asked for."""
    held = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    wire.send_bytes(layout.encode(describe(cuda_ipc.device_uuid(torch.device("cuda:0")), "bfloat16", held)))
    while True:
        try:
            version = int(wire.recv_bytes())
        except EOFError:
            return
        for name, tensor in held.items():
            tensor.copy_(values(name, version))
        torch.cuda.synchronize()
        wire.send_bytes(b"done")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_copies_out_of_the_trainers_memory(dtype: str) -> None:
    process, wire = other_process(train)
    try:
        source = layout.decode(wire.recv_bytes())
        engine = describe(cuda_ipc.device_uuid(torch.device("cuda:0")), dtype, None)
        made = plan({"trainer-0": source}, {"rollout-0": engine}, allow_alias=False).programs["rollout-0"]
        assert {transfer.transport for transfer in made.receives} == {"cuda_ipc"}
        held = {name: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda") for name, shape in SHAPES.items()}
        bound = bind(made, held)
        for version in (1, 2):
            wire.send_bytes(str(version).encode())
            assert wire.recv_bytes() == b"done"
            assert sum(bound.run(30.0).values()) == bound.num_bytes
            for name, tensor in held.items():
                assert torch.equal(tensor.cpu(), values(name, version).to(tensor.dtype))
        bound.close()
        process.kill()
        process.join(30)
        with pytest.raises(RefitError, match=r"of trainer-0: its process \d+ is gone"):
            bind(made, held)
    finally:
        process.kill()
        process.join(30)
        wire.close()


def hold_on_the_second(wire: Connection) -> None:
    """Hold version 1 on the second GPU, and say where."""
    torch.cuda.set_device(1)
    held = {name: values(name, 1).to("cuda:1") for name in SHAPES}
    torch.cuda.synchronize()
    wire.send_bytes(layout.encode(describe(cuda_ipc.device_uuid(torch.device("cuda:1")), "bfloat16", held)))
    with contextlib.suppress(EOFError):
        wire.recv_bytes()


@NEEDS_TWO
@pytest.mark.skipif(not IS_RUNNING, reason="a simulated GPU can do without peers")
@pytest.mark.parametrize("has_peers", [True, False])
def test_another_gpus_memory_is_opened_where_it_is_reached(has_peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_GPU_PEERS", str(int(has_peers)))
    process, wire = other_process(hold_on_the_second)
    try:
        source, held = layout.decode(wire.recv_bytes()), {}
        for index, wanted in ((0, "cuda_ipc" if has_peers else "stream"), (1, "cuda_ipc")):
            device = torch.device("cuda", index)
            engine = describe(cuda_ipc.device_uuid(device), "bfloat16", None)
            made = plan({"trainer-0": source}, {"rollout-0": engine}, allow_alias=False).programs["rollout-0"]
            assert {transfer.transport for transfer in made.receives} == {wanted}
            held = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in SHAPES.items()}
            if wanted == "cuda_ipc":
                bound = bind(made, held)
                bound.run(30.0)
                bound.close()
                assert all(torch.equal(tensor.cpu(), values(name, 1)) for name, tensor in held.items())
    finally:
        process.kill()
        process.join(30)
        wire.close()


def test_a_thread_that_has_not_used_the_gpu_opens_memory() -> None:
    process, wire = other_process(train)
    try:
        storage = layout.decode(wire.recv_bytes()).storages[0]
        device = torch.device("cuda:0")
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(cuda_ipc.open_storage, storage, "trainer-0", "rollout-0", device).result()
            shared = pool.submit(cuda_ipc.share, torch.ones(9, device=device)).result()
        assert opened.numel() == storage.num_bytes
        assert shared.device == cuda_ipc.device_uuid(device)
    finally:
        process.kill()
        process.join(30)
        wire.close()


@pytest.mark.parametrize("types", trials.KERNEL_TYPES)
def test_kernels_copy_what_torch_copies(types: tuple[torch.dtype, torch.dtype]) -> None:
    assert trials.kernels_agree(*types)


def test_what_the_doctor_tries_works_here() -> None:
    assert trials.collective_agrees()
    # What a simulated GPU copies in a second says nothing; that the bytes are right is tried there as well.
    num_bytes, least = (64 << 10, 0) if IS_RUNNING else (64 << 20, 1)
    assert trials.ipc_rate(num_bytes) > least
    assert trials.gpu_rate(num_bytes) > least


def stream_from(wire: Connection, port: int, encoded: bytes) -> None:
    """Send version 1 from the second GPU."""
    torch.cuda.set_device(1)
    held = {name: values(name, 1).to("cuda:1") for name in SHAPES}
    own = program.decode(encoded)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    groups = {
        transfer_group.name: process_group.connect(transfer_group, "trainer-0", store, torch.device("cuda:1"), 60.0)
        for transfer_group in own.transfer_groups
    }
    bound = bind(own, held, groups)
    for _ in range(2):
        bound.run(60.0)
    wire.send_bytes(b"done")
    for group in groups.values():
        group.close()


def receive_from_nobody(wire: Connection, port: int) -> None:
    """Connect a mesh, and wait for a message of a peer that is killed before it sends one; then for a while."""
    transfer_group = TransferGroup("m", ("rollout-0", "trainer-0"), "cuda")
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.cuda.set_device(0)
    wire.send_bytes(b"here")
    wire.recv_bytes()
    group = process_group.connect(transfer_group, "rollout-0", store, torch.device("cuda:0"), 10.0)
    wire.send_bytes(b"connected")
    wire.recv_bytes()
    works: list[Any] = []
    assert not group.start([GroupMessage(torch.zeros(8, dtype=torch.uint8, device="cuda:0"), 1, 0, False)], works)
    wire.send_bytes(group.wait(works[0], time.monotonic() + 2).encode())
    wire.recv_bytes()


def connect_and_wait(wire: Connection, port: int) -> None:
    """Connect the mesh of `receive_from_nobody`."""
    torch.cuda.set_device(1)
    transfer_group = TransferGroup("m", ("rollout-0", "trainer-0"), "cuda")
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    wire.send_bytes(b"here")
    wire.recv_bytes()
    _group = process_group.connect(transfer_group, "trainer-0", store, torch.device("cuda:1"), 10.0)
    wire.send_bytes(b"connected")
    wire.recv_bytes()


def meeting() -> torch.distributed.TCPStore:
    """Return a store at which members meet; it ends with the last that holds it."""
    return torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


@NEEDS_TWO
def test_who_waits_for_a_peer_that_is_lost_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch would end the process after minutes: its watchdog, and what watches that.
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "2")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    store = meeting()
    survivor, wire = other_process(receive_from_nobody, store.port)
    peer, other_wire = other_process(connect_and_wait, store.port)
    try:
        assert wire.recv_bytes() == other_wire.recv_bytes() == b"here"
        for each in (wire, other_wire):  # both at once: the deadline is of connecting alone
            each.send_bytes(b"connect")
        assert wire.recv_bytes() == other_wire.recv_bytes() == b"connected"
        peer.kill()
        peer.join(30)
        wire.send_bytes(b"go on")
        assert wire.recv_bytes() == b"the deadline passed"
        survivor.join(15)
        assert survivor.is_alive(), f"it ended with {survivor.exitcode}"
    finally:
        for process, its_wire in ((survivor, wire), (peer, other_wire)):
            process.kill()
            process.join(30)
            its_wire.close()


@NEEDS_TWO
def test_who_connects_with_a_member_that_is_lost_meanwhile_gives_up() -> None:
    transfer_group, store = TransferGroup("m", ("rollout-0", "trainer-0"), "cuda"), meeting()
    process_group.announce(transfer_group, "trainer-0", store)
    started = time.monotonic()
    with pytest.raises(RefitError, match=r"could not connect transfer group 'm': the deadline passed"):
        process_group.connect(transfer_group, "rollout-0", store, torch.device("cuda:0"), 3.0)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("sender", ["cuda", "cpu"])
def test_a_gpu_and_a_cpu_stream_over_memory_of_the_host(sender: str) -> None:
    master = meeting()
    kinds = {"trainer-0": sender, "rollout-0": "cpu" if sender == "cuda" else "cuda"}
    uuid = cuda_ipc.device_uuid(torch.device("cuda:0"))
    layouts = {
        member: msgspec.structs.replace(describe("cpu" if kind == "cpu" else uuid, "bfloat16", None), host=member)
        for member, kind in kinds.items()
    }
    made = plan({"trainer-0": layouts["trainer-0"]}, {"rollout-0": layouts["rollout-0"]}, allow_alias=False)
    assert [transfer_group.device_type for transfer_group in made.transfer_groups] == ["cpu"]
    held = {"trainer-0": {name: values(name, 1).to(kinds["trainer-0"]) for name in SHAPES}}
    held["rollout-0"] = {name: torch.zeros_like(values(name, 1), device=kinds["rollout-0"]) for name in SHAPES}

    def end(member: str) -> BoundProgram:
        own = made.programs[member]
        device = next(iter(held[member].values())).device
        store = torch.distributed.TCPStore("127.0.0.1", master.port, is_master=False)
        groups = {
            transfer_group.name: process_group.connect(transfer_group, member, store, device, 60.0)
            for transfer_group in own.transfer_groups
        }
        return bind(own, held[member], groups)

    with ThreadPoolExecutor(2) as pool:
        bound = [each.result() for each in [pool.submit(end, member) for member in kinds]]
        for _ in range(2):
            for each in [pool.submit(each.run, 60.0) for each in bound]:
                each.result()
    for name, tensor in held["rollout-0"].items():
        assert torch.equal(tensor.cpu(), values(name, 1))


@NEEDS_TWO
def test_weights_stream_over_nccl() -> None:
    store = meeting()
    uuids = [cuda_ipc.device_uuid(torch.device("cuda", index)) for index in range(2)]
    source = msgspec.structs.replace(describe(uuids[1], "bfloat16", None), host="another host")
    made = plan({"trainer-0": source}, {"rollout-0": describe(uuids[0], "bfloat16", None)}, allow_alias=False)
    process, wire = other_process(stream_from, store.port, program.encode(made.programs["trainer-0"]))
    try:
        own = made.programs["rollout-0"]
        held = {name: torch.zeros(s, dtype=torch.bfloat16, device="cuda:0") for name, s in SHAPES.items()}
        groups = {
            transfer_group.name: process_group.connect(transfer_group, "rollout-0", store, torch.device("cuda:0"), 60.0)
            for transfer_group in own.transfer_groups
        }
        bound = bind(own, held, groups)
        for _ in range(2):
            assert sum(bound.run(60.0).values()) == bound.num_bytes
        for name, tensor in held.items():
            assert torch.equal(tensor.cpu(), values(name, 1))
        assert wire.recv_bytes() == b"done"
        for group in groups.values():
            group.close()
    finally:
        process.kill()
        process.join(30)
        wire.close()
