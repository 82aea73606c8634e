"""``coordinator keys``: make a run's keys before it begins, for services started by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK
from tandem.config import load_config
from tandem.coordinator.commands.arguments import Commands, add_config


def add(commands: Commands) -> None:
    """Declare the command."""
    keys = commands.add_parser("keys", help="make a run's keys, for services that are started by hand")
    add_config(keys)
    keys.set_defaults(carry_out=_keys)


def _keys(arguments: argparse.Namespace) -> int:
    from tandem.common.keys import read_run_keys, write_run_keys
    from tandem.launch.admission import new_run_keys

    run = Path(load_config(arguments.config, arguments.overrides).logger.log_dir)
    print(write_run_keys(run, read_run_keys(run) or new_run_keys()))
    return OK
