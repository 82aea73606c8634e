"""Rules for processes: their number, their hosts, and heartbeats."""

from __future__ import annotations

import re

from tandem.config.checks.rule import Rule, restrict_to_rollouts
from tandem.config.placement import count_gpus_of_reward_models, count_gpus_per_engine
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config


def check_has_rollouts(config: Config) -> None:
    """Check that there is at least one rollout."""
    if config.cluster.rollouts == 0:
        raise InvalidValue("cluster.rollouts", f"0, but {config.declaration.title} needs at least 1")


def check_generation_fits_its_gpus(config: Config) -> None:
    """Check that the GPUs reserved for generation exist, suffice, and leave some for training."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.colocated.enabled:
        return
    gpus, nodes = generation.colocated.resources.gpus_per_node, generation.colocated.resources.num_nodes
    prefix = "policy.generation.colocated.resources."
    if cluster.num_nodes == 1:
        key, set_aside, gpus_each = "gpus_per_node", gpus, 1
        num_available = cluster.gpus_per_node - count_gpus_of_reward_models(config)
        fixed_key, fixed_size, fitting = "num_nodes", nodes, 1
    else:
        key, set_aside, num_available, gpus_each = "num_nodes", nodes, cluster.num_nodes, cluster.gpus_per_node
        fixed_key, fixed_size, fitting = "gpus_per_node", gpus, cluster.gpus_per_node
    if fixed_size not in (None, fitting):
        rule = f"with cluster.num_nodes {cluster.num_nodes} it must be {fitting} or null"
        raise InvalidValue(prefix + fixed_key, f"{fixed_size}, but {rule}")
    if set_aside is None:
        return
    if set_aside >= num_available:
        raise InvalidValue(prefix + key, f"{set_aside} of cluster.{key} ({num_available}) leaves none to training")
    sides = (
        ("cluster.rollouts", cluster.rollouts * count_gpus_per_engine(config), set_aside * gpus_each),
        ("cluster.trainers", config.num_trainers, (num_available - set_aside) * gpus_each),
    )
    for process_key, needed, num_gpus in sides:
        if needed > num_gpus:
            raise InvalidValue(
                process_key, f"needs {needed} GPUs, and {prefix}{key} ({set_aside}) leaves it {num_gpus}"
            )


def check_launch_fits_cluster(config: Config) -> None:
    """Check that the coordinator does not launch more processes than it expects."""
    launch = config.cluster.launch
    if isinstance(launch, str):
        return
    cluster = config.cluster
    counts = (("trainers", launch.trainers, config.num_trainers), ("rollouts", launch.rollouts, cluster.rollouts))
    for kind, launched, expected in counts:
        if launched > expected:
            beside = " and cluster.processes_of" if expected > getattr(cluster, kind) else ""
            raise InvalidValue(f"cluster.launch.{kind}", f"{launched} is more than cluster.{kind}{beside} ({expected})")


def check_rollouts_have_room(config: Config) -> None:
    """Check that all expected rollouts may join."""
    max_rollouts, rollouts = config.cluster.max_rollouts, config.cluster.rollouts
    if max_rollouts is not None and max_rollouts < rollouts:
        raise InvalidValue("cluster.max_rollouts", f"{max_rollouts} is fewer than cluster.rollouts ({rollouts})")


def check_address_can_be_bound(config: Config) -> None:
    """Check that the address is ``tcp://host:port``, or has ``*`` for any free port."""
    match = re.fullmatch(r"tcp://[^/\s]+:(\*|\d+)", config.cluster.address)
    if not match or (match[1] != "*" and not 0 < int(match[1]) < 65536):
        raise InvalidValue("cluster.address", f"{shown(config.cluster.address)} is not tcp://host:port or tcp://host:*")


def silence_outlasts_a_heartbeat(config: Config) -> None:
    """Check that one late heartbeat does not count as a lost process."""
    interval, timeout = config.cluster.heartbeat_interval_s, config.cluster.heartbeat_timeout_s
    if timeout < 2 * interval:
        raise InvalidValue(
            "cluster.heartbeat_timeout_s", f"{timeout:g} is less than twice cluster.heartbeat_interval_s ({interval:g})"
        )


RULES: tuple[Rule, ...] = (
    *restrict_to_rollouts(check_has_rollouts, check_generation_fits_its_gpus),
    check_launch_fits_cluster,
    check_rollouts_have_room,
    check_address_can_be_bound,
    silence_outlasts_a_heartbeat,
)
