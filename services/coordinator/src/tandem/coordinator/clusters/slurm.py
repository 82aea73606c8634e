"""``coordinator slurm``: write, and submit, the batch script by which Slurm runs a configuration."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tandem.common.errors import FAILED, OK, TandemError
from tandem.config import load_config
from tandem.coordinator.commands.arguments import Commands, add_config, count

_SUBMIT_S = 60.0


def add(commands: Commands) -> None:
    """Declare the command."""
    slurm = commands.add_parser(
        "slurm",
        help="write or submit a configuration's batch script for Slurm",
        description="Print the batch script of a job that runs a configuration on cluster.num_nodes nodes, or submit "
        "it. Every node must see this folder, this command's Python environment, and logger.log_dir.",
    )
    add_config(slurm)
    destination = slurm.add_mutually_exclusive_group()
    destination.add_argument(
        "--submit", action="store_true", help="give it to sbatch; the script is kept in the run folder"
    )
    destination.add_argument("--output", type=Path, metavar="FILE", help="write it to a file (default: print it)")
    slurm.add_argument("--name", help="name of the job (default: the file's)")
    slurm.add_argument("--time", metavar="LIMIT", help="time limit in sbatch's format, such as 12:00:00")
    slurm.add_argument("--partition", metavar="NAME")
    slurm.add_argument("--account", metavar="NAME")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="another option of sbatch: --sbatch=--qos=high"
    )
    slurm.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="a line of bash at the beginning of the job"
    )
    slurm.add_argument(
        "--save-before",
        type=count,
        default=300,
        metavar="S",
        help="save, end and queue the run again S seconds before its time limit (default: 300)",
    )
    slurm.set_defaults(carry_out=_slurm)


def _slurm(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from tandem.launch.slurm import SlurmJob, write_batch_script

    source = Path(arguments.config)
    job = SlurmJob(
        name=arguments.name or source.stem,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        options=tuple(arguments.sbatch),
        setup=tuple(arguments.setup),
        save_before_s=arguments.save_before,
    )
    script = write_batch_script(config, source, arguments.overrides, job)
    if arguments.submit:
        return _submit(script, Path(config.logger.log_dir) / "slurm.sh")
    if arguments.output is None:
        print(script, end="")
        return OK
    arguments.output.write_text(script)
    arguments.output.chmod(0o755)
    print(f"{arguments.output} is written; next: sbatch {arguments.output}")
    return OK


def _submit(script: str, path: Path) -> int:
    """Submit a script to Slurm and print the job's number. Raise `TandemError` if there is no Slurm."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise TandemError("--submit: there is no sbatch here; write the script with --output FILE and submit it there")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    try:
        completed = subprocess.run([sbatch, str(path)], capture_output=True, text=True, timeout=_SUBMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TandemError(f"sbatch {path}: no answer from Slurm within {_SUBMIT_S:g} s") from None
    print(completed.stdout, end="")
    print(completed.stderr, end="", file=sys.stderr)
    return OK if completed.returncode == 0 else FAILED
