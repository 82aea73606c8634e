"""Kinds of GPUs, by their makers' data sheets and by what ``coordinator doctor`` measured.

A rate here is a peak, and `roofline.FittedEfficiencies` says which share of it is reached. The doctor measures
what is reached, which replaces the product of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError
from tandem.config.schema import LinkRates
from tandem.launch.doctor.steps import DoctorReport


class GpuKind(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one GPU, and of its links."""

    name: str
    tflops: float
    """Products of matrices in bfloat16 without sparsity, in 10^12 operations a second. Attention runs on the same
    units."""
    memory_gb: float
    memory_gb_s: float
    peer_gb_s: float
    """NVLink, in each direction."""
    network_gb_s: float
    """One network card for each GPU, in each direction."""
    domain: int
    """GPUs that NVLink connects."""
    source: str


GPU_KINDS = {
    kind.name: kind
    for kind in (
        GpuKind(
            name="A100",
            tflops=312,
            memory_gb=80,
            memory_gb_s=2039,
            peer_gb_s=300,
            network_gb_s=25,
            domain=8,
            source="NVIDIA A100 80GB SXM data sheet; ConnectX-6 of a DGX A100, 200 Gb/s",
        ),
        GpuKind(
            name="H100",
            tflops=989,
            memory_gb=80,
            memory_gb_s=3350,
            peer_gb_s=450,
            network_gb_s=50,
            domain=8,
            source="NVIDIA H100 SXM data sheet; ConnectX-7 of a DGX H100, 400 Gb/s",
        ),
        GpuKind(
            name="H200",
            tflops=989,
            memory_gb=141,
            memory_gb_s=4800,
            peer_gb_s=450,
            network_gb_s=50,
            domain=8,
            source="NVIDIA H200 SXM data sheet; ConnectX-7 of a DGX H200, 400 Gb/s",
        ),
        GpuKind(
            name="GB200",
            tflops=2500,
            memory_gb=186,
            memory_gb_s=8000,
            peer_gb_s=900,
            network_gb_s=50,
            domain=72,
            source="NVIDIA GB200 NVL72 data sheet, a 72nd of it; ConnectX-7, 400 Gb/s",
        ),
    )
}
"""The kinds that are known, by name."""


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of GPU, and what was measured on one."""

    kind: GpuKind
    copied_gb_s: float | None = None
    """Bytes copied within a GPU's memory in a second, each read and written; None if it was not measured."""
    peer_gb_s: float | None = None
    """Bytes from GPU to GPU in a second."""
    network_gb_s: float | None = None
    """Bytes from node to node in a second."""

    @property
    def source(self) -> str:
        """The sources of the rates, for people."""
        measured = {"memory": self.copied_gb_s, "NVLink": self.peer_gb_s, "network": self.network_gb_s}
        names = [f"{name} {rate:.4g} GB/s" for name, rate in measured.items() if rate is not None]
        return f"{self.kind.source}; measured: {', '.join(names)}" if names else self.kind.source


def find_rates(name: str | None, report_file: str | None, links: LinkRates) -> GpuRates:
    """Return the rates of a kind of GPU, with those that a report of ``coordinator doctor --json`` has.

    `name` is one of `GPU_KINDS`; without it, the report's own GPU, and without either an H100. Keys of
    ``cluster.links`` that differ from their defaults count as measured. Raise `ConfigError` if the file is not such
    a report, or names no known GPU.
    """
    report = None if report_file is None else _read_report(report_file)
    kind = GPU_KINDS[name or "H100"]
    if report is not None and name is None:
        kind = _find_kind(report, str(report_file))
    measured = {
        field.name: getattr(links, field.name)
        for field in msgspec.structs.fields(LinkRates)
        if getattr(links, field.name) != field.default
    }
    # The doctor's rate of the network is that of one TCP connection, which says nothing of NCCL's.
    measured |= {} if report is None else {key: rate for key, rate in report.links.items() if key != "network"}
    return GpuRates(
        kind=kind,
        copied_gb_s=measured.get("same_gpu"),
        peer_gb_s=measured.get("peer_gpu"),
        network_gb_s=measured.get("network"),
    )


def _read_report(path: str) -> DoctorReport:
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=DoctorReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--doctor: {path} is not a report of coordinator doctor --json: {error}") from error
    for key, rate in report.links.items():
        if not 0 < rate < 1e9:
            raise ConfigError(f"--doctor: {path}: links.{key}: {rate} is not a rate in GB/s")
    return report


def _find_kind(report: DoctorReport, path: str) -> GpuKind:
    texts = [finding.says for finding in report.findings if finding.name in ("GPUs", "CUDA")]
    kinds = [kind for kind in _sort_by_length(GPU_KINDS.values()) if any(kind.name in text for text in texts)]
    if not kinds:
        valid = ", ".join(GPU_KINDS)
        raise ConfigError(f"--doctor: {path} names no known GPU ({valid}): name its nearest with --gpu")
    return kinds[0]


def _sort_by_length(kinds: Iterable[GpuKind]) -> list[GpuKind]:
    """Return kinds with the longest names first, since one may be a part of another."""
    return sorted(kinds, key=lambda kind: -len(kind.name))
