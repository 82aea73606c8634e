"""What counts as two hosts here: network namespaces with a cable between them, or another host name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.integration import damaged_rollout
from tests.integration.harness import BIN, Command, joins, merged, write_config

ADDRESSES = {"trainers": "10.98.76.1", "engines": "10.98.76.2"}
_ETHERNET = {"trainers": "02:00:00:00:00:01", "engines": "02:00:00:00:00:02"}
ELSEWHERE = "another-host"
NUM_STEPS = 12
CONFIG: dict[str, Any] = {
    # The death of an engine that was started by hand is noticed by its silence; what it leaves stuck, by the deadline.
    "cluster": {"heartbeat_timeout_s": 6.0, "deadlines": {"refit_s": 20.0}},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": NUM_STEPS},
}


TWO_NODES: dict[str, Any] = {
    "cluster": {"num_nodes": 2, "gpus_per_node": 0, "launch": {"trainers": 1, "rollouts": 1, "refit": True}}
}
"""The second of two nodes has a trainer and an engine, which its own process launches."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def cut(namespaces: Mapping[str, str]) -> Iterator[None]:
    """Have the cable between the hosts swallow every packet, both ways: nobody is told, and connections stay open."""
    for name in namespaces.values():
        _tc(name, "replace", "pfifo", "limit", "0")  # a queue for no packets
    try:
        yield
    finally:
        for name in namespaces.values():
            _tc(name, "del")


def _tc(namespace: str, *words: str) -> None:
    command = ["tc", "-n", namespace, "qdisc", words[0], "dev", "cable", "root", *words[1:]]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def on(namespaces: Mapping[str, str], host: str) -> tuple[str, ...]:
    """Return the words before a command that run it on a host."""
    return (shutil.which("ip") or "ip", "netns", "exec", namespaces[host])


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Return the namespace of each host."""
    made = {host: f"tandem-{host}-{os.getpid()}" for host in ADDRESSES}
    cable = {host: f"tdm{host[0]}{os.getpid()}" for host in ADDRESSES}
    with contextlib.ExitStack() as stack:
        try:
            for name in made.values():
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", cable["trainers"], "type", "veth", "peer", "name", cable["engines"])
            for host, name in made.items():
                ip("link", "set", cable[host], "netns", name)
                ip("-n", name, "link", "set", cable[host], "name", "cable", "address", _ETHERNET[host])
                ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
                # Hosts that had to ask for each other's again would hear of each other late once a cut is mended.
                for other in ADDRESSES.keys() - {host}:
                    known = (ADDRESSES[other], "lladdr", _ETHERNET[other], "nud", "permanent")
                    ip("-n", name, "neigh", "replace", *known, "dev", "cable")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)!r}")
        yield made


@pytest.fixture(scope="module")
def other_host() -> tuple[str, ...]:
    """Return the words before a command that run it under another host name."""
    unshare = shutil.which("unshare") or "unshare"
    for privileges in ((), ("--user", "--map-root-user")):
        words = (unshare, *privileges, "--uts", "sh", "-c", f'hostname {ELSEWHERE} && exec "$@"', "sh")
        with contextlib.suppress(OSError):
            if not subprocess.run([*words, "true"], capture_output=True, timeout=20, check=False).returncode:
                return words
    pytest.skip("UTS namespaces cannot be made here")


def command(before: tuple[str, ...], name: str) -> list[str]:
    """Return the words that start a console command behind others, which start a program and not a name."""
    return [*before, str(BIN / name)] if before else [name]


@contextlib.contextmanager
def on_two_hosts(
    over: dict[str, Any], elsewhere: tuple[str, ...], here: tuple[str, ...] = (), damages: Sequence[str] = ()
) -> Iterator[tuple[Command, list[Command], list[str]]]:
    """Start a run, and its engines behind the words of `elsewhere`; return both, and how to start another engine.

    `damages` are what happens to each engine; see `tests.integration.damaged_rollout`.
    """
    config = merged(CONFIG, over)
    trainers, engines = (config.get("cluster", {}).get(kind, 1) for kind in ("trainers", "rollouts"))
    config = merged(config, {"cluster": {"launch": {"trainers": trainers, "refit": True}}})
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Command(*command(here, "coordinator"), "up", write_config(config)))
        address = joins(run.wait_for(r"listens on (tcp://\S+)")[1])
        words = [*command(elsewhere, "rollout"), *address]
        harmed = [[*elsewhere, sys.executable, damaged_rollout.__file__, each, *address] for each in damages]
        starts = [*harmed, *[words] * (engines - len(harmed))]
        yield run, [stack.enter_context(Command(*start)) for start in starts], words
