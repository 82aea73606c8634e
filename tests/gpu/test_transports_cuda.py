"""GPU to GPU: through handles on one device, and over NCCL between two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit import layout, program, trials
from tandem.refit.bound import bind
from tandem.refit.layout import Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.planner import plan
from tandem.refit.transports import cuda_ipc, process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

SHAPES = {"q": (64, 48), "k": (16, 48), "norm": (48,), "embed": (4099, 1025)}


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


@pytest.mark.parametrize("types", trials.KERNEL_TYPES)
def test_kernels_copy_what_torch_copies(types: tuple[torch.dtype, torch.dtype]) -> None:
    assert trials.kernels_agree(*types)


def test_what_the_doctor_tries_works_here() -> None:
    assert trials.collective_agrees()
    assert trials.ipc_rate(64 << 20) > 1
    assert trials.gpu_rate(64 << 20) > 1


def stream_from(wire: Connection, port: int, encoded: bytes) -> None:
    """Send version 1 from the second GPU."""
    torch.cuda.set_device(1)
    held = {name: values(name, 1).to("cuda:1") for name in SHAPES}
    own = program.decode(encoded)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    groups = {mesh.name: process_group.connect(mesh, "trainer-0", store, "cuda:1", 60.0) for mesh in own.meshes}
    bound = bind(own, held, groups)
    for _ in range(2):
        bound.run(60.0)
    wire.send_bytes(b"done")
    for group in groups.values():
        group.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process, and there is only one")
def test_weights_stream_over_nccl() -> None:
    uuids = [cuda_ipc.device_uuid(torch.device("cuda", index)) for index in range(2)]
    source = msgspec.structs.replace(describe(uuids[1], "bfloat16", None), host="another host")
    made = plan({"trainer-0": source}, {"rollout-0": describe(uuids[0], "bfloat16", None)}, allow_alias=False)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    process, wire = other_process(stream_from, store.port, program.encode(made.programs["trainer-0"]))
    try:
        own = made.programs["rollout-0"]
        held = {name: torch.zeros(s, dtype=torch.bfloat16, device="cuda:0") for name, s in SHAPES.items()}
        groups = {mesh.name: process_group.connect(mesh, "rollout-0", store, "cuda:0", 60.0) for mesh in own.meshes}
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
