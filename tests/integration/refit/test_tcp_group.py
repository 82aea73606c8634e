"""Transfer groups over TCP: who is let in, what is refused, and what is left when they end."""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, Store

from tandem.common.curve import new_key_pair
from tandem.common.errors import RefitError
from tandem.common.messages import Listener
from tandem.common.wire.peers import PeerConnections
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group, tcp_group
from tandem.refit.transports.meeting import GroupStore
from tandem.refit.transports.process_group import GroupKeys, GroupMessage
from tandem.refit.transports.tcp_group import TcpGroup
from tests.harness import rendezvous as meeting
from tests.harness.rendezvous import Rendezvous
from tests.harness.runs.running import Awake
from tests.harness.strangers import Tap, strangers

WAIT_S = 120.0
SHORT_S = 6.0
"""Deadline of those who are not let in."""
NUM_BYTES = 5 << 19
"""Of a message: two pieces and a half."""
GROUP = TransferGroup("m", ("rollout-0", "trainer-0"))
PAIRS = {name: new_key_pair() for name in GROUP.members}
PUBLIC = {name: pair.public for name, pair in PAIRS.items()}
ENGINE, TRAINER = 0, 1

rendezvous = meeting.rendezvous


def connect(
    member: str, there: Rendezvous, timeout_s: float = WAIT_S, keys: GroupKeys | None = None, prefix: str = "ours"
) -> TcpGroup:
    """Connect by a connection to the store of its own, which threads cannot share."""
    met = GroupStore("127.0.0.1", there.port, prefix, keys or GroupKeys(PAIRS[member], PUBLIC))
    group = met.connect(GROUP, member, torch.device("cpu"), timeout_s)
    assert isinstance(group, TcpGroup)
    return group


@contextmanager
def connected(rendezvous: Rendezvous, prefix: str = "ours") -> Iterator[tuple[TcpGroup, TcpGroup]]:
    """Yield the ends of an engine and of a trainer."""
    with ThreadPoolExecutor() as threads:
        engine, trainer = threads.map(lambda member: connect(member, rendezvous, prefix=prefix), GROUP.members)
    try:
        yield engine, trainer
    finally:
        engine.close()
        trainer.close()


def stored(there: Rendezvous, prefix: str = "ours") -> Store:
    return GroupStore("127.0.0.1", there.port, prefix).store(WAIT_S)


def place(store: Store) -> tuple[str, str]:
    """Return the address and the token of the trainer."""
    address, token = PrefixStore("m", store).get(f"{TRAINER} listens at").decode().split()
    return address, token


def message(peer: int, fill: int = 0, tag: int = 7, *, is_send: bool) -> GroupMessage:
    return GroupMessage(torch.full((NUM_BYTES,), fill, dtype=torch.uint8), peer, tag, is_send)


def started(group: TcpGroup, *messages: GroupMessage) -> list[Any]:
    works: list[Any] = []
    assert group.start(messages, works) == ""
    return works


def send(trainer: TcpGroup, engine: TcpGroup, fill: int) -> tuple[str, str]:
    """Send a message; return why it failed at each end, or empty strings."""
    wanted = message(TRAINER, is_send=False)
    works = [*started(engine, wanted), *started(trainer, message(ENGINE, fill, is_send=True))]
    deadline = time.monotonic() + WAIT_S
    with ThreadPoolExecutor() as threads:
        ends = threads.map(lambda group, work: group.wait(work, deadline), (engine, trainer), works)
        engine_says, trainer_says = ends
    if not engine_says:
        assert bool((wanted.bytes_ == fill).all())
    return engine_says, trainer_says


def test_strangers_are_not_let_in_and_members_are_not_disturbed(rendezvous: Rendezvous) -> None:
    with connected(rendezvous) as (engine, trainer):
        address, token = place(stored(rendezvous))
        with strangers(Listener(address=address, public_key=PUBLIC["trainer-0"])) as each:
            for fill in (1, 2):
                for stranger in each.values():
                    stranger.say([b"hello", token.encode(), str(ENGINE).encode()])
                assert send(trainer, engine, fill) == ("", "")
            assert [stranger.heard() for stranger in each.values()] == [[] for _ in each]


