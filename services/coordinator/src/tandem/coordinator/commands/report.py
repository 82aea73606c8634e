"""``coordinator report``: summarise runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
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
