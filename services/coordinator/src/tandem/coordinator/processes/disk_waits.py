"""Heartbeats while the coordinator waits for a disk: the others would take it for lost, and end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tandem.common import wire
from tandem.common.messages import Heartbeat
from tandem.common.process_lifetime import LONGEST_DISK_WAIT_S, is_waiting_for_disk


@contextlib.contextmanager
def send_heartbeats_in_disk_waits(
    hub: wire.Hub, list_peers: Callable[[], Iterable[wire.HubPeer]], interval_s: float
) -> Iterator[None]:
    """Have a thread send heartbeats whenever the calling thread waits for a disk, every `interval_s` seconds.

    A thread that syncs a file cannot do anything else until the disk has answered, which took half a minute on busy
    machines. One that hangs for another reason sends none. Nor does one whose disk has not answered for
    `LONGEST_DISK_WAIT_S`.
    """
    has_ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(hub, list_peers, interval_s, threading.get_native_id(), has_ended), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _watch(
    hub: wire.Hub,
    list_peers: Callable[[], Iterable[wire.HubPeer]],
    interval_s: float,
    thread_id: int,
    has_ended: threading.Event,
) -> None:
    heartbeat = wire.encode(Heartbeat())
    waits_since: float | None = None
    while not has_ended.wait(interval_s):
        if not is_waiting_for_disk(thread_id):
            waits_since = None
            continue
        now = time.monotonic()
        waits_since = now if waits_since is None else waits_since
        if now - waits_since < LONGEST_DISK_WAIT_S:
            hub.send_if_idle(list_peers(), heartbeat)
