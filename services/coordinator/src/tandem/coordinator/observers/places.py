"""The places of processes in the live file: their GPUs, and engines that are on their way into the run."""

from __future__ import annotations

from tandem.config import Config
from tandem.config.placement import count_gpus_per_engine, find_first_gpu_of_engines
from tandem.coordinator.scheduler.engines.joining import JoiningStage
from tandem.observe.run_folder.live import LiveEngine


def device_of(config: Config, has_gpus: bool, name: str) -> str:
    """Return the GPUs of a trainer or an engine, if there are any."""
    first, count = int(name.rpartition("-")[2]), 1
    if not name.startswith("trainer-"):
        count = count_gpus_per_engine(config)
        first = find_first_gpu_of_engines(config) + first * count
    first %= max(1, config.cluster.gpus_per_node)
    gpus = range(first, first + count)
    if not (has_gpus and config.cluster.gpus_per_node and gpus):
        return "CPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"


def joining_engine(name: str, stage: JoiningStage, host: str, device: str) -> LiveEngine:
    """Return an engine that is joining the run."""
    return LiveEngine(
        name=name, status=stage.value, version=-1, outstanding_tokens=0, in_flight=0, host=host, device=device
    )