def test_a_process_whose_key_is_not_the_groups_is_refused_and_missed(rendezvous: Rendezvous) -> None:
    other = GroupKeys(new_key_pair(), PUBLIC)
    with ThreadPoolExecutor() as threads:
        trainer = threads.submit(connect, "trainer-0", rendezvous, SHORT_S)
        with pytest.raises(RefitError, match=r"rollout-0 could not .*: trainer-0 does not accept the key of this"):
            connect("rollout-0", rendezvous, keys=other)
        with pytest.raises(RefitError, match=r"trainer-0 could not .* before rollout-0 had proven a key of the group"):
            trainer.result()


def test_a_listener_without_the_trainers_key_is_not_believed(rendezvous: Rendezvous) -> None:
    public = {**PUBLIC, "trainer-0": new_key_pair().public}
    with ThreadPoolExecutor() as threads:
        trainer = threads.submit(connect, "trainer-0", rendezvous, SHORT_S)
        with pytest.raises(RefitError, match=r"rollout-0 could not .* before trainer-0 had proven a key of the group"):
            connect("rollout-0", rendezvous, SHORT_S, GroupKeys(PAIRS["rollout-0"], public))
        with pytest.raises(RefitError, match="rollout-0"):
            trainer.result()


def test_a_process_of_which_the_coordinator_knows_no_key_is_named(rendezvous: Rendezvous) -> None:
    keys = GroupKeys(PAIRS["rollout-0"], {"rollout-0": PUBLIC["rollout-0"]})
    with pytest.raises(RefitError, match=r"rollout-0 could not .*: the coordinator knows no key of trainer-0"):
        connect("rollout-0", rendezvous, keys=keys)


@pytest.mark.parametrize("written", ["ipc:///tmp/elsewhere x", "tcp://nowhere", "", "\udcff"])
def test_an_address_that_is_none_is_refused(written: str, rendezvous: Rendezvous) -> None:
    store = stored(rendezvous)
    process_group.announce(GROUP, "trainer-0", store)
    PrefixStore("m", store).set(f"{TRAINER} listens at", os.fsencode(written))
    with pytest.raises(RefitError, match="rollout-0 could not connect transfer group 'm' over TCP"):
        connect("rollout-0", rendezvous, SHORT_S)


def piece(tag: int = 7, size: int = NUM_BYTES, offset: int = 0, length: int = 1 << 20, kind: int = 1) -> list[bytes]:
    return [tcp_group._HEADER.pack(kind, tag, size, offset), bytes(length)]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (piece(length=1000), "1000 bytes at 0 of a message of 2621440, where 1048576 at 0 of 2621440 were to come"),
        (piece(size=1 << 20), "1048576 bytes at 0 of a message of 1048576, where"),
        (piece(offset=1 << 20), "1048576 bytes at 1048576 of a message of 2621440, where"),
        (piece(length=0), "0 bytes at 0"),
        (piece(kind=9), r"what is no message of a stream \(kind 9, 2 frames\)"),
        (piece()[:1], r"what is no message of a stream \(kind 1, 1 frames\)"),
        (piece(kind=2)[:1], r"what is no message of a stream \(kind 2, 1 frames\)"),
        ([*piece(), b""], r"what is no message of a stream \(kind 1, 3 frames\)"),
        ([b"short", b"x"], "a header of 5 bytes"),
    ],
)
def test_what_a_faulty_process_sends_is_refused(frames: Sequence[bytes], why: str, rendezvous: Rendezvous) -> None:
    with connected(rendezvous) as (engine, trainer):
        wanted = message(TRAINER, 3, is_send=False)
        (work,) = started(engine, wanted)
        trainer._peers.send(ENGINE, list(frames))
        failure = why_failed(engine, work)
        assert failure.startswith("the connection was lost (trainer-0 sent ")
        assert re.search(why, failure)
        assert bool((wanted.bytes_ == 3).all())


def why_failed(group: TcpGroup, work: Any) -> str:
    return group.wait(work, time.monotonic() + WAIT_S)


