"""Membership of the run: admission, names, heartbeats, and which connection is whose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.common import wire
from tandem.common.errors import VersionMismatch, WireError
from tandem.common.messages import (
    MAX_TEXT,
    Failed,
    FromRefit,
    FromRollout,
    FromTrainer,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Order,
    Refused,
    ServiceKind,
    Shutdown,
    Welcome,
)
from tandem.coordinator.run.launch import Launched
from tandem.coordinator.run.replies import Replies
from tandem.coordinator.scheduler.events import Erred, Event, Joined, Lost, Replied

_CODECS: dict[ServiceKind, wire.Codec[Any]] = {
    "trainer": wire.Codec(FromTrainer),
    "rollout": wire.Codec(FromRollout),
    "refit": wire.Codec(FromRefit),
}
_hello_codec: wire.Codec[Hello] = wire.Codec(Hello)


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's terms for staying in touch."""

    interval_s: float
    timeout_s: float


class Member:
    """One admitted process."""

    def __init__(self, hello: Hello, name: str, peer: bytes, now: float) -> None:
        self.hello = hello
        self.name = name
        self.peer = peer
        self.last_seen = now
        self.phase = "idle"


class Registry:
    """Turns what arrives at the hub into events, and names into connections.

    Launched processes keep the number they were launched with; processes started by hand get the numbers after those,
    in the order in which they join.
    """

    def __init__(
        self,
        hub: wire.Hub,
        expected: dict[ServiceKind, int],
        config_json: bytes,
        run_id: str,
        pulse: Pulse,
        replies: Replies,
    ) -> None:
        self._hub = hub
        self._expected = expected
        self._config_json = config_json
        self._run_id = run_id
        self._pulse = pulse
        self._replies = replies
        self._reserved: dict[str, str] = {}
        self._by_peer: dict[bytes, Member] = {}
        self.members: dict[str, Member] = {}
        self._last_beat = time.monotonic()

    @property
    def address(self) -> str:
        """Where processes join."""
        return self._hub.address

    def reserve(self, launched: Launched) -> None:
        """Keep the name of a process that was just launched."""
        self._reserved[launched.launch_id] = launched.name

    def forget(self, name: str) -> None:
        """Free the name of a member that is lost; whatever it still sends is dropped."""
        member = self.members.pop(name, None)
        if member is not None:
            del self._by_peer[member.peer]
        self._replies.forget(name)
        self._reserved = {launch_id: kept for launch_id, kept in self._reserved.items() if kept != name}

    def receive(self, timeout_s: float) -> Iterator[tuple[Event, wire.Arrays]]:
        """Wait up to `timeout_s` for something to happen; yield what did, with its arrays."""
        for peer, frames in self._hub.receive(timeout_s):
            now = time.monotonic()
            member = self._by_peer.get(peer)
            if member is None:
                joined = self._admit(peer, frames, now)
                if joined is not None:
                    yield joined, {}
                continue
            member.last_seen = now
            try:
                received = _CODECS[member.hello.service].decode(frames)
                event = self._to_event(member, received, now)
            except WireError as error:
                why = f"it broke the protocol: {error}"
                self._hub.send(peer, wire.encode(Shutdown(reason=why[:MAX_TEXT])))
                yield Lost(now=now, member=member.name, why=why), {}
                continue
            if event is not None:
                yield event, received.arrays
        yield from ((event, {}) for event in self._watch(time.monotonic()))

    def order(self, name: str, order: Order, frames: wire.Frames) -> None:
        """Send a member an order for the first time; its replies are checked against it."""
        self._replies.ordered(name, order)
        self.send(name, frames)

    def send(self, name: str, frames: wire.Frames) -> bool:
        """Send to a member; False if its connection is gone."""
        return self._hub.send(self.members[name].peer, frames)

    def broadcast(self, message: Message) -> None:
        """Send to every member that can still be reached."""
        for member in self.members.values():
            self._hub.send(member.peer, wire.encode(message))

    def _to_event(self, member: Member, received: wire.Received[Any], now: float) -> Event | None:
        """Return what a message means. Raises `WireError` for a reply that cannot be one."""
        match received.message:
            case Heartbeat(phase=phase):
                member.phase = phase
                return None
            case Hello():
                return None  # sent again before the welcome arrived
            case Goodbye(reason=reason):
                return Lost(now=now, member=member.name, why=f"it left: {reason}")
            case reply:
                if not self._replies.take(member.name, reply, received.arrays):
                    return None  # a repetition, or the answer to an order that was abandoned
                if isinstance(reply, Failed):
                    return Erred(now=now, member=member.name, failed=reply)
                return Replied(now=now, member=member.name, reply=reply)

    def _admit(self, peer: bytes, frames: wire.Frames, now: float) -> Event | None:
        """Welcome or refuse a process that says hello; anything else from a stranger is dropped."""
        try:
            wire.check_version(frames[0])
            hello = _hello_codec.decode(frames).message
        except VersionMismatch as mismatch:
            self._hub.send(peer, wire.encode(Refused(reason=str(mismatch)[:MAX_TEXT])))
            return None
        except WireError:
            return None
        name = self._name_for(hello)
        if name is None:
            reason = self._why_not(hello)
            self._hub.send(peer, wire.encode(Refused(reason=reason)))
            return None
        member = Member(hello, name, peer, now)
        self._by_peer[peer] = self.members[name] = member
        welcome = Welcome(
            member=name,
            index=int(name.rpartition("-")[2]),
            run_id=self._run_id,
            heartbeat_interval_s=self._pulse.interval_s,
            heartbeat_timeout_s=self._pulse.timeout_s,
            config_json=self._config_json,
        )
        self._hub.send(peer, wire.encode(welcome))
        return Joined(now=now, member=name, kind=hello.service)

    def _name_for(self, hello: Hello) -> str | None:
        if hello.launch_id:
            return self._reserved.get(hello.launch_id)
        taken = {*self.members, *self._reserved.values()}
        places = range(self._expected.get(hello.service, 0))
        if hello.index is not None:
            places = range(hello.index, hello.index + (hello.index in places))
        names = (f"{hello.service}-{index}" for index in places)
        return next((name for name in names if name not in taken), None)

    def _why_not(self, hello: Hello) -> str:
        """Say why there is no place for a process."""
        wanted = self._expected.get(hello.service, 0)
        processes = f"{wanted} {hello.service} process{'' if wanted == 1 else 'es'}"
        if hello.index is None:
            return f"the run has its {processes} already"
        if hello.index < wanted:
            return f"{hello.service}-{hello.index} is in the run already"
        return f"there is no {hello.service}-{hello.index}: the run has {processes}, counted from 0"

    def _watch(self, now: float) -> Iterator[Event]:
        """Beat when it is time; report members that have been silent for too long."""
        if now - self._last_beat >= self._pulse.interval_s:
            self._last_beat = now
            self.broadcast(Heartbeat())
        for member in list(self.members.values()):  # who hears of it may forget the member
            silent_s = now - member.last_seen
            if silent_s > self._pulse.timeout_s:
                yield Lost(now=now, member=member.name, why=f"no heartbeat for {silent_s:.0f} s ({member.phase})")
