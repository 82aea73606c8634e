"""Findings about a machine, as lines for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from tandem.config.schema import LinkRates

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
