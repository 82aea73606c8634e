"""Connections that prove nothing: a process has few of them at a time, and its own connections come through."""

from __future__ import annotations

import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from tandem.common import curve
from tandem.common.keys import KeyPair
from tests.harness.descriptors import limited

LIMIT = 128
"""Descriptors of the process that listens."""
MOST_UNPROVEN = 16
"""Connections of an address that have proven nothing, as many as that process may have: an eighth of the limit."""
NUM = 300
AT_ONCE = 30
"""So many are made before the process is asked: more than it has room for would test how busy the machine is."""
WAIT_S = 120

LISTENING = textwrap.dedent(
    """
    import os, sys
    from tandem.common.curve import AdmittedKeys
    from tandem.common.keys import KeyPair
    from tandem.common.wire import Hub
    hub = Hub("tcp://127.0.0.1:0", KeyPair(sys.argv[1], sys.argv[2]), AdmittedKeys([sys.argv[3]]))
    print(hub.address, flush=True)
    while True:
        for peer, frames in hub.receive(1.0):
            os.close(os.open("/dev/null", os.O_RDONLY))  # as the journal does
            hub.send(peer, [str(len(os.listdir("/proc/self/fd"))).encode()])
    """
)


@contextmanager
def listening(own: KeyPair, admitted: str) -> Iterator[str]:
    words = limited(LIMIT, LISTENING, own.public, own.secret, admitted)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def asked(context: zmq.Context[zmq.Socket[bytes]], address: str, own: KeyPair, server: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    curve.prove(dealer, own, server)
    dealer.connect(address)
    return dealer


def answer(dealer: zmq.Socket[bytes]) -> int:
    dealer.send(b"how many?")
    assert dealer.poll(WAIT_S * 1000), "no answer"
    return int(dealer.recv())


def num_open(held: list[socket.socket]) -> int:
    """Return how many of these non-blocking connections the process has not closed, or not yet accepted."""
    num = 0
    for each in held:
        try:
            while each.recv(4096):
                pass
        except BlockingIOError:
            num += 1
        except ConnectionResetError:
            pass
    return num


def await_room(dealer: zmq.Socket[bytes], held: list[socket.socket]) -> None:
    """Wait until the process has cut off what it will not hold."""
    deadline = time.monotonic() + WAIT_S
    while num_open(held) > MOST_UNPROVEN or answer(dealer) >= LIMIT // 2:
        assert time.monotonic() < deadline, "it holds too many"


@pytest.mark.parametrize("said", [b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"])
def test_idle_connections_do_not_take_all_descriptors_and_members_come_through(said: bytes) -> None:
    own, member = curve.new_key_pair(), curve.new_key_pair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    held: list[socket.socket] = []
    with listening(own, member.public) as address:
        host, _, port = address.removeprefix("tcp://").partition(":")
        early = asked(context, address, member, own.public)
        answer(early)
        try:
            for number in range(NUM):
                if number % AT_ONCE == 0:
                    await_room(early, held)
                held.append(socket.create_connection((host, int(port)), timeout=WAIT_S))
                held[-1].sendall(said)
                held[-1].setblocking(False)
            late = asked(context, address, member, own.public)
            for dealer in (early, late):
                await_room(dealer, held)
            held[0].settimeout(WAIT_S)
            with _anything():
                while held[0].recv(1024):
                    pass
        finally:
            for each in held:
                each.close()
            context.destroy(linger=0)


@contextmanager
def _anything() -> Iterator[None]:
    """Let a connection end in either way."""
    try:
        yield
    except ConnectionResetError:
        return
