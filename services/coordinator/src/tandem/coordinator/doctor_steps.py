"""The steps of `coordinator doctor`, with those that move bytes by the code of refits.

``python -m tandem.coordinator.doctor_steps DESCRIPTOR THREADS STEP...`` is the program that carries them out.
"""

from __future__ import annotations

import sys

from tandem.common.errors import RefitError
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.launch.doctor import steps
from tandem.launch.doctor.steps import NO_GPU, DoctorFinding, DoctorStep, StepOutcome, skipped

_MEMORY_BYTES = 256 << 20
_GPU_BYTES = 1 << 30
_LEAST_FREE = 4
"""Free memory that a GPU must have to be measured, as a multiple of the bytes that are copied."""


def _memory() -> StepOutcome:
    from tandem.refit import trials

    rate = trials.memory_rate(_MEMORY_BYTES)
    says = f"{rate:.1f} GB/s copied out of another process's shared memory"
    return StepOutcome((DoctorFinding("memory copy", "ok", says),), {"memory": rate})


def _kernel() -> StepOutcome:
    import torch

    from tandem.refit import trials

    name = "copy kernel"
    if not torch.cuda.is_available():
        return skipped(name)
    for to, from_ in trials.KERNEL_TYPES:
        if not trials.kernels_agree(to, from_):
            says = f"copies from {from_} to {to} differ from torch's"
            return StepOutcome((DoctorFinding(name, "missing", says, "report it: refits on this GPU would be wrong"),))
    if _has_room():
        rate = trials.gpu_rate(_GPU_BYTES)
        return StepOutcome((DoctorFinding(name, "ok", f"agrees with torch; {rate:.0f} GB/s"),), {"same_gpu": rate})
    return StepOutcome((DoctorFinding(name, "ok", "agrees with torch; too little GPU memory is free to measure it"),))


def _peers() -> StepOutcome:
    import torch

    from tandem.refit import trials

    name = "GPU to GPU"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return StepOutcome((DoctorFinding(name, "skipped", "one GPU" if count else NO_GPU),))
    if not all(map(_has_room, range(count))):
        return StepOutcome((DoctorFinding(name, "skipped", "too little GPU memory is free"),))
    rates = [trials.gpu_rate(_GPU_BYTES, source, (source + 1) % count) for source in range(count)]
    says = f"{min(rates):.1f} to {max(rates):.1f} GB/s from each to the next"
    return StepOutcome((DoctorFinding(name, "ok", says),), {"peer_gpu": min(rates)})


def _ipc() -> StepOutcome:
    import torch

    from tandem.common.errors import RefitError
    from tandem.refit import trials

    name = "CUDA IPC"
    if not torch.cuda.is_available():
        return skipped(name)
    if not _has_room():
        return StepOutcome((DoctorFinding(name, "skipped", "too little GPU memory is free"),))
    try:
        rate = trials.ipc_rate(_GPU_BYTES)
    except RefitError as error:
        advice = "colocated refits need it: containers must share their IPC and process namespaces (--ipc=host)"
        return StepOutcome((DoctorFinding(name, "missing", str(error), advice),))
    return StepOutcome((DoctorFinding(name, "ok", f"{rate:.0f} GB/s copied out of another process's GPU memory"),))


def _nccl() -> StepOutcome:
    import torch

    from tandem.refit import trials

    if not torch.cuda.is_available():
        return skipped("NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        agrees = trials.collective_agrees()
    except RefitError as error:
        return StepOutcome((DoctorFinding("NCCL", "missing", str(error), "see NCCL_DEBUG=INFO"),))
    if agrees:
        return StepOutcome((DoctorFinding("NCCL", "ok", f"{version}; adds up over {torch.cuda.device_count()} GPUs"),))
    return StepOutcome((DoctorFinding("NCCL", "missing", f"{version} adds up wrongly", "see NCCL_DEBUG=INFO"),))


def _has_room(index: int = 0) -> bool:
    import torch

    return torch.cuda.mem_get_info(index)[0] > _LEAST_FREE * _GPU_BYTES


_ON_GPU = {"torch", "cuda"}
_TRIALS = {
    "memory": DoctorStep("memory copy", _memory, {"torch"}),
    "kernel": DoctorStep("copy kernel", _kernel, _ON_GPU),
    "peers": DoctorStep("GPU to GPU", _peers, _ON_GPU),
    "ipc": DoctorStep("CUDA IPC", _ipc, _ON_GPU),
    "nccl": DoctorStep("NCCL", _nccl, _ON_GPU),
}
_ENGINES = tuple(kind.name for kind in ENGINE_KINDS.values() if kind.module)
_ORDER = ("gpus", "torch", "memory", "cuda", "kernel", "peers", "ipc", "nccl", *_ENGINES, "megatron")
STEPS = {name: {**steps.STEPS, **_TRIALS}[name] for name in _ORDER}
"""All steps, in order."""


if __name__ == "__main__":
    steps.carry_out(STEPS, sys.argv[1:])
