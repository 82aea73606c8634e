"""Slurm batch scripts that run a configuration on the nodes of a cluster.

The script starts on the first node, as the coordinator's parent. On every other node ``srun`` starts ``coordinator
join``, which launches that node's services. A job that lost a node or was preempted returns to Slurm's queue; when it
restarts, it resumes from the newest checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.launch.nodes import nodes_of
from tandem.observe.run_folder.journal_file import JOURNAL_NAME


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