def test_more_than_was_asked_for_is_refused(rendezvous: Rendezvous) -> None:
    with connected(rendezvous) as (engine, trainer):
        (work,) = started(engine, message(TRAINER, is_send=False))
        for _ in range(70):
            trainer._peers.send(ENGINE, [*piece(tag=8)])
        assert "trainer-0 sent more than 64 MiB that were not asked for" in why_failed(engine, work)


def test_a_frame_that_is_too_large_ends_the_connection(rendezvous: Rendezvous) -> None:
    with connected(rendezvous) as (engine, trainer):
        (work,) = started(engine, message(TRAINER, is_send=False))
        trainer._peers.send(ENGINE, [*piece(length=2 << 20)])
        assert "trainer-0 has closed its connection" in why_failed(engine, work)


def test_nothing_is_readable_on_the_wire_and_a_flipped_bit_ends_the_connection(rendezvous: Rendezvous) -> None:
    """The engine reaches the trainer through somebody who listens, and then flips a bit."""
    ours, theirs = stored(rendezvous), stored(rendezvous, "theirs")
    process_group.announce(GROUP, "rollout-0", theirs)
    process_group.announce(GROUP, "trainer-0", ours)
    with ThreadPoolExecutor() as threads:
        listens = threads.submit(connect, "trainer-0", rendezvous, prefix="theirs")
        address, token = place(theirs)
        tap = Tap(int(address.rpartition(":")[2]))
        PrefixStore("m", ours).set(f"{TRAINER} listens at", f"{tap.address} {token}")
        engine, trainer = connect("rollout-0", rendezvous), listens.result()
    assert send(trainer, engine, 65) == ("", "")
    assert len(tap.bytes_) > NUM_BYTES
    assert b"A" * 16 not in tap.bytes_

    tap.change = lambda came: bytes([*came[:-1], came[-1] ^ 1])
    awake = Awake()
    says = send(trainer, engine, 66)
    assert awake.seconds() < 12
    assert all("has closed its connection" in each for each in says), says
    for group in (engine, trainer):
        group.close()
    tap.close()


def test_nothing_is_left_of_a_group(rendezvous: Rendezvous) -> None:
    """Of none that ends, fails, or is never connected; libzmq's wrapper keeps some descriptors from its first use."""
    counts = []
    for number in range(3):
        with connected(rendezvous, f"attempt {number}") as (engine, trainer):
            address, _ = place(stored(rendezvous, f"attempt {number}"))
            assert send(trainer, engine, 1) == ("", "")
            started(trainer, message(ENGINE, is_send=True))  # which nobody asks for
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=WAIT_S)
        assert engine.start([message(TRAINER, is_send=True)], []) == (
            "transfer group 'm' was closed before: it was closed"
        )
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


def test_what_was_sent_before_its_sender_left_is_received(rendezvous: Rendezvous) -> None:
    with connected(rendezvous) as (engine, trainer):
        wanted = message(TRAINER, is_send=False)
        works = [*started(engine, wanted), *started(trainer, message(ENGINE, 5, is_send=True))]
        assert why_failed(engine, works[0]) == ""
        engine.close()  # the trainer has not looked yet
        assert why_failed(trainer, works[1]) == ""
        late = started(trainer, message(ENGINE, is_send=True))
        assert "rollout-0 has closed its connection" in why_failed(trainer, late[0])


def test_a_group_over_ipv6(rendezvous: Rendezvous) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    pairs = [new_key_pair() for _ in range(2)]
    publics = [pair.public for pair in pairs]
    try:
        ends = [PeerConnections(rank, ("a", "b"), publics, pairs[rank], "::1", max_bytes=1000) for rank in range(2)]
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    deadline = time.monotonic() + WAIT_S
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda end, places: end.join(places, deadline), ends, ({1: ends[1].at}, {})))
    ends[0].send(1, [b"word"])
    came: list[tuple[int, list[memoryview]]] = []
    while not came and time.monotonic() < deadline:
        came += ends[1].receive(0.1)
    assert [(rank, [bytes(frame) for frame in frames]) for rank, frames in came] == [(0, [b"word"])]
    for end in ends:
        end.close()
