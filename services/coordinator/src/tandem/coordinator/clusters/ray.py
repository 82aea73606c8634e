"""``coordinator ray``: run a configuration on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import os
from functools import partial

from tandem.common import signals
from tandem.common.errors import OK, ConfigError
from tandem.config import load_config
from tandem.coordinator.commands.arguments import Commands, add_config, number


def add(commands: Commands) -> None:
    """Declare the command."""
    ray = commands.add_parser(
        "ray",
        help="run a configuration on the nodes of a Ray cluster",
        description="Have Ray place cluster.num_nodes nodes with cluster.gpus_per_node GPUs each, and run a "
        "configuration on them to its end. Every node must see this folder and this command's Python environment, and "
        "those with trainers logger.log_dir. Needs the extra ray.",
    )
    add_config(ray)
    ray.add_argument(
        "--address", default="auto", metavar="HOST:PORT", help="the Ray cluster (default: auto, the one of this node)"
    )
    above_0 = number("above 0", lambda number: number > 0)
    ray.add_argument(
        "--cpus", type=above_0, default=1.0, metavar="N", help="CPUs that Ray sets aside on each node (default: 1)"
    )
    ray.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="another resource of each node: --resource accelerator_type:H100=0.001",
    )
    ray.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an environment variable for all nodes; without a value the one here, which no command line then shows",
    )
    ray.add_argument(
        "--wait", type=above_0, default=3600.0, metavar="S", help="seconds to wait for nodes (default: 3600)"
    )
    modes = ray.add_mutually_exclusive_group()
    modes.add_argument("--resume", action="store_true", help="continue the run that is in the run folder")
    modes.add_argument(
        "--restart", action="store_true", help="set an earlier run in the run folder aside and begin anew"
    )
    ray.add_argument(
        "--unfinished-code",
        type=int,
        default=OK,
        metavar="CODE",
        help="exit code where checkpointing.checkpoint_must_save_by ends the run before its last step (default: 0)",
    )
    ray.set_defaults(carry_out=_ray)


def _ray(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    resources = _read_resources(arguments.resource)
    environment = _read_environment(arguments.env)
    from tandem.launch.ray import plan_on_ray, run_on_ray

    plan = plan_on_ray(
        config,
        arguments.config,
        arguments.overrides,
        cpus=arguments.cpus,
        resources=resources,
        environment=environment,
        start_words=["--resume"] * arguments.resume + ["--restart"] * arguments.restart,
        options=[f"--unfinished-code={arguments.unfinished_code}"],
        wait_s=arguments.wait,
    )
    signals.interrupt_when_asked()
    return run_on_ray(plan, arguments.address, partial(print, flush=True))


def _read_resources(texts: list[str]) -> dict[str, float]:
    """Return the amounts of ``--resource``, by name."""
    read_amount = number("above 0", lambda number: number > 0)
    resources = {}
    for text in texts:
        name, _, amount = text.rpartition("=")
        try:
            resources[name] = read_amount(amount)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--resource {text}: {error}") from error
        if not name or name in ("CPU", "GPU", "memory"):
            instead = {"CPU": ": --cpus says it", "GPU": ": cluster.gpus_per_node says it"}.get(name, "")
            raise ConfigError(f"--resource {text}: not NAME=AMOUNT of a custom resource{instead}")
    return resources


def _read_environment(texts: list[str]) -> dict[str, str]:
    """Return the variables of ``--env``, with the values here where none is given."""
    environment = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not name or (not is_given and name not in os.environ):
            raise ConfigError(f"--env {text}: there is no such environment variable here; --env NAME=VALUE sets one")
        environment[name] = value if is_given else os.environ[name]
    return environment
