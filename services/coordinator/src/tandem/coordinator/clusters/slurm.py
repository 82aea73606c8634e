"""``coordinator slurm``: write, and submit, the batch script by which Slurm runs a configuration.

The script starts on the first node, as the coordinator's parent. On every other node ``srun`` starts ``coordinator
join``, which launches that node's services. A job that lost a node or was preempted returns to Slurm's queue; when it
restarts, it resumes from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import FAILED, OK, ConfigError, TandemError
from tandem.config import Config, load_config
from tandem.coordinator.commands.arguments import Commands, add_config, count
from tandem.launch.nodes import nodes_of
from tandem.observe.run_folder.journal_file import JOURNAL_NAME

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


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm options of a job that are not in the configuration."""

    name: str
    time: str | None = None
    """Time limit in the format of ``sbatch --time``."""
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, each as typed on a command line."""
    setup: tuple[str, ...] = ()
    """Lines of bash that every node runs first, to activate an environment for example."""
    save_before_s: int = 300
    """Seconds before the limit, or before a preemption's grace ends, at which the run is asked to save and end."""


def write_batch_script(config: Config, source: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """Return the script; `source` and `overrides` are the configuration as given.

    Raises:
        ConfigError: some process would be launched by no node, or by two.

    """
    nodes = nodes_of(config)
    if config.logger.log_dir.startswith("/tmp/"):
        raise ConfigError(
            f"logger.log_dir: {config.logger.log_dir}, but all nodes of a job must see it: it cannot be in /tmp"
        )
    arguments = [str(source.resolve()), *overrides]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in _list_directives(config, job)),
        nodes="\n".join(f"#   node {node.number}: {node.description}" for node in nodes),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        setup="".join(f"{line}\n" for line in job.setup),
        run=shlex.quote(str(Path(config.logger.log_dir).resolve())),
        journal=JOURNAL_NAME,
        given=shlex.join(arguments),
        others=_OTHERS.format(count=len(nodes) - 1, given=shlex.join(arguments)) if len(nodes) > 1 else "",
    )


def _list_directives(config: Config, job: SlurmJob) -> list[str]:
    cluster = config.cluster
    gpus = [f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    named = {"time": job.time, "partition": job.partition, "account": job.account}
    return [
        f"--job-name={job.name}",
        f"--nodes={cluster.num_nodes}",
        "--ntasks-per-node=1",
        *gpus,
        *(f"--{option}={value}" for option, value in named.items() if value is not None),
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.log",
        f"--signal=B:USR1@{job.save_before_s}",
        *job.options,
    ]


_SCRIPT = """\
#!/usr/bin/env bash
{directives}
#
# Written by `coordinator slurm`. What each node launches:
{nodes}

set -u
export PATH={programs}:$PATH
{setup}run={run}
mkdir -p "$run"

# Where the coordinator listens: the first node's address as Slurm has it, and a port of this job's own.
node=$(scontrol show node "$SLURMD_NODENAME" --oneliner | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
host=$(getent ahostsv4 "$node" | awk 'NR == 1 {{ print $1 }}')
export TANDEM_COORDINATOR="tcp://$host:$((20000 + SLURM_JOB_ID % 20000))"

# A job that Slurm has begun again goes on where its run stands.
how=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e "$run/{journal}" ]; then how=(--resume); fi

# 75: the time that the run gives itself is over (checkpointing.checkpoint_must_save_by), and not its steps.
coordinator up {given} cluster.address="$TANDEM_COORDINATOR" --unfinished-code 75 "${{how[@]}}" &
run_pid=$!
{others}
# USR1 comes before the time limit, TERM with a preemption: the run saves, ends, and waits in the queue. (What bash
# starts in the background ignores INT.)
stopped="" interrupted=""
trap 'stopped=requeue interrupted=1; kill -TERM $run_pid' USR1
trap 'stopped=asked interrupted=1; kill -TERM $run_pid' TERM
while :; do
  wait $run_pid
  code=$?
  [ -n "$interrupted" ] || break
  interrupted=""
done
trap '' USR1 TERM
for _ in {{1..50}}; do [ -n "$(jobs -r)" ] && sleep 0.2; done  # the other nodes hear that the run has ended
if [ "$code" = 75 ] && [ "$stopped" != asked ]; then stopped=requeue code=130; fi
if [ "$stopped" = requeue ] && [ "$code" = 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

_OTHERS = """
# shellcheck disable=SC2016  # each node says its own number
srun --nodes={count} --relative=1 --ntasks={count} --ntasks-per-node=1 --kill-on-bad-exit=0 \\
  bash -c 'exec coordinator join "$@" --node $((SLURM_NODEID + 1))' join \\
  {given} --coordinator "$TANDEM_COORDINATOR" &
"""
