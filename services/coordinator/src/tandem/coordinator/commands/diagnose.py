"""``coordinator diagnose``: say why a run collapsed or stalled."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
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
