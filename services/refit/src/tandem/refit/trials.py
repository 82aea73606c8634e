"""Trials of the ways in which weights move within a machine, measured with the code that refits run.

`coordinator doctor` and the GPU tests call it. Another process, ``python -m tandem.refit.trials``, holds the memory,
prints its address, and ends with its input; or it tries NCCL.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from tandem.common.errors import RefitError
from tandem.refit.layout import Storage
from tandem.refit.transports import cuda_ipc, shm
from tandem.refit.transports.copying import BoundCopier

KERNEL_TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
)
"""Pairs of types, to and from, for `kernels_agree`."""
_SHAPES = ((1,), (7,), (33, 65), (3, 5, 1024), (20000,), (128, 4096))
_GB = 1e9
_MEASURE_S = 0.5
_LEAST_REPEATS = 3
_NCCL_S = 120.0
"""Seconds for NCCL to begin on all GPUs of a machine and to add up."""


def kernels_agree(to: torch.dtype, from_: torch.dtype) -> bool:
    """Return whether the kernel that copies slices within a GPU agrees with torch, bit for bit."""
    sources, destinations = [], []
    for number, shape in enumerate(_SHAPES):
        large = torch.randn(*shape[:-1], shape[-1] + number, device="cuda").to(from_)
        sources.append(large[..., number:])
        destinations.append(torch.zeros(shape[::-1], dtype=to, device="cuda").permute(*reversed(range(len(shape)))))
    BoundCopier(destinations, sources).run()
    return all(torch.equal(to_, from_.to(to)) for to_, from_ in zip(destinations, sources, strict=True))


def collective_agrees() -> bool:
    """Return whether NCCL sums correctly over all GPUs.

    Another process does the sum, because NCCL keeps its threads and sockets as long as its process lives.

    Raises `RefitError`: NCCL failed or took too long.
    """
    environment = {"NCCL_SOCKET_IFNAME": "lo", **os.environ}
    command = [sys.executable, "-m", "tandem.refit.trials", "nccl"]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NCCL_S,
            env=environment,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise RefitError(f"NCCL did not add up numbers of this machine's GPUs within {_NCCL_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise RefitError(f"NCCL failed to add up numbers of this machine's GPUs: {lines[-1]}") from None
    return ended.stdout.strip() == "True"


def _add_up() -> bool:
    from torch.cuda import nccl

    tensors = [torch.ones(1024, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    return all(bool((tensor == len(tensors)).all()) for tensor in tensors)


def memory_rate(num_bytes: int) -> float:
    """Return the GB/s of copies out of another process's shared memory; see `tandem.refit.transports.shm`.

    Raises `RefitError`.
    """
    with _hold_elsewhere("cpu", num_bytes) as storage:
        return _copy_rate(shm.open_storage(storage, "the other process", "this process"), "cpu")


def ipc_rate(num_bytes: int) -> float:
    """Return the GB/s of copies out of another process's memory on the same GPU.

    Raises `RefitError`, also if the bytes differ from those that the other process wrote.
    """
    with _hold_elsewhere("cuda", num_bytes) as storage:
        theirs = cuda_ipc.open_storage(storage, "the other process", "this process", torch.device("cuda", 0))
        if not bool((theirs == _PATTERN).all()):
            raise RefitError("the bytes read through CUDA IPC are not those that the other process wrote")
        return _copy_rate(theirs, "cuda:0")


def gpu_rate(num_bytes: int, source: int = 0, destination: int = 0) -> float:
    """Return the GB/s of copies from one GPU to another, or within one."""
    return _copy_rate(torch.ones(num_bytes, dtype=torch.uint8, device=f"cuda:{source}"), f"cuda:{destination}")


_PATTERN = 7


def _copy_rate(source: torch.Tensor, device: str) -> float:
    destination = torch.zeros(source.shape, dtype=source.dtype, device=device)
    copier = BoundCopier([destination], [source])

    def copy() -> None:
        copier.run()
        if destination.is_cuda:
            torch.cuda.synchronize(destination.device)
            torch.cuda.synchronize(source.device)

    return source.nbytes / _seconds(copy) / _GB


def _seconds(copy: Callable[[], None]) -> float:
    """Return the median of several runs, excluding the first, which touches the memory."""
    copy()
    durations_s: list[float] = []
    until = time.monotonic() + _MEASURE_S
    while len(durations_s) < _LEAST_REPEATS or time.monotonic() < until:
        before = time.perf_counter()
        copy()
        durations_s.append(time.perf_counter() - before)
    return statistics.median(durations_s)


@contextlib.contextmanager
def _hold_elsewhere(device: str, num_bytes: int) -> Iterator[Storage]:
    """Have another process hold bytes, each with the value `_PATTERN`; yield their storage."""
    command = [sys.executable, "-m", "tandem.refit.trials", device, str(num_bytes)]
    # It ends with its input, and so with this process, however that ends.
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        line = holder.stdout.readline()
        if not line:
            raise RefitError(f"a process that should hold {num_bytes} bytes on {device} ended with {holder.wait()}")
        yield msgspec.json.decode(line, type=Storage)
    finally:
        holder.stdin.close()
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _hold(device: str, num_bytes: int) -> None:
    memory = torch.full((num_bytes,), _PATTERN, dtype=torch.uint8, device=device)
    if memory.is_cuda:
        torch.cuda.synchronize()
    address = cuda_ipc.share(memory) if memory.is_cuda else shm.share(memory)
    print(msgspec.json.encode(Storage(name="trial", num_bytes=num_bytes, address=address)).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "nccl":
        print(_add_up())
    else:
        _hold(sys.argv[1], int(sys.argv[2]))
