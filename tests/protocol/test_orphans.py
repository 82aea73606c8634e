"""Members whose coordinator is lost wait for another one, and are known again by their keys."""

from __future__ import annotations

import collections
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.common.curve import new_key_pair
from tandem.common.errors import ConfigError, NotAdmitted
from tandem.common.keys import AdmittedProcesses, read_admitted, write_run_keys
from tandem.common.messages import (
    PROTOCOL_VERSION,
    CommitVersion,
    Hello,
    ServiceKind,
    Shutdown,
    ToRefit,
    ToRollout,
    ToTrainer,
    VersionCommitted,
)
from tandem.common.wire import EXIT_AWAITED_ANEW, Link, encode, exit_code
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler.events import Event, ProcessJoined, ProcessReplied
from tandem.launch.admission import HeartbeatSettings, ListeningSocket
from tandem.launch.known_processes import KnownProcesses, ProcessesSnapshot
from tests.harness.members import ANY_ADDRESS, RUN, dealer_to

JOINING = RUN.for_processes()
UNIONS: dict[str, Any] = {"refit": ToRefit, "trainer": ToTrainer, "rollout": ToRollout}
EXPECTED: dict[ServiceKind, int] = {"refit": 1, "trainer": 1, "rollout": 2}
WAIT_S = 120.0
BEFORE, AFTER = 7, (1 << 32) + 1
"""Ids of commands of one coordinator and of the next."""


class Coordinator:
    """A coordinator's socket and its members; the next one of the run if `earlier` are there."""

    def __init__(self, run: Path, earlier: ProcessesSnapshot | None = None, patience_s: float = 60.0) -> None:
        known = () if earlier is None else earlier.keys
        self._heard: collections.deque[Event] = collections.deque()
        self.listening = ListeningSocket(earlier.address if earlier else ANY_ADDRESS, RUN, Path("members.json"), known)
        self.known = KnownProcesses(run, self.listening.hub.address, is_kept=True, earlier=earlier)
        heartbeat = HeartbeatSettings(interval_s=0.1, timeout_s=patience_s, orphan_timeout_s=WAIT_S)
        replies = Replies(SampleLimits(vocabulary=50, max_tokens=12, max_turns=2), AFTER - 1 if earlier else 0)
        self.registry = ProcessRegistry(
            self.listening, EXPECTED, b"{}", "run", heartbeat, replies, known_processes=self.known
        )
        if earlier is not None:
            self.registry.names.send_away(earlier.leaving)
            self.registry.names.expect_back(earlier.staying, ())
        assert self.registry.begin_attempt() == []

    def events(self, until: Callable[[Event], bool]) -> list[Event]:
        """Return what happens up to something."""
        found: list[Event] = []
        deadline = time.monotonic() + WAIT_S
        while not (found and until(found[-1])):
            assert time.monotonic() < deadline, found
            if self._heard:  # several may come at once
                found.append(self._heard.popleft())
            else:
                self._heard.extend(self.registry.receive(0.05))
        return found

    def joined(self, *names: str) -> None:
        """Wait until these have joined."""
        missing = {*names}
        while missing:
            missing -= {event.process for event in self.events(lambda event: isinstance(event, ProcessJoined))}  # type: ignore[union-attr]

    def join(self, kind: ServiceKind) -> Link[Any]:
        """Join a process that is started by hand."""
        link: Link[Any] = Link(self.registry.address, kind, f"{kind}-{time.monotonic_ns()}", UNIONS[kind], JOINING)
        hello = Hello(protocol_version=PROTOCOL_VERSION, service=kind, host="here", pid=1)
        thread = threading.Thread(target=link.join, args=(hello, WAIT_S))
        thread.start()
        # Others may be taken up meanwhile.
        self.events(lambda event: isinstance(event, ProcessJoined) and event.process.startswith(kind))
        thread.join(WAIT_S)
        return link

    def command(self, name: str, command_id: int) -> None:
        """Ask the refit service for something."""
        command = CommitVersion(command_id=command_id, deadline_s=9.0, version=3, digests={}, has_update=False)
        self.registry.command(name, command, encode(command))

    def die(self) -> None:
        """Be gone, as after kill -9: nobody is told."""
        self.listening.hub.close()


