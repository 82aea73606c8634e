"""``coordinator report``, ``diagnose`` and ``refits``: what the records of runs say, summed up."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands, add_run


def add_report(commands: Commands) -> None:
    """Declare ``report``."""
    report = commands.add_parser("report", help="summarise runs side by side: curves, and where the time went")
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders: logger.log_dir of their configurations"
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for report.html, report.png and report.json, which is of the first run (default: that run's folder)",
    )
    report.set_defaults(carry_out=_report)


def _report(arguments: argparse.Namespace) -> int:
    from tandem.observe.report.report import format_report, write_report

    out: Path = arguments.out or arguments.runs[0]
    print(format_report(write_report(arguments.runs, out), out))
    return OK


def add_diagnose(commands: Commands) -> None:
    """Declare ``diagnose``."""
    diagnose = commands.add_parser("diagnose", help="say why a run collapsed or stalled, with the evidence")
    diagnose.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders: logger.log_dir of their configurations"
    )
    diagnose.add_argument("--json", action="store_true", help="print the findings as JSON, a list of runs")
    diagnose.set_defaults(carry_out=_diagnose)


def _diagnose(arguments: argparse.Namespace) -> int:
    import msgspec

    from tandem.observe.diagnosis import diagnose, format_diagnosis

    diagnoses = [diagnose(folder) for folder in arguments.runs]
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(diagnoses)).decode())
    else:
        print("\n\n".join(map(format_diagnosis, diagnoses)))
    return OK


def add_refits(commands: Commands) -> None:
    """Declare ``refits``."""
    refits = commands.add_parser("refits", help="list a run's refits: bytes by link, seconds, share of the bound")
    add_run(refits)
    refits.set_defaults(carry_out=_refits)


def _refits(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.observe.lines import print_refits

    print_refits(arguments.run, Console())
    return OK
