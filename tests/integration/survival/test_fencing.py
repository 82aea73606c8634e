"""A switch between two hosts that swallows packets: whoever is silent for too long is lost, and cannot come back.

Each host is a network namespace. The run is on one of them; on the other are services that were started by hand. Of
those that are cut off some believe that the coordinator is gone, as they should, and end. Others go on as if nothing
had happened, and say what would end the run or change its results (`tests.harness.processes.lying_member`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import lying_member
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.hosts_harness import ADDRESSES, CONFIG, command, cut, on
from tests.harness.runs.running import Awake, Command, joins, merged, wait_until, write_config

hosts = hosts_harness.switched_hosts
other_host = hosts_harness.other_host

TIMEOUT_S = 8.0
"""Of heartbeats."""
COORDINATOR_LOST = 70
RUN: dict[str, Any] = merged(
    CONFIG,
    {
        "cluster": {
            "address": f"tcp://{ADDRESSES['trainers']}:*",
            "trainers": 2,
            "rollouts": 2,
            "heartbeat_timeout_s": TIMEOUT_S,
            "max_replacements": 9,
        },
        "grpo": {"max_num_steps": 20, "val_period": 20},
        "checkpointing": {"save_period": 4},
    },
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(
        tmp_path_factory.mktemp("undisturbed"), merged(RUN, {"cluster": {"address": "tcp://127.0.0.1:*"}})
    )


class Cluster:
    """A run on one host, and how to start services on the other."""

    def __init__(self, run: Command, there: tuple[str, ...], stack: contextlib.ExitStack) -> None:
        self.run = run
        self._there = there
        self._stack = stack
        self._joins = joins(run.wait_for(r"listens on (tcp://\S+)")[1])

    def start(self, kind: str) -> Command:
        """Start a service of the other host, and wait until it is a member."""
        return self._start(*command(self._there, kind))

    def start_liar(self, kind: str) -> Command:
        """Start one that does not hear what it is told."""
        return self._start(*self._there, sys.executable, lying_member.__file__, kind)

    def _start(self, *words: str) -> Command:
        started = self._stack.enter_context(Command(*words, *self._joins))
        wait_until(
            lambda: "joined" in started.output(),
            lambda: f"it could join:\n{started.output()}\n{self.run.output()}",
            died=lambda: started.process.poll() is not None or self.run.process.poll() is not None,
        )
        return started


@contextlib.contextmanager
def cluster_of(hosts: dict[str, str], other_host: tuple[str, ...], launch: dict[str, Any]) -> Iterator[Cluster]:
    config = write_config(merged(RUN, {"cluster": {"launch": launch}}))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Command(*command(on(hosts, "trainers"), "coordinator"), "up", config))
        yield Cluster(run, (*on(hosts, "engines"), *other_host), stack)


def ends_by_itself(service: Command, since_cut: Awake) -> None:
    """Check that a service that is cut off ends, and within its deadline; waking up may take it a while."""
    assert service.wait() == COORDINATOR_LOST, service.output()
    assert since_cut.seconds() < 3 * TIMEOUT_S + 5.0
    assert "ending: the coordinator was silent for" in service.output()


def assert_lies_are_for_nothing(liar: Command, run: Command) -> None:
    """Check that a fenced process is still there, has said all that it could since, and has changed nothing."""
    assert "has lied 10 times" in liar.output()
    assert liar.process.poll() is None, liar.output()
    assert "it is a lie" not in run.output()
    assert liar.output().count("joined") == 1


def test_engines_that_are_cut_off_are_fenced(
    hosts: dict[str, str], other_host: tuple[str, ...], undisturbed: Path
) -> None:
    """A short cut changes nothing; in a long one both are lost."""
    for step in (2, 4):
        hold(16 * step + 1)
    with cluster_of(hosts, other_host, {"trainers": 2, "refit": True}) as cluster:
        run, engine, liar = cluster.run, cluster.start("rollout"), cluster.start_liar("rollout")
        await_hold(run, r"step +2/")
        with cut(hosts):
            go_on()
            time.sleep(TIMEOUT_S / 4)
        await_hold(run, r"step +4/")
        assert "is lost" not in run.output()
        with cut(hosts):
            since_cut = Awake()
            go_on()
            for name in ("rollout-0", "rollout-1"):
                run.wait_for(rf"{name} is lost: no heartbeat for \d+ s.*; start another: rollout --coordinator")
            lying_member.LIES.touch()
            ends_by_itself(engine, since_cut)
        liar.wait_for("was told to go")  # so what it says arrives, too
        others = [cluster.start("rollout") for _ in range(2)]
        assert run.wait() == 0, run.output()
        assert_lies_are_for_nothing(liar, run)
        assert [other.wait() for other in others] == [0, 0]
    assert_same_results("run", undisturbed)


def test_a_trainer_and_a_refit_service_that_are_cut_off_are_fenced(
    hosts: dict[str, str], other_host: tuple[str, ...], undisturbed: Path
) -> None:
    hold(at=5 * 16 + 1)
    with cluster_of(hosts, other_host, {"trainers": 1, "rollouts": 2}) as cluster:
        run, liar, refit = cluster.run, cluster.start_liar("trainer"), cluster.start("refit")
        await_hold(run, r"step +5/")
        with cut(hosts):
            since_cut = Awake()
            go_on()
            run.wait_for(r"trainer-1 is lost: no heartbeat for \d+ s.*; all trainers are started again")
            lying_member.LIES.touch()
            ends_by_itself(refit, since_cut)
        liar.wait_for("was told to go")  # so what it says arrives, too
        others = [cluster.start(kind) for kind in ("trainer", "refit")]
        assert run.wait() == 0, run.output()
        assert_lies_are_for_nothing(liar, run)
        assert [other.wait() for other in others] == [0, 0]
    assert_same_results("run", undisturbed)
