"""Keys of a run that there is in tests alone, and sockets that prove them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from tandem.common import curve
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.keys import KeyPair, ProcessKeys, RunKeys
from tandem.common.messages import Listener, ServiceKind
from tandem.common.wire import Hub, Link
from tandem.launch.admission import ListeningSocket

RUN = RunKeys(coordinator=new_key_pair(), joining=new_key_pair())
MEMBER = new_key_pair()
"""The key pair of any member."""
MEMBER_KEYS = ProcessKeys(coordinator=RUN.coordinator.public, own=MEMBER, is_joining=False)
ANY_ADDRESS = "tcp://127.0.0.1:*"


def open_hub(address: str = ANY_ADDRESS) -> Hub:
    """Open a coordinator's socket that hears `MEMBER`."""
    return Hub(address, RUN.coordinator, AdmittedKeys([MEMBER.public]))


def open_listening() -> ListeningSocket:
    """Open a coordinator's socket for a registry, which says whom it hears."""
    return ListeningSocket(ANY_ADDRESS, RUN, Path("members.json"))


def at(address: str) -> Listener:
    """What to know of whoever listens at an address, and proves to be the coordinator."""
    return Listener(address=address, public_key=RUN.coordinator.public)


def link_to(address: str, kind: ServiceKind, identity: str, incoming: Any) -> Link[Any]:
    """Make a link as a process has that was launched."""
    return Link(address, kind, identity, incoming, MEMBER_KEYS)


def dealer_to(address: str, own: KeyPair) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """Connect a bare socket, in a context of its own, that proves a key to the coordinator at an address."""
    return dealer_with(at(address), own)


def dealer_with(listener: Listener, own: KeyPair) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """Connect a bare socket, in a context of its own, that proves a key to a listener."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    curve.prove(socket, own, listener.public_key)
    socket.connect(listener.address)
    return context, socket
