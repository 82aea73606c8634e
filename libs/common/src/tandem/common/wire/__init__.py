"""The wire: ZeroMQ sockets, framing and heartbeats; only this package and `curve` import zmq.

A message is two or more frames: the header (msgpack; one tagged union per link, see `tandem.common.messages`), the
manifest of its arrays (msgpack: name, dtype and shape of each), then one raw frame per array. Arrays are sent from
and received into their own memory: they are not copied into msgpack, and nothing is ever unpickled.

Every socket proves a key and accepts only known keys (`tandem.common.keys`). All traffic is encrypted.

The coordinator holds one ROUTER socket (`Hub`), every other process one DEALER (`Link`). A `Link` runs in a thread
of its own, so that heartbeats flow while the process computes. If the coordinator is lost, the thread ends the
process within the heartbeat timeout, whatever it is doing. If the coordinator's `Welcome` says so, it waits longer:
it says hello over each new connection until another coordinator of the run readmits it.
"""

from tandem.common.wire.frames import (
    Arrays,
    Frames,
    MessageCodec,
    ReceivedMessage,
    check_version,
    encode,
)
from tandem.common.wire.hub import AnsweringThread, CallerConnections, Hub, HubPeer
from tandem.common.wire.link import EXIT_AWAITED_ANEW, EXIT_NOT_ADMITTED, Link, ThreadStalls, exit_code

__all__ = [
    "EXIT_AWAITED_ANEW",
    "EXIT_NOT_ADMITTED",
    "AnsweringThread",
    "Arrays",
    "CallerConnections",
    "Frames",
    "Hub",
    "HubPeer",
    "Link",
    "MessageCodec",
    "ReceivedMessage",
    "ThreadStalls",
    "check_version",
    "encode",
    "exit_code",
]
