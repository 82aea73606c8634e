"""Steps of the doctor, tried in a process of their own, and their findings for people and machines.

A program carries out steps in order, and writes a line of JSON to a descriptor before and after each. Steps that move
bytes with the code of refits are not here: `tandem.coordinator.doctor_steps` has them, and is the program of all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from tandem.common.distribution import install_command, list_requirements
from tandem.config.engine_kinds import ENGINE_KINDS, EngineKind
from tandem.config.schema import LinkRates
from tandem.observe.exporters.nvml import GpuLinks, use_nvml

NO_GPU = "no GPU"
Status = Literal["ok", "warning", "missing", "skipped"]
"""Skipped: there is nothing to test; without a GPU, all checks of GPUs."""


class DoctorFinding(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    status: Status
    says: str
    advice: str = ""
    """Advice on what to do about it."""


class StepOutcome(msgspec.Struct, frozen=True):
    """The result of one step."""

    findings: tuple[DoctorFinding, ...]
    rates: dict[str, float] = {}
    """Rates in GB/s, by their keys in ``cluster.links``."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a machine."""

    host: str
    findings: tuple[DoctorFinding, ...]
    links: dict[str, float]
    """Measured rates, by their keys in ``cluster.links``."""
    needed_but_missing: tuple[str, ...]
    """Missing findings that the given configuration needs."""


def report_of(host: str, outcomes: Sequence[StepOutcome], needed: Collection[str]) -> DoctorReport:
    """Combine the outcomes of steps."""
    findings = tuple(finding for outcome in outcomes for finding in outcome.findings)
    return DoctorReport(
        host=host,
        findings=findings,
        links={key: rate for outcome in outcomes for key, rate in outcome.rates.items()},
        needed_but_missing=tuple(f.name for f in findings if f.status == "missing" and f.name in needed),
    )


def format_line(finding: DoctorFinding) -> str:
    """Return a finding as a line of text."""
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{finding.status:<8} {finding.name:<15} {finding.says}{advice}"


def format_links(rates: Mapping[str, float]) -> str:
    """Return the section ``cluster.links`` of a configuration; rates that were not measured are comments."""
    return "\n".join(["cluster:", "  links:  # GB/s", *_format_link_lines(rates)])


def _format_link_lines(rates: Mapping[str, float]) -> Iterator[str]:
    for field in msgspec.structs.fields(LinkRates):
        if field.name in rates:
            yield f"    {field.name}: {rates[field.name]:.3g}"
        else:
            yield f"    # {field.name}: {field.default:g}  the default: not measured here"


class DoctorStep(NamedTuple):
    """A step, which the doctor carries out if none that it needs has failed."""

    finding: str
    """Name of its finding."""
    carry_out: Callable[[], StepOutcome]
    needs: Set[str] = frozenset()
    """Names of earlier steps."""


class OutputLine(msgspec.Struct, frozen=True):
    """A line of output: the beginning of a step, or its outcome."""

    step: str
    outcome: StepOutcome | None = None


def _look_at_gpus() -> StepOutcome:
    with use_nvml() as nvml:
        if nvml is None or not nvml.num_gpus():
            return skipped("GPUs")
        driver, gpus = nvml.driver(), nvml.links()
    return StepOutcome(
        (DoctorFinding("GPUs", "ok", f"{', '.join(map(_describe, gpus))}; driver {driver}"), _look_at_topology(gpus))
    )


def _describe(gpu: GpuLinks) -> str:
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.0f} GB"
    return f"{gpu.index}: {gpu.name} ({gpu.pcie or 'unknown bus'}, {gpu.num_nvlinks} NVLinks{memory})"


def _look_at_topology(gpus: list[GpuLinks]) -> DoctorFinding:
    ways = {(gpu.index, peer): way for gpu in gpus for peer, way in gpu.peers.items() if gpu.index < peer}
    if not ways:
        return DoctorFinding("GPU links", "ok", "there is one GPU")
    if len(set(ways.values())) == 1:
        return DoctorFinding("GPU links", "ok", f"between any two: {next(iter(ways.values()))}")
    return DoctorFinding(
        "GPU links", "ok", ", ".join(f"{first}-{second}: {way}" for (first, second), way in ways.items())
    )


