"""``coordinator merge``: merge the adapters that a run has trained into a plain model."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    merge = commands.add_parser(
        "merge",
        help="make a plain Hugging Face model of trained adapters",
        description="Write the model whose weights are the base's plus what the adapters add. "
        "It is loaded whole into host memory.",
    )
    merge.add_argument(
        "adapters",
        type=Path,
        metavar="ADAPTERS",
        help="a run folder, a checkpoint (step_N), or a folder in PEFT's format",
    )
    merge.add_argument("target", type=Path, metavar="FOLDER", help="where to write it; must not exist")
    merge.add_argument("--base", metavar="MODEL", help="folder or Hub name of the base (default: as ADAPTERS names it)")
    merge.set_defaults(carry_out=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from tandem.observe.run_folder.found_models import adapters_in

    (model,) = adapters_in(arguments.adapters)
    words = [str(model.folder), str(arguments.target), *([arguments.base] if arguments.base else [])]
    # In a process of its own: this one imports no torch.
    code = subprocess.run([sys.executable, "-m", "tandem.trainer.files.merging", *words], check=False).returncode
    if code == OK:
        print(f"{arguments.target} is {model.label} with its adapters merged")
    return code
