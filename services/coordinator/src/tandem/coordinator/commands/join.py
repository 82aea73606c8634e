"""``coordinator join``, ``rollouts``, ``keys``: services that start on another node, or by hand."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common import signals
from tandem.common.errors import FAILED, OK, ConfigError
from tandem.common.keys import find_key_file, read_key_file
from tandem.config import Config, load_config
from tandem.coordinator.commands.arguments import Commands, add_config, count, number

if TYPE_CHECKING:
    from tandem.launch.nodes import NodeShare


def add_join(commands: Commands) -> None:
    """Declare ``join``."""
    join = commands.add_parser(
        "join",
        help="launch this node's part of a run that another coordinates",
        description="Launch this node's trainers and rollout engines, keep them running, and end with the run. "
        "Which they are follows from cluster.num_nodes and the GPUs of each: `coordinator plan` shows it.",
    )
    add_config(join)
    join.add_argument("--node", type=int, required=True, metavar="N", help="number of this node; the first is 0")
    _add_joining(join)
    join.set_defaults(carry_out=_join)


def add_rollouts(commands: Commands) -> None:
    """Declare ``rollouts``."""
    rollouts = commands.add_parser(
        "rollouts",
        help="launch engines that take weights from refit.store",
        description="Launch rollout engines, keep them running, and end with the run. Weights reach them by the run's "
        "refit.store. They connect to the coordinator and to the store, and trainers fetch samples from them.",
    )
    add_config(rollouts)
    rollouts.add_argument(
        "--store", metavar="URL", help="the store as this machine reaches it (default: the run's refit.store)"
    )
    rollouts.add_argument("--num", type=count, default=1, metavar="N", help="number of engines (default: 1)")
    _add_joining(rollouts)
    rollouts.set_defaults(carry_out=_rollouts)


def _add_joining(parser: argparse.ArgumentParser) -> None:
    """Declare how to reach the run, and how long to wait for it."""
    parser.add_argument("--coordinator", required=True, metavar="tcp://HOST:PORT", help="the coordinator's address")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="the run's keys (default: RUN/keys/members.json, if all nodes see the run folder)",
    )
    above_0 = number("above 0", lambda number: number > 0)
    parser.add_argument(
        "--join-timeout",
        type=above_0,
        default=3600.0,
        metavar="S",
        help="seconds to wait to be admitted: a run may have to make its model first (default: 3600)",
    )
    parser.add_argument(
        "--grace",
        type=above_0,
        default=300.0,
        metavar="S",
        help="seconds to wait, once asked to end, for the coordinator to end the run (default: 300)",
    )


def _join(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from tandem.launch.nodes import node_of

    return _launch(arguments, config, node_of(config, arguments.node))


def _rollouts(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    if config.refit.store is None and arguments.store is None:
        raise ConfigError("refit.store: null, and no --store: engines that this starts take their weights from there")
    from tandem.launch.nodes import NodeShare
    from tandem.refit.transports.store import HOST_VARIABLE, URL_VARIABLE

    os.environ[HOST_VARIABLE] = "elsewhere"
    if arguments.store is not None:
        os.environ[URL_VARIABLE] = arguments.store
    share = NodeShare(number=0, trainers=(), rollouts=tuple(range(arguments.num)))
    return _launch(arguments, config, share, is_numbered=False)


def _launch(arguments: argparse.Namespace, config: Config, node: NodeShare, *, is_numbered: bool = True) -> int:
    """Launch services of a run that another machine coordinates, and return once they have ended."""
    from tandem.launch.fork_server import ServiceForkServer
    from tandem.launch.join import ByKeyFile, JoinLimits, NodeProcesses, wait_for_key_file
    from tandem.launch.launch import LocalProcesses, make_importable, preload

    kinds = {kind for kind, _ in node.processes}
    say = partial(print, flush=True)
    keys = arguments.key_file or find_key_file(Path(config.logger.log_dir))
    signals.interrupt_when_asked()
    wait_for_key_file(keys, arguments.join_timeout, say)
    read_key_file(keys)  # report a damaged key file here, once
    make_importable(arguments.config)
    logs = Path(config.logger.log_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ServiceForkServer(
        partial(preload, kinds, config.policy.environment), config.cluster.deadlines.join_s
    ) as fork_server:
        joining = ByKeyFile(
            coordinator=arguments.coordinator,
            key_file=keys.absolute(),
            timeout_s=arguments.join_timeout,
            is_numbered=is_numbered,
        )
        processes = LocalProcesses(joining, logs, fork_server)
        limits = JoinLimits(
            admission_s=arguments.join_timeout,
            max_replacements=config.cluster.max_replacements,
            replacement_window_s=config.cluster.replacement_window_s,
            grace_s=arguments.grace,
        )
        services = NodeProcesses(node, processes, limits, say)
        try:
            services.run()
        finally:
            processes.stop(0.0)
    for failure in services.failures:
        print(f"error: {failure}", file=sys.stderr)
    return FAILED if services.failures else OK


def add_keys(commands: Commands) -> None:
    """Declare ``keys``."""
    keys = commands.add_parser("keys", help="make a run's keys, for services that are started by hand")
    add_config(keys)
    keys.set_defaults(carry_out=_keys)


def _keys(arguments: argparse.Namespace) -> int:
    from tandem.common.keys import read_run_keys, write_run_keys
    from tandem.launch.admission import new_run_keys

    run = Path(load_config(arguments.config, arguments.overrides).logger.log_dir)
    print(write_run_keys(run, read_run_keys(run) or new_run_keys()))
    return OK