def _look_at_torch() -> StepOutcome:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return StepOutcome((DoctorFinding("torch", "ok", f"{torch.__version__}, built for {built_for}"),))


def _look_at_cuda() -> StepOutcome:
    import torch

    with use_nvml() as nvml:
        num_gpus = 0 if nvml is None else nvml.num_gpus()
    if not torch.cuda.is_available():
        if not num_gpus:
            return skipped("CUDA")
        advice = "install a build of torch for CUDA, and a driver that is new enough for it"
        return StepOutcome(
            (DoctorFinding("CUDA", "missing", f"there are {num_gpus} GPUs, but torch cannot use them", advice),)
        )
    worked = float(torch.ones(8, device="cuda").sum())
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    says = f"torch computes on {torch.cuda.device_count()} GPUs ({', '.join(sorted(names))})"
    return StepOutcome((DoctorFinding("CUDA", "ok" if worked == 8 else "missing", says),))


def _look_at_megatron() -> StepOutcome:
    return _look_at_package("Megatron-Core", "megatron.core", ("megatron-core",), "megatron")


def _look_at_package(name: str, module: str, distributions: tuple[str, ...], extra: str) -> StepOutcome:
    """Import a package, and compare its version with the one that Tandem is tested with."""
    versions = {each: importlib.metadata.version(each) for each in distributions if _is_installed(each)}
    if not versions:
        return StepOutcome((DoctorFinding(name, "missing", "not installed", install_command(extra)),))
    try:
        importlib.import_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        says = f"{_join(versions)}, which cannot be imported: {reason[:300]}"
        return StepOutcome(
            (DoctorFinding(name, "missing", says, "install it again, with the torch version it was built for"),)
        )
    tested = {each: _find_tested_version(each) for each in versions}
    differing = {
        each: version for each, version in tested.items() if version and version != versions[each].split("+")[0]
    }
    if differing:
        says = f"{_join(versions)}; tested with {_join(differing)}"
        return StepOutcome((DoctorFinding(name, "warning", says, install_command(extra)),))
    return StepOutcome((DoctorFinding(name, "ok", _join(versions)),))


def _join(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _find_tested_version(distribution: str) -> str:
    """Return the version that Tandem's own extra requires; empty if it sets none."""
    for requirement in list_requirements():
        named, equals, version = requirement.partition(";")[0].partition("==")
        if equals and named.strip() == distribution:
            return version.strip()
    return ""


def skipped(name: str) -> StepOutcome:
    """Return the outcome of a step that needs a GPU where there is none."""
    return StepOutcome((DoctorFinding(name, "skipped", NO_GPU),))


def _make_engine_step(kind: EngineKind) -> DoctorStep:
    import_it = partial(_look_at_package, kind.title, kind.module, kind.distributions, kind.extra)
    return DoctorStep(kind.title, import_it, {"torch"})


STEPS: dict[str, DoctorStep] = {
    "gpus": DoctorStep("GPUs", _look_at_gpus),
    "torch": DoctorStep("torch", _look_at_torch),
    "cuda": DoctorStep("CUDA", _look_at_cuda, {"torch"}),
    **{kind.name: _make_engine_step(kind) for kind in ENGINE_KINDS.values() if kind.module},
    "megatron": DoctorStep("Megatron-Core", _look_at_megatron, {"torch"}),
}


def carry_out(steps: Mapping[str, DoctorStep], arguments: Sequence[str]) -> None:
    """Carry out those of the steps that the command line of a process names: ``DESCRIPTOR THREADS STEP...``."""
    descriptor, num_threads, *names = arguments
    os.environ["OMP_NUM_THREADS"] = num_threads
    with os.fdopen(int(descriptor), "wb", buffering=0) as lines:
        for name in names:
            lines.write(msgspec.json.encode(OutputLine(name)) + b"\n")
            try:
                outcome = steps[name].carry_out()
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                outcome = StepOutcome((DoctorFinding(steps[name].finding, "missing", reason[:300]),))
            lines.write(msgspec.json.encode(OutputLine(name, outcome)) + b"\n")