class Cluster:
    """Three members that were started by hand, and their coordinators."""

    def __init__(self, run: Path, sockets: ExitStack, stack: ExitStack) -> None:
        """`stack` closes links, before `sockets` closes what they are to."""
        write_run_keys(run, RUN)
        self.run = run
        self.stack = stack
        self._sockets = sockets
        self.first = self.begin()
        self.links = {f"{kind}-0": self.first.join(kind) for kind in EXPECTED}
        for link in self.links.values():
            stack.callback(link.close, "the test is over")

    def begin(self, earlier: ProcessesSnapshot | None = None, patience_s: float = 60.0) -> Coordinator:
        """Begin a coordinator."""
        coordinator = Coordinator(self.run, earlier, patience_s)
        self._sockets.callback(coordinator.die)
        return coordinator

    @property
    def earlier_trainer(self) -> str:
        """The key of the trainer that joined first."""
        return self.links["trainer-0"].own.public

    def earlier(self) -> ProcessesSnapshot:
        """Return those who are taken up, as the next coordinator finds them."""
        admitted = read_admitted(self.run)
        assert admitted is not None
        staying = {name: key for name, key in admitted.processes.items() if not name.startswith("trainer")}
        return ProcessesSnapshot(address=admitted.address, staying=staying, leaving=(admitted.processes["trainer-0"],))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as sockets, ExitStack() as stack:
        yield Cluster(tmp_path / "run", sockets, stack)


def test_members_are_taken_up_by_name_and_what_the_last_coordinator_asked_for_is_over(cluster: Cluster) -> None:
    first, refit = cluster.first, cluster.links["refit-0"]
    first.command("refit-0", BEFORE)
    asked = refit.receive(WAIT_S)
    assert asked is not None
    first.die()
    refit.send(encode(VersionCommitted(command_id=BEFORE, version=3, differing={}, digest=0)))
    second = cluster.begin(cluster.earlier())
    second.joined("refit-0", "rollout-0")
    assert second.registry.processes.keys() == {"refit-0", "rollout-0"}
    refit.send(encode(VersionCommitted(command_id=BEFORE, version=3, differing={}, digest=0)))
    second.command("refit-0", AFTER)
    command = refit.receive(WAIT_S)
    assert command is not None
    assert command.message.command_id == AFTER
    refit.send(encode(VersionCommitted(command_id=AFTER, version=3, differing={}, digest=0)))
    (*others, reply) = second.events(lambda event: isinstance(event, ProcessReplied))
    assert isinstance(reply, ProcessReplied)
    assert reply.reply.command_id == AFTER
    assert others == [], "nobody is lost, and no answer to the first coordinator counts"


def test_who_was_about_to_join_when_the_coordinator_was_lost_joins_the_next_one(cluster: Cluster) -> None:
    """The first one has heard of its key, and has not welcomed it."""
    first = cluster.first
    link: Link[Any] = Link(first.registry.address, "rollout", "late", ToRollout, JOINING)
    hello = Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="here", pid=1)
    thread = threading.Thread(target=link.join, args=(hello, WAIT_S))
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while link.own.public not in first.listening.admitted:
        assert time.monotonic() < deadline
        [*first.registry.receive(0.05)]
    earlier = cluster.earlier()
    first.die()
    second = cluster.begin(earlier)
    second.joined("refit-0", "rollout-0", "rollout-1")
    thread.join(WAIT_S)
    assert second.registry.processes["rollout-1"].peer.key == link.own.public
    link.close("the test is over")


def told_to_go(link: Link[Any]) -> Shutdown:
    """Return what a member is told, which then goes: else its link would end this process."""
    told = link.receive(WAIT_S)
    link.close("told to")
    assert told is not None
    assert isinstance(told.message, Shutdown)
    assert exit_code(told.message) == EXIT_AWAITED_ANEW
    return told.message


def test_a_trainer_of_before_is_told_to_go_and_makes_way_for_another(cluster: Cluster) -> None:
    cluster.first.die()
    second = cluster.begin(cluster.earlier())
    second.joined("refit-0", "rollout-0")
    while cluster.earlier_trainer in second.listening.admitted:
        [*second.registry.receive(0.05)]
    assert "another coordinator goes on" in told_to_go(cluster.links["trainer-0"]).reason
    trainer = second.join("trainer")
    cluster.stack.callback(trainer.close, "the test is over")
    second.command("refit-0", AFTER)  # with any command rollouts hear who may fetch samples now
    deadline = time.monotonic() + WAIT_S
    while cluster.links["rollout-0"].trainers.keys() != (trainer.own.public,):
        assert time.monotonic() < deadline
        [*second.registry.receive(0.05)]


