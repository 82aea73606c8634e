"""The order of checks on a node: the machine, then steps in other processes, then the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tandem.config import Config
from tandem.launch.doctor.child import carry_out_apart
from tandem.launch.doctor.findings import DoctorFinding, StepOutcome
from tandem.launch.doctor.machine import look_at_machine
from tandem.launch.doctor.network import measure_loopback, measure_peer
from tandem.launch.doctor.steps import DoctorStep

_CLOCKS_APART_S = 1.0
_GPU_FINDINGS = ("CUDA", "copy kernel", "CUDA IPC", "NCCL", "GPU to GPU")


def look(
    config: Config | None, peer: str | None, deadline_s: float, steps: Mapping[str, DoctorStep], program: Sequence[str]
) -> Iterator[StepOutcome]:
    """Yield findings as they arrive; a process that runs `program` carries out the steps."""
    folder = Path("." if config is None else config.logger.log_dir)
    for finding in look_at_machine(folder):
        yield StepOutcome((finding,))
    # Processes of a run share the cores; the default of cluster.links.memory was measured with one thread.
    threads = 1 if config is None else config.cluster.threads_per_process or 1
    yield from carry_out_apart(steps, threads, deadline_s, program)
    yield _look_at_network(peer)


def list_needed(config: Config | None) -> frozenset[str]:
    """Return the names of findings that a configuration needs on a node."""
    if config is None:
        return frozenset()
    needed = {"torch", "memory copy", "shared memory", "disk"}
    if config.generates and config.policy.generation.kind.module:
        needed.add(config.policy.generation.kind.title)
    if config.policy.megatron_cfg.enabled:
        needed.add("Megatron-Core")
    if config.cluster.gpus_per_node:  # without a GPU those are skipped, and the run takes the CPU
        needed.update(_GPU_FINDINGS)
    return frozenset(needed)


def _look_at_network(peer: str | None) -> StepOutcome:
    rate = measure_loopback() if peer is None else measure_peer(peer)
    route = "within this host" if peer is None else f"to {peer}"
    says = f"{rate.sent:.2f} GB/s sent, {rate.received:.2f} GB/s received {route}, one TCP connection"
    if peer is None:
        advice = "between nodes: coordinator doctor --listen HOST:PORT there, --peer HOST:PORT here"
        return StepOutcome((DoctorFinding("network", "ok", says, advice),))
    apart = DoctorFinding("clock of peer", "ok", f"{abs(rate.clock_ahead_s) * 1e3:.1f} ms from this one's")
    if abs(rate.clock_ahead_s) > _CLOCKS_APART_S:
        apart = DoctorFinding("clock of peer", "warning", apart.says, "run chrony or systemd-timesyncd on both")
    return StepOutcome((DoctorFinding("network", "ok", says), apart), {"network": rate.slower})
