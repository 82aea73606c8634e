"""What counts as two hosts here: network namespaces with a cable between them, or another host name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import damaged_rollout
from tests.harness.runs.running import BIN, Command, joins, merged, write_config

ROOT = Path(__file__).parents[3]
ADDRESSES = {"trainers": "10.98.76.1", "engines": "10.98.76.2", "store": "10.98.76.3"}
ELSEWHERE = "another-host"
NUM_STEPS = 12
CONFIG: dict[str, Any] = {
    # The death of an engine that was started by hand is noticed by its silence; what it leaves stuck, by the deadline.
    "cluster": {"heartbeat_timeout_s": 12.0, "deadlines": {"refit_s": 20.0}},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": NUM_STEPS},
}


TWO_NODES: dict[str, Any] = {
    "cluster": {"num_nodes": 2, "gpus_per_node": 0, "launch": {"trainers": 1, "rollouts": 1, "refit": True}}
}
"""The second of two nodes has a trainer and an engine, which its own process launches."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=120)


def on(namespaces: Mapping[str, str], host: str) -> tuple[str, ...]:
    """Return the words before a command that run it on a host."""
    return (shutil.which("ip") or "ip", "netns", "exec", namespaces[host])


@contextlib.contextmanager
def _namespaces(*names: str) -> Iterator[dict[str, str]]:
    """Make a network namespace for each of these; yield what they are called."""
    made = {name: f"tandem-{name}-{os.getpid()}" for name in names}
    with contextlib.ExitStack() as stack:
        for namespace in made.values():
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        yield made


def _lay_cable(ends: Mapping[str, str]) -> None:
    """Connect two namespaces; each calls its end as it is said here."""
    cable = [f"tdm{place}-{os.getpid()}" for place in range(2)]
    ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
    for end, (namespace, name) in zip(cable, ends.items(), strict=True):
        ip("link", "set", end, "netns", namespace)
        ip("-n", namespace, "link", "set", end, "name", name)
        ip("-n", namespace, "link", "set", name, "up")


def _give_addresses(namespaces: Mapping[str, str]) -> None:
    for host in namespaces.keys() & ADDRESSES.keys():
        ip("-n", namespaces[host], "addr", "add", f"{ADDRESSES[host]}/24", "dev", "cable")


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Return the namespace of each host."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(_namespaces("trainers", "engines"))
            _lay_cable(dict.fromkeys(made.values(), "cable"))
            _give_addresses(made)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)!r}")
        yield made


@pytest.fixture
def switched_hosts() -> Iterator[dict[str, str]]:
    """Return the namespace of each host, and that of the switch between them."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(_namespaces(*ADDRESSES, "switch"))
            ip("-n", made["switch"], "link", "add", "name", "bridge", "type", "bridge")
            for host in ADDRESSES:
                _lay_cable({made[host]: "cable", made["switch"]: host})
                ip("-n", made["switch"], "link", "set", host, "master", "bridge")
            ip("-n", made["switch"], "link", "set", "bridge", "up")
            _give_addresses(made)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a switch between network namespaces cannot be made here: {getattr(error, 'stderr', error)!r}")
        yield made


@contextlib.contextmanager
def cut(hosts: Mapping[str, str]) -> Iterator[None]:
    """Have the switch swallow every packet, both ways: no host is told, and connections stay open."""
    ip("-n", hosts["switch"], "link", "set", "bridge", "down")
    try:
        yield
    finally:
        ip("-n", hosts["switch"], "link", "set", "bridge", "up")


@pytest.fixture(scope="module")
def other_host() -> tuple[str, ...]:
    """Return the words before a command that run it under another host name."""
    unshare = shutil.which("unshare") or "unshare"
    for privileges in ((), ("--user", "--map-root-user")):
        words = (unshare, *privileges, "--uts", "sh", "-c", f'hostname {ELSEWHERE} && exec "$@"', "sh")
        with contextlib.suppress(OSError):
            if not subprocess.run([*words, "true"], capture_output=True, timeout=120, check=False).returncode:
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

    `damages` are what happens to each engine; see `tests.harness.processes.damaged_rollout`.
    """
    config = merged(CONFIG, over)
    trainers, engines = (config.get("cluster", {}).get(kind, 1) for kind in ("trainers", "rollouts"))
    config = merged(config, {"cluster": {"launch": {"trainers": trainers, "refit": True}}})
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Command(*command(here, "coordinator"), "up", write_config(config)))
        address = joins(run.wait_for(r"listens on (tcp://\S+)")[1])
        words = [*command(elsewhere, "rollout"), *address]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        python = ["env", f"PYTHONPATH={path}", sys.executable, "-m"]
        harmed = [[*elsewhere, *python, damaged_rollout.__name__, each, *address] for each in damages]
        starts = [*harmed, *[words] * (engines - len(harmed))]
        yield run, [stack.enter_context(Command(*start)) for start in starts], words
