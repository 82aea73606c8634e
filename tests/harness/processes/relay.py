"""A relay between one service and its coordinator, which may change what the service says.

It has the keys of both, as nobody has in earnest: it stands for a member gone wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from tandem.common import keys
from tandem.common.curve import AdmittedKeys, hear_processes, new_key_pair, prove
from tandem.common.keys import KeyPair, ProcessKeys, RunKeys, read_run_keys
from tandem.common.messages import PROTOCOL_VERSION, Hello, KeyAccepted, Refused, ServiceKind
from tandem.common.wire import Frames, MessageCodec, encode
from tandem.common.wire.gatekeeper import Gatekeeper

Tampering = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes a message, as plain values, or the arrays that come with it."""


def registered(coordinator: str, kind: ServiceKind, run: RunKeys) -> KeyPair:
    """Have a coordinator admit a key pair, as a service does that is started by hand; return it."""
    own = new_key_pair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        prove(socket, run.joining, run.coordinator.public)
        socket.connect(coordinator)
        hello = Hello(protocol_version=PROTOCOL_VERSION, service=kind, host="here", pid=1, registers=own.public)
        socket.send_multipart(encode(hello))
        assert socket.poll(10_000), "the coordinator does not answer"
        answer = MessageCodec[KeyAccepted | Refused](KeyAccepted | Refused).decode(socket.recv_multipart()).message
        assert isinstance(answer, KeyAccepted), answer
    return own


class Relay:
    """Passes frames on, both ways, and tampers with those that `is_wanted` picks by their message."""

    def __init__(
        self,
        coordinator: str,
        kind: ServiceKind,
        union: Any,
        is_wanted: Callable[[dict[str, Any]], bool],
        tamper: Tampering,
    ) -> None:
        run = read_run_keys(Path("run"))
        assert run is not None
        own = registered(coordinator, kind, run)
        file = Path(f"relayed-{own.public[:4].encode().hex()}.json")
        file.touch(mode=0o600)
        file.write_bytes(keys.encode(ProcessKeys(coordinator=run.coordinator.public, own=own, is_joining=False)))
        self._codec: MessageCodec[Any] = MessageCodec(union)
        self._is_wanted, self._tamper = is_wanted, tamper
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.LINGER, 0)
        Gatekeeper(self._context, AdmittedKeys([own.public]))
        hear_processes(self._front, run.coordinator)
        prove(self._back, own, run.coordinator.public)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.joins = ["--coordinator", f"tcp://127.0.0.1:{port}", "--key-file", str(file.absolute())]
        """What the service is told."""
        self._back.connect(coordinator)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()
        for socket in (self._front, self._back):
            socket.close()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        peer = b""
        while not self._is_over.is_set():
            ready = dict(poller.poll(50))
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                self._back.send_multipart(self._changed(frames))
            if self._back in ready:
                self._front.send_multipart([peer, *self._back.recv_multipart()])

    def _changed(self, frames: list[bytes]) -> Frames:
        plain = msgspec.msgpack.decode(frames[0])
        if not self._is_wanted(plain):
            return [*frames]
        received = self._codec.decode(frames)
        arrays = {name: array.copy() for name, array in received.arrays.items()}
        self._tamper(plain, arrays)
        return [msgspec.msgpack.encode(plain), *encode(received.message, arrays)[1:]]
