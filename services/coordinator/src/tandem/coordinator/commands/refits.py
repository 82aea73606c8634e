"""``coordinator refits``: list a run's refits."""

from __future__ import annotations

import argparse

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands, add_run


def add(commands: Commands) -> None:
    """Declare the command."""
    refits = commands.add_parser("refits", help="list a run's refits: bytes by link, seconds, share of the bound")
    add_run(refits)
    refits.set_defaults(carry_out=_refits)


def _refits(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.observe.refits import print_refits

    print_refits(arguments.run, Console())
    return OK