def test_who_was_shut_out_before_has_no_place_with_the_next_one(cluster: Cluster) -> None:
    key = cluster.links["rollout-0"].own.public
    cluster.first.registry.dismiss("rollout-0", "it was silent")
    told_to_go(cluster.links["rollout-0"])
    cluster.first.die()
    earlier = cluster.earlier()
    assert key not in earlier.keys
    second = cluster.begin(earlier)
    second.joined("refit-0")
    assert second.registry.processes.keys() == {"refit-0"}


def test_a_member_that_nobody_knows_any_more_goes_by_itself(cluster: Cluster) -> None:
    earlier = cluster.earlier()
    cluster.first.die()
    cluster.begin(ProcessesSnapshot(address=earlier.address))
    for link in cluster.links.values():
        assert "does not accept the key of this process" in told_to_go(link).reason


def test_a_stranger_and_the_joining_key_get_nothing_of_a_member_that_is_expected(cluster: Cluster) -> None:
    address = cluster.first.registry.address
    cluster.first.die()
    earlier = cluster.earlier()
    cluster.links["rollout-0"].close("it is gone for good")
    second = cluster.begin(earlier)
    hello = encode(Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="h", pid=1, index=0))
    sockets = [dealer_to(address, own) for own in (new_key_pair(), RUN.joining)]
    for _, socket in sockets:
        socket.send_multipart(hello)
    second.joined("refit-0")
    assert second.registry.processes.keys() == {"refit-0"}
    assert not any(socket.poll(200) for _, socket in sockets)
    for context, socket in sockets:
        socket.close()
        context.term()


def test_whoever_does_not_come_back_loses_its_place(cluster: Cluster) -> None:
    cluster.first.die()
    earlier = cluster.earlier()
    cluster.links["rollout-0"].close("it is gone for good")
    second = cluster.begin(earlier, patience_s=0.5)
    second.joined("refit-0")
    deadline = time.monotonic() + WAIT_S
    while not (names := second.registry.not_back()):
        assert time.monotonic() < deadline
        [*second.registry.receive(0.05)]
    assert names == ["rollout-0"]
    assert earlier.staying["rollout-0"] not in second.listening.admitted
    assert second.registry.not_back() == []


def test_a_new_process_takes_the_place_of_one_that_is_only_expected(cluster: Cluster) -> None:
    cluster.first.die()
    earlier = cluster.earlier()
    cluster.links["refit-0"].close("it is gone for good")
    second = cluster.begin(earlier)
    link = second.join("refit")
    cluster.stack.callback(link.close, "the test is over")
    assert second.registry.processes["refit-0"].peer.key == link.own.public
    assert earlier.staying["refit-0"] not in second.listening.admitted
    assert read_admitted(cluster.run) == AdmittedProcesses(
        address=second.registry.address, processes=earlier.staying | {"refit-0": link.own.public}
    )


def test_the_place_of_a_launched_one_is_kept(cluster: Cluster) -> None:
    cluster.first.die()
    earlier = cluster.earlier()
    cluster.links["refit-0"].close("it only hangs")
    second = cluster.begin(ProcessesSnapshot(address=earlier.address))
    second.registry.names.expect_back({"refit-0": earlier.staying["refit-0"]}, ["refit-0"])
    link: Link[Any] = Link(second.registry.address, "refit", "another", ToRefit, JOINING)
    hello = Hello(protocol_version=PROTOCOL_VERSION, service="refit", host="here", pid=1)
    refused: list[NotAdmitted] = []

    def try_to_join() -> None:
        with pytest.raises(NotAdmitted) as caught:
            link.join(hello, WAIT_S)
        refused.append(caught.value)

    thread = threading.Thread(target=try_to_join)
    thread.start()
    while thread.is_alive():
        [*second.registry.receive(0.05)]
    assert "has its 1 refit process already" in str(refused[0])


def test_the_list_of_members_is_its_owners_alone_and_is_not_believed_otherwise(cluster: Cluster) -> None:
    path = cluster.run / "keys" / "admitted.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=r"admitted.json can be read or changed by others \(mode 0620\): chmod 600 "):
        read_admitted(cluster.run)
    path.chmod(0o600)
    cluster.first.known.end()
    assert read_admitted(cluster.run) is None
