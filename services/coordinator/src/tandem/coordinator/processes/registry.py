"""The processes of the run: their connections and heartbeats.

`admission` lets them in, and `names` has their names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tandem.common import messages, process_lifetime, texts, wire
from tandem.common.errors import WireError
from tandem.coordinator.processes.replies import Replies
from tandem.coordinator.scheduler import events
from tandem.launch.admission import (
    HeartbeatSettings,
    KeysOfTrainers,
    ListeningSocket,
    RegisteredProcess,
    ReservedNames,
    RunAdmission,
    RunDescription,
)
from tandem.launch.known_processes import KnownProcesses


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
    heartbeat = wire.encode(messages.Heartbeat())
    waits_since: float | None = None
    while not has_ended.wait(interval_s):
        if not process_lifetime.is_waiting_for_disk(thread_id):
            waits_since = None
            continue
        now = time.monotonic()
        waits_since = now if waits_since is None else waits_since
        if now - waits_since < process_lifetime.LONGEST_DISK_WAIT_S:
            hub.send_if_idle(list_peers(), heartbeat)


_CODECS: dict[messages.ServiceKind, wire.MessageCodec[Any]] = {
    "trainer": wire.MessageCodec(messages.FromTrainer),
    "rollout": wire.MessageCodec(messages.FromRollout),
    "refit": wire.MessageCodec(messages.FromRefit),
}


class ProcessRegistry:
    """A registry that turns messages of the hub into events, and names into connections."""

    def __init__(
        self,
        listening: ListeningSocket,
        expected: dict[messages.ServiceKind, int],
        config_json: bytes,
        run_id: str,
        heartbeat: HeartbeatSettings,
        replies: Replies,
        max_rollouts: int | None = None,
        known_processes: KnownProcesses | None = None,
        store_key: bytes = b"",
    ) -> None:
        """`max_rollouts` is the most engines at once, if the run has any; None sets no limit.

        `known_processes` is kept up to date with the admitted processes. `store_key` is told to each process.
        """
        self._known = known_processes
        self._hub = listening.hub
        self.describe_joining = listening.describe_joining
        self._admitted = listening.admitted
        self.names = ReservedNames(expected, max_rollouts, listening.admitted)
        """Names of all processes that the run has or expects."""
        self._heartbeat = heartbeat
        self._admission = RunAdmission(
            listening, self.names, known_processes, RunDescription(config_json, run_id, heartbeat, store_key)
        )
        self._replies = replies
        self._by_peer: dict[wire.HubPeer, RegisteredProcess] = {}
        self.processes: dict[str, RegisteredProcess] = {}
        self._keys = KeysOfTrainers(self._hub, self.processes)
        self.trainers = self._keys.admitted
        """Keys of all trainers."""
        self._last_beat = time.monotonic()
        self._stalls = wire.ThreadStalls()

    @property
    def address(self) -> str:
        """Address at which processes join."""
        return self._hub.address

    @property
    def patience_s(self) -> float:
        """Longest time until a lost process is noticed."""
        return self._heartbeat.timeout_s + self._heartbeat.interval_s

    def not_back(self) -> list[str]:
        """Return the processes of an earlier coordinator that have not come back in time; their names are free."""
        return self.names.give_up_expected() if time.monotonic() >= self.names.expected_until else []

    def dismiss(self, name: str, reason: str, *, is_over: bool = False, is_awaited: bool = True) -> None:
        """Free the name of a process that is lost, or is to restart, and tell it to exit: it may only hang.

        Its further messages are ignored, and it cannot come back. With `is_over`, it is not to restart either.
        `is_awaited` says whether the name is given out again before any other.
        """
        process = self.processes.pop(name, None)
        if process is not None:
            del self._by_peer[process.peer]
            shutdown = messages.Shutdown(reason=reason[: messages.MAX_TEXT], is_awaited_anew=not is_over)
            self._hub.send(process.peer, wire.encode(shutdown))
            self._admitted.remove(process.peer.key)
            self._keys.note(process)
        self._replies.forget(name)
        self.names.release(name, is_awaited=is_awaited)
        if self._known is not None:
            self._known.forget(name, has_left=is_over and not is_awaited)

    def begin_attempt(self) -> list[events.ProcessJoined]:
        """Forget earlier requests; return the processes that are present, as if they had joined now."""
        self._replies.forget_commands()
        now = time.monotonic()
        self.names.wait_until(now + self.patience_s)
        return [joined(process, now) for process in self.processes.values()]

    def receive(self, timeout_s: float) -> Iterator[events.Event]:
        """Wait up to `timeout_s` for messages, and yield their events.

        Then send heartbeats if they are due, and report processes that have been silent for too long.
        """
        for peer, frames in self._hub.receive(timeout_s):
            now = time.monotonic()
            process = self._by_peer.get(peer)
            if process is None:
                process = self._admission.admit(peer, frames, self.processes)
                if process is not None:
                    yield self._enter(process)
                continue
            process.last_seen = now
            try:
                event = self._read(process, _CODECS[process.hello.service].decode(frames), now)
            except WireError as error:
                reason = f"it broke the protocol: {error}"
                self._hub.send(peer, wire.encode(messages.Shutdown(reason=reason[: messages.MAX_TEXT])))
                yield events.ProcessLost(now=now, process=process.name, reason=reason)
                continue
            if event is not None:
                yield event
        now = time.monotonic()
        stall_s = self._stalls.until(now, timeout_s + self._heartbeat.interval_s)
        for process in self.processes.values():
            process.last_seen = min(now, process.last_seen + stall_s)
        self.beat()
        for process in list(self.processes.values()):  # the caller may remove the process meanwhile
            silent_s = now - process.last_seen
            if silent_s > self._heartbeat.timeout_s:
                yield events.ProcessLost(
                    now=now, process=process.name, reason=f"no heartbeat for {silent_s:.0f} s ({process.phase})"
                )

    def waker(self) -> Callable[[], None]:
        """Return what ends a wait of `receive`, from any thread."""
        return self._hub.waker()

    def command(self, name: str, command: messages.AnyCommand, frames: wire.Frames) -> None:
        """Send a process a request for the first time; its replies are checked against it."""
        if not self._keys.are_told:
            self._keys.tell()
        self._replies.expect(name, command)
        self.send(name, frames)

    def send(self, name: str, frames: wire.Frames) -> bool:
        """Send to a process; return False if its connection is gone."""
        return self._hub.send(self.processes[name].peer, frames)

    def broadcast(self, message: messages.Message) -> None:
        """Send to every process that can still be reached."""
        for process in self.processes.values():
            self._hub.send(process.peer, wire.encode(message))

    def beat(self) -> None:
        """Send a heartbeat to all processes, if it is due."""
        now = time.monotonic()
        if now - self._last_beat >= self._heartbeat.interval_s:
            self._last_beat = now
            self.broadcast(messages.Heartbeat())
            if not self._keys.are_told:
                self._keys.tell()

    def beat_in_disk_waits(self) -> contextlib.AbstractContextManager[None]:
        """Have heartbeats sent to all processes whenever the calling thread waits for a disk."""
        return send_heartbeats_in_disk_waits(self._hub, self._list_peers, self._heartbeat.interval_s)

    def _list_peers(self) -> list[wire.HubPeer]:
        return [*self._by_peer]

    def _read(self, process: RegisteredProcess, received: wire.ReceivedMessage[Any], now: float) -> events.Event | None:
        """Return the event of a message. Raise `WireError` for an invalid reply."""
        match received.message:
            case messages.Heartbeat(phase=phase, trainer_keys=number):
                process.phase = texts.shorten(phase)
                if number < process.trainer_keys:  # they may have been lost with a connection
                    process.trainer_keys, self._keys.are_told = number, False
                return None
            case messages.Hello():
                return None  # sent again before the welcome arrived
            case messages.Leaving():
                return events.EngineDraining(now=now, process=process.name)
            case messages.Goodbye(reason=reason):
                return events.ProcessLost(now=now, process=process.name, reason=f"it left: {texts.shorten(reason)}")
            case reply:
                if not self._replies.take(process.name, reply, received.arrays):
                    return None  # a repeat, or the answer to an abandoned request
                if isinstance(reply, messages.Failed):
                    return events.CommandErred(now=now, process=process.name, failed=_readable(reply))
                return events.ProcessReplied(now=now, process=process.name, reply=reply)

    def _enter(self, process: RegisteredProcess) -> events.ProcessJoined:
        """Enter a process that was admitted."""
        self._by_peer[process.peer] = self.processes[process.name] = process
        self._keys.note(process)
        self._keys.are_told = False
        return joined(process, process.last_seen)


def joined(process: RegisteredProcess, now: float) -> events.ProcessJoined:
    """Return the event of an admitted process."""
    return events.ProcessJoined(now=now, process=process.name, kind=process.hello.service, public_key=process.peer.key)


def _readable(failed: messages.Failed) -> messages.Failed:
    """Return a process's error in printable form: its text may be anything."""
    return msgspec.structs.replace(
        failed,
        phase=texts.shorten(failed.phase),
        error=texts.shorten(failed.error),
        traceback=texts.shorten(failed.traceback, messages.MAX_TRACEBACK),
    )
