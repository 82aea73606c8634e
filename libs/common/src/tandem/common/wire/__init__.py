"""The wire: ZeroMQ sockets, framing and heartbeats; beside `curve` nothing else imports zmq.

A message is two or more frames: the header (msgpack, one tagged union a link, see `tandem.common.messages`), the
manifest of its arrays (msgpack: name, dtype and shape of each), then one raw frame an array. Arrays are sent from and
received into their own memory: nothing copies them into msgpack and nothing is ever unpickled.

Every socket proves a key and hears those alone whom it knows by theirs (`tandem.common.keys`). All that crosses it is
encrypted.

The coordinator holds one ROUTER socket (`Hub`), every other process one DEALER (`Link`). A `Link` lives in a thread of
its own, so that heartbeats flow while the process computes, and so that a process whose coordinator is gone ends within
the heartbeat timeout whatever it is doing. Where the coordinator's `Welcome` has told it to, it waits longer: it says
hello again over each new connection, and another coordinator of the run takes it up.
"""

from tandem.common.wire.callers import Callers
from tandem.common.wire.frames import (
    Arrays,
    Codec,
    Frames,
    Received,
    check_version,
    encode,
)
from tandem.common.wire.hub import Hub, Peer
from tandem.common.wire.link import Link
from tandem.common.wire.pump import EXIT_AWAITED_ANEW, EXIT_NOT_ADMITTED, exit_code
from tandem.common.wire.stalls import Stalls

__all__ = [
    "EXIT_AWAITED_ANEW",
    "EXIT_NOT_ADMITTED",
    "Arrays",
    "Callers",
    "Codec",
    "Frames",
    "Hub",
    "Link",
    "Peer",
    "Received",
    "Stalls",
    "check_version",
    "encode",
    "exit_code",
]
