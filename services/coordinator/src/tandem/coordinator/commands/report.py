"""``coordinator report``: summarise a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.coordinator.commands.arguments import OK, Commands, add_run


def add(commands: Commands) -> None:
    """Declare the command."""
    report = commands.add_parser("report", help="summarise a run: curves as PNG and JSON, and where the time went")
    add_run(report)
    report.add_argument("--out", type=Path, help="folder for report.png and report.json (default: the run folder)")
    report.set_defaults(carry_out=_report)


def _report(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.inspect.report import format_summary, write_report

    write_report(arguments.run, arguments.out or arguments.run)
    print(format_summary(arguments.run))
    return OK
