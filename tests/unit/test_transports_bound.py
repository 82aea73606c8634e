"""Programs tied to memory of this process: what is refused, what is counted, and the rounds that follow each other."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading

import msgspec
import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit.installing import quantise
from tandem.refit.layout import CudaMemory, Layout, LayoutBuilder, PrivateMemory, Storage, contiguous_strides, whole
from tandem.refit.planner import plan
from tandem.refit.program import TransferProgram
from tandem.refit.transports import cuda_ipc, shm
from tandem.refit.weights import bind


def make(names: list[str], dtype: str = "float32", memory: torch.Tensor | None = None) -> Layout:
    """Describe tensors of (4, 8), each in a storage of its own, the first one in `memory`."""
    builder = LayoutBuilder("host")
    for name in names:
        address = None if memory is None else shm.share(memory)
        size = getattr(torch, dtype).itemsize
        storage = builder.storage(name, 32 * size, address)
        builder.add(builder.tensor(name, (4, 8), dtype), whole((4, 8)), storage, 0, contiguous_strides((4, 8), size))
    return builder.build()


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(32.0).reshape(4, 8)


def program_for(source: torch.Tensor, dtype: str = "float32") -> TransferProgram:
    sources = {"trainer-0": make(["w"], memory=source)}
    return plan(sources, {"rollout-0": make(["w"], dtype)}, allow_alias=False).programs["rollout-0"]


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 128), ("bfloat16", 64), ("float64", 128)])
def test_bytes_are_counted_in_the_smaller_type(source: torch.Tensor, dtype: str, num_bytes: int) -> None:
    parameter = torch.zeros(4, 8, dtype=getattr(torch, dtype))
    bound = bind(program_for(source, dtype), {"w": parameter})
    assert (bound.num_copies, bound.num_bytes) == (1, num_bytes)
    assert bound.run(1.0) == {"trainer-0>rollout-0": num_bytes}
    assert torch.equal(parameter, source.to(parameter.dtype))
    bound.close()


def test_only_other_destinations_leaves_this_one_alone(source: torch.Tensor) -> None:
    parameter = torch.zeros(4, 8)
    bound = bind(program_for(source), {"w": parameter})
    assert bound.run(1.0, only=["rollout-1"]) == {}
    assert not parameter.any()
    assert bound.run(1.0, only=["rollout-0", "rollout-1"]) == {"trainer-0>rollout-0": 128}
    assert torch.equal(parameter, source)


def test_raw_memory_stands_for_any_type(source: torch.Tensor) -> None:
    raw = torch.zeros(128, dtype=torch.uint8)
    bind(program_for(source), {"w": raw}).run(1.0)
    assert torch.equal(raw.view(torch.float32), source.flatten())


def test_a_deadline_that_has_passed_is_an_error(source: torch.Tensor) -> None:
    with pytest.raises(RefitError, match="rollout-0 failed while copying from trainer-0: the deadline passed"):
        bind(program_for(source), {"w": torch.zeros(4, 8)}).run(-1.0)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "rollout-0 has no parameter 'w', which the plan for w needs"),
        ({"w": torch.zeros(4, 8).half()}, "rollout-0 has 'w' as torch.float16, the plan for w as float32"),
        ({"w": torch.zeros(3, 8)}, "rollout-0: 'w' has 96 bytes, the plan for w reaches byte 128"),
    ],
)
def test_memory_that_was_not_planned_for_is_refused(
    source: torch.Tensor, parameters: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(RefitError, match=told):
        bind(program_for(source), parameters)


def test_a_source_that_reaches_less_far_than_planned_is_named(source: torch.Tensor) -> None:
    program = program_for(source)
    (transfer,) = program.receives
    short = msgspec.structs.replace(transfer.source_storages[0], num_bytes=100)
    wrong = msgspec.structs.replace(transfer, source_storages=(short,))
    with pytest.raises(RefitError, match="rollout-0: trainer-0: 'w' has 100 bytes, the plan for w reaches byte 128"):
        bind(msgspec.structs.replace(program, receives=(wrong,)), {"w": torch.zeros(4, 8)})


def test_a_quantised_tensor_is_staged_quantised_and_checked() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    held = LayoutBuilder("host")
    storage = held.storage("w", x.nbytes, shm.share(x))
    held.add(held.tensor("w", (6, 8), "bfloat16"), whole((6, 8)), storage, 0, (16, 2))
    wanted = LayoutBuilder("host")
    values = wanted.tensor("w", (6, 8), "float8_e4m3fn", block=(4, 4), scales="w_scale_inv")
    wanted.add(values, whole((6, 8)), wanted.storage("w", 48), 0, (8, 1))
    scales = wanted.tensor("w_scale_inv", (2, 2), "float32")
    wanted.add(scales, whole((2, 2)), wanted.storage("scales", 16), 0, (8, 4))
    made = plan({"trainer-0": held.build()}, {"rollout-0": wanted.build()}, allow_alias=False)

    parameters = {"w": torch.zeros(6, 8, dtype=torch.float8_e4m3fn), "scales": torch.zeros(2, 2)}
    bound = bind(made.programs["rollout-0"], parameters)
    assert bound.misquantised() == ("w",), "it has not run"
    assert bound.run(1.0) == {"trainer-0>rollout-0": x.nbytes}
    meant_values, meant_scales = quantise(x, (4, 4), torch.float8_e4m3fn)
    assert torch.equal(parameters["w"].view(torch.uint8), meant_values.view(torch.uint8))
    assert torch.equal(parameters["scales"], meant_scales)
    assert bound.misquantised() == ()
    assert sum(memory.nbytes for memory in bound.staging.values()) >= x.nbytes
    parameters["w"].view(torch.uint8)[3, 3] ^= 1
    assert bound.misquantised() == ("w",)


def test_private_memory_cannot_be_opened() -> None:
    storage = Storage("w", 128, PrivateMemory())
    with pytest.raises(RefitError, match="rollout-0 cannot open 'w' of trainer-0: it is private to that process"):
        cuda_ipc.open_storage(storage, "trainer-0", "rollout-0", torch.device("cpu"))
    with pytest.raises(RefitError, match="rollout-0 cannot open 'w' of trainer-0: it is private to that process"):
        shm.open_storage(storage, "trainer-0", "rollout-0")


def test_memory_is_opened_as_soon_as_strangers_give_descriptors_back(source: torch.Tensor) -> None:
    address, limits = shm.share(source), resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    # Above all that this process has open, so that at least 20 are free, and all of them are then taken.
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 20, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        threading.Timer(0.5, lambda: [os.close(held.pop()) for _ in range(2)]).start()
        opened = shm.open_storage(Storage("w", 128, address), "trainer-0", "rollout-0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)
    assert torch.equal(opened.view(torch.float32), source.flatten())


def test_gpu_memory_of_a_process_that_is_gone_is_not_opened() -> None:
    child = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not cuda_ipc.is_alive(child.pid), "it is a zombie"
        storage = Storage("w", 128, CudaMemory(child.pid, "GPU-0", b"\0" * 64, 0))
        with pytest.raises(RefitError, match=rf"of trainer-0: its process {child.pid} is gone"):
            cuda_ipc.open_storage(storage, "trainer-0", "rollout-0", torch.device("cuda:0"))
    finally:
        child.wait()
    assert cuda_ipc.is_alive(os.getpid())
    assert not cuda_ipc.is_alive(2**22 + 1)


def test_only_gpu_memory_can_be_shared_through_cuda() -> None:
    with pytest.raises(RefitError, match="128 bytes on cpu cannot be shared through CUDA IPC"):
        cuda_ipc.share(torch.zeros(32))
