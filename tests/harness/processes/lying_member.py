"""A process that will not hear that it is no member any more, and says what is not so: a script that tests start.

``KIND ARGUMENTS...``. Neither the coordinator's silence nor its `Shutdown` ends it. Once the working directory has the
file ``lies``, it says hello again and again, and that it could not carry out any of the commands which the process in
its place may have; whoever fetches samples from it gets other tokens than were made. It prints what it does.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tandem.common import wire
from tandem.common.messages import PROTOCOL_VERSION, Failed, Hello
from tandem.common.wire.link import FramePump
from tandem.launch.service import ServiceContext
from tandem.samples.sample_store import SampleStore

LIES = Path("lies")
_EVERY_S = 0.2
_NUM_COMMANDS = 200
_FOR_EVER_S = 1e6
_TOLD = (1, 10, 20)

_real_init = ServiceContext.__init__
_real_pump_init = FramePump.__init__
_real_forward = FramePump._forward_incoming
_real_found = SampleStore._find_samples


def _init(context: ServiceContext, link: Any, *arguments: Any) -> None:
    _real_init(context, link, *arguments)
    threading.Thread(target=_lie, args=(link,), daemon=True).start()


def _lie(link: Any) -> None:
    hello = Hello(protocol_version=PROTOCOL_VERSION, service=sys.argv[1], host=socket.gethostname(), pid=os.getpid())
    num_lies = 0
    while True:
        time.sleep(_EVERY_S)
        if not LIES.exists():
            continue
        link.send(wire.encode(hello))
        for command_id in range(_NUM_COMMANDS):
            failed = Failed(command_id=command_id, phase="lying", error="it is a lie", expected=True, traceback="")
            link.send(wire.encode(failed))
        num_lies += 1
        if num_lies in _TOLD:
            print(f"has lied {num_lies} times", flush=True)


def _pump_init(pump: Any, dealer: Any, queued: Any, arrived: Any, hello: Any, welcome: Any, *arguments: Any) -> None:
    patient = msgspec.structs.replace(welcome, heartbeat_timeout_s=_FOR_EVER_S)
    _real_pump_init(pump, dealer, queued, arrived, hello, patient, *arguments)
    pump._arrived = _DeafTo(arrived)


class _DeafTo:
    """Passes on what arrives, but for `Shutdown`."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def send_multipart(self, frames: list[Any], **options: Any) -> None:
        if msgspec.msgpack.decode(frames[0].buffer)["type"] == "Shutdown":
            print("was told to go", flush=True)
        else:
            self._socket.send_multipart(frames, **options)

    def close(self) -> None:
        self._socket.close()


def _forward(pump: Any, now: float) -> None:
    _real_forward(pump, now)
    pump._end_by = math.inf  # nothing is a `Shutdown` that it would end by


def _found(store: Any, request: Any) -> Any:
    found = _real_found(store, request)
    if not LIES.exists():
        return found
    print("has given away other tokens", flush=True)
    return found.replace(token_ids_T=np.ascontiguousarray(found.token_ids_T[::-1]))


if __name__ == "__main__":
    ServiceContext.__init__ = _init  # type: ignore[method-assign]
    FramePump.__init__ = _pump_init  # type: ignore[method-assign]
    FramePump._forward_incoming = _forward  # type: ignore[method-assign]
    SampleStore._find_samples = _found  # type: ignore[method-assign]
    sys.exit(importlib.import_module(f"tandem.{sys.argv[1]}.cli").main(sys.argv[2:]))
