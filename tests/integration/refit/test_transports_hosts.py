"""Two network namespaces with a virtual cable between them stand for two hosts."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan, plan
from tests.harness.processes.stream_processes import Remote, fsdp, give_keys, planned, remotes, save, tensor_parallel
from tests.harness.runs import hosts_harness
from tests.harness.runs.hosts_harness import ADDRESSES, ip
from tests.harness.runs.running import Awake

hosts = hosts_harness.hosts

SHAPES = {"embed": (2000, 1500), "down": (1000, 3000), "norm": (1500,)}
PORT = 29555
"""Of the store, inside a namespace that nobody else is in."""


@contextlib.contextmanager
def scene(
    folder: Path, hosts: dict[str, str], sources: dict[str, Layout], engines: dict[str, Layout]
) -> Iterator[tuple[dict[str, Remote], TransferPlan]]:
    """Yield all members, started on their hosts and connected, and the plan."""
    made = plan(sources, engines, allow_alias=False)
    save(folder, made, {**sources, **engines})
    at = {host: hosts_harness.on(hosts, host) for host in hosts}
    with remotes(folder, [*sources], at["trainers"]) as there, remotes(folder, [*engines], at["engines"]) as here:
        members = {**there, **here}
        members["trainer-0"].ask("host", host=ADDRESSES["trainers"], port=PORT)
        for member in members.values():
            member.tell("connect", host=ADDRESSES["trainers"], port=PORT)
        assert [member.reply() for member in members.values()] == [{} for _ in members]
        yield members, made


def run(members: dict[str, Remote], made: TransferPlan, version: int) -> None:
    for name, member in members.items():
        if name.startswith("trainer"):
            member.ask("write", version=version)
    for member in members.values():
        member.tell("run", deadline_s=120.0)
    for name, member in members.items():
        assert member.reply()["counted"] == planned(made, name)
    for name, member in members.items():
        if name.startswith("rollout"):
            assert member.ask("differing", version=version, source_dtype="float32") == {"differing": []}


def carried(namespace: str) -> int:
    """Return the bytes that came out of the cable at one end."""
    command = ["ip", "netns", "exec", namespace, "cat", "/sys/class/net/cable/statistics/rx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def test_replicas_on_another_host_get_each_byte_over_the_cable_once(hosts: dict[str, str], tmp_path: Path) -> None:
    sources = {f"trainer-{rank}": fsdp(rank, 2, SHAPES) for rank in range(2)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, SHAPES, "bfloat16") for rank in range(2)}
    with scene(tmp_path, hosts, sources, engines) as (members, made):
        run(members, made, 1)
        before = carried(hosts["engines"])
        run(members, made, 2)
        crossed = carried(hosts["engines"]) - before
    payload = sum(link.num_bytes for link in made.links if link.source.startswith("trainer"))
    assert payload == sum(storage.num_bytes for storage in engines["rollout-0"].storages)
    assert payload <= crossed < 1.05 * payload, "headers, and no second copy"


def test_a_host_that_is_cut_off_is_named_when_the_deadline_passes(hosts: dict[str, str], tmp_path: Path) -> None:
    sources = {"trainer-0": fsdp(0, 1, SHAPES)}
    engines = {"rollout-0": tensor_parallel(0, 1, SHAPES)}
    with scene(tmp_path, hosts, sources, engines) as (members, made):
        run(members, made, 1)
        ip("-n", hosts["engines"], "link", "set", "cable", "down")
        started, awake = time.monotonic(), Awake()
        for member in members.values():
            member.tell("run", deadline_s=2.0)
        told = {name: member.reply()["error"] for name, member in members.items()}
        assert time.monotonic() - started > 1.5
        assert awake.seconds() < 30
        assert "trainer-0 failed while sending" in told["trainer-0"]
        assert "to rollout-0" in told["trainer-0"]
        assert "rollout-0 failed while receiving" in told["rollout-0"]
        assert "from trainer-0" in told["rollout-0"]
        assert all(error.endswith("the deadline passed") for error in told.values())


def test_a_host_that_is_cut_off_is_noticed_long_before_the_deadline_over_tcp(
    hosts: dict[str, str], tmp_path: Path
) -> None:
    give_keys(tmp_path)
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES)}
    with scene(tmp_path, hosts, sources, engines) as (members, made):
        run(members, made, 1)
        ip("-n", hosts["engines"], "link", "set", "cable", "down")
        awake = Awake()
        for member in members.values():
            member.tell("run", deadline_s=200.0)
        told = {name: member.reply()["error"] for name, member in members.items()}
        assert awake.seconds() < 60
        assert "rollout-0 has closed its connection" in told["trainer-0"]
        assert "trainer-0 has closed its connection" in told["rollout-0"]
