"""The processes of a run: those that make it complete, and those that each node launches.

The coordinator runs on the first node and launches that node's processes (``cluster.launch``). Every other node runs
``coordinator join``, which launches the rest: with GPUs, by the numbers that processes take
(`tandem.config.placement`); on CPUs, in equal parts.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from tandem.common.errors import ConfigError
from tandem.common.messages import ServiceKind
from tandem.config import Config
from tandem.config.placement import count_gpus_per_engine, find_first_gpu_of_engines

KINDS: tuple[ServiceKind, ...] = ("refit", "trainer", "rollout")


def expected_processes(config: Config) -> dict[ServiceKind, int]:
    """Return how many processes of each kind make the run complete; engines and a weight plane only if it generates."""
    if not config.generates:
        return {"trainer": config.num_trainers}
    return {"refit": 1, "trainer": config.num_trainers, "rollout": config.cluster.rollouts}


def launched_processes(config: Config) -> dict[ServiceKind, int]:
    """Return how many of the expected processes the coordinator launches itself."""
    expected = expected_processes(config)
    launch = config.cluster.launch
    if launch == "all":
        return expected
    if launch == "none":
        return dict.fromkeys(expected, 0)
    num_launched: dict[ServiceKind, int] = {
        "refit": int(launch.refit),
        "trainer": launch.trainers,
        "rollout": launch.rollouts,
    }
    return {kind: num_launched[kind] for kind in expected}


class NodeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that one node launches, by their numbers in the run."""

    number: int
    """Number of the node; the coordinator is on node 0."""
    trainers: tuple[int, ...]
    rollouts: tuple[int, ...]

    @property
    def processes(self) -> list[tuple[ServiceKind, int]]:
        """Each process with its number."""
        return [*(("trainer", number) for number in self.trainers), *(("rollout", number) for number in self.rollouts)]

    @property
    def description(self) -> str:
        """The processes in words."""
        first = ["coordinator", "refit"] if self.number == 0 else []
        kinds = (("trainer", self.trainers), ("rollout", self.rollouts))
        counts = [f"{len(numbers)} {kind}{'s' if len(numbers) > 1 else ''}" for kind, numbers in kinds if numbers]
        return ", ".join([*first, *counts])


def nodes_of(config: Config) -> tuple[NodeShare, ...]:
    """Return every node of the cluster.

    Raises:
        ConfigError: some process would be launched by no node, or by two, or a node would launch none.

    """
    expected, launched = expected_processes(config), launched_processes(config)
    if launched.get("refit", 0) < expected.get("refit", 0):
        raise ConfigError("cluster.launch.refit: false, but the first node is the one to launch the refit service")
    trainers = _deal_shares(config, "trainers", expected["trainer"], launched["trainer"])
    rollouts = _deal_shares(config, "rollouts", expected.get("rollout", 0), launched.get("rollout", 0))
    nodes = tuple(
        NodeShare(number=number, trainers=trainers[number], rollouts=rollouts[number])
        for number in range(config.cluster.num_nodes)
    )
    if idle := [str(node.number) for node in nodes[1:] if not node.processes]:
        raise ConfigError(
            f"cluster.num_nodes: {len(nodes)}, but node {', '.join(idle)} would launch nothing: the first launches "
            f"{len(trainers[0])} of all {expected['trainer']} trainers and {len(rollouts[0])} of all "
            f"{expected.get('rollout', 0)} rollouts; see cluster.trainers, cluster.rollouts and cluster.launch"
        )
    return nodes


def node_of(config: Config, number: int) -> NodeShare:
    """Return a node other than the first. Raises `ConfigError` if there is no such node."""
    nodes = nodes_of(config)
    if 1 <= number < len(nodes):
        return nodes[number]
    other_nodes = (
        "no other node" if len(nodes) == 1 else "nodes 1" + (f" to {len(nodes) - 1}" if len(nodes) > 2 else "")
    )
    raise ConfigError(
        f"node {number}: beside the first node, which runs the coordinator, cluster.num_nodes gives {other_nodes}"
    )


def _deal_shares(config: Config, key: str, total: int, launched: int) -> list[tuple[int, ...]]:
    """Deal the processes of one kind to the nodes; the first node gets those that the coordinator launches."""
    cluster = config.cluster
    if cluster.num_nodes == 1:
        if launched < total:
            raise ConfigError(
                f"cluster.launch: {launched} of the {total} {key} are launched, but cluster.num_nodes is 1: "
                "there is no other node to launch the rest"
            )
        return [tuple(range(total))]
    if cluster.gpus_per_node == 0 or (key == "rollouts" and count_gpus_per_engine(config) == 0):
        return [tuple(range(launched)), *_deal_evenly(launched, total, cluster.num_nodes - 1)]
    shares: list[tuple[int, ...]] = [()] * cluster.num_nodes
    for index in range(total):
        node = _find_first_gpu(config, key, index) // cluster.gpus_per_node
        if node >= cluster.num_nodes:
            num_gpus = cluster.num_nodes * cluster.gpus_per_node
            raise ConfigError(f"cluster.{key}: {total} need more than the {num_gpus} GPUs of the cluster")
        shares[node] += (index,)
    if len(shares[0]) != launched:
        raise ConfigError(
            f"cluster.launch: the coordinator launches {launched} {key}, but the first node has GPUs for "
            f"{len(shares[0])}; leave cluster.launch out to launch as many"
        )
    return shares


def _find_first_gpu(config: Config, key: str, index: int) -> int:
    """Return the number of the first GPU that a process takes, counted over all nodes."""
    if key == "trainers":
        return index
    return find_first_gpu_of_engines(config) + index * count_gpus_per_engine(config)


def _deal_evenly(first: int, total: int, num_nodes: int) -> list[tuple[int, ...]]:
    """Cut the numbers from `first` up to `total` into parts of equal sizes, give or take one."""
    count = total - first
    bounds = [first + count * node // num_nodes for node in range(num_nodes + 1)]
    return [tuple(range(start, end)) for start, end in pairwise(bounds)]
