"""Admission: which processes may join a run, by the keys that they prove, and what each is told."""

from __future__ import annotations

import shlex
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.common import wire
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import VersionMismatch, WireError
from tandem.common.keys import Key, RunKeys
from tandem.common.messages import MAX_NAME, MAX_TEXT, Hello, KeyAccepted, Refused, Shutdown, Welcome
from tandem.common.texts import shorten
from tandem.launch.admission.known_processes import KnownProcesses
from tandem.launch.admission.names import ReservedNames

_hello_codec: wire.MessageCodec[Hello] = wire.MessageCodec(Hello)
_ANOTHER_GOES_ON = "another coordinator goes on with the run, and this process is started again"


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's settings for heartbeats."""

    interval_s: float
    timeout_s: float
    orphan_timeout_s: float = 0.0


class RegisteredProcess:
    """One admitted process."""

    def __init__(self, hello: Hello, name: str, peer: wire.HubPeer, now: float) -> None:
        self.hello = hello
        self.name = name
        self.peer = peer
        self.last_seen = now
        self.phase = "idle"
        self.trainer_keys = 0
        """Number of the newest `TrainerKeys` that was sent to it."""


def new_run_keys() -> RunKeys:
    """Return new keys for a run."""
    return RunKeys(coordinator=new_key_pair(), joining=new_key_pair())


class ListeningSocket:
    """The coordinator's socket, and the keys that it admits: at first only the joining key."""

    def __init__(self, address: str, keys: RunKeys, key_file: Path, known_keys: Iterable[Key] = ()) -> None:
        """Bind. Raise `ConfigError` if the address is taken or is invalid.

        `key_file` will have the keys for services. `known_keys` are admitted from the first moment on.
        """
        self.joining_key = keys.joining.public
        """A process that proves it may register a key of its own."""
        self.admitted = AdmittedKeys([self.joining_key, *known_keys])
        self.hub = wire.Hub(address, keys.coordinator, self.admitted)
        self._key_file = key_file

    def describe_joining(self, kind: str) -> str:
        """Return the command that starts a service of this run."""
        return f"{kind} --coordinator {self.hub.address} --key-file {shlex.quote(str(self._key_file))}"


class RunDescription(NamedTuple):
    """The run, as a process that joins is told of it."""

    config_json: bytes
    run_id: str
    heartbeat: HeartbeatSettings


class RunAdmission:
    """Lets processes into a run."""

    def __init__(
        self,
        listening: ListeningSocket,
        names: ReservedNames,
        known_processes: KnownProcesses | None,
        run: RunDescription,
    ) -> None:
        """`known_processes` is kept up to date with the admitted processes."""
        self._hub = listening.hub
        self._joining_key = listening.joining_key
        self._names = names
        self._known = known_processes
        self._run = run

    def admit(self, peer: wire.HubPeer, frames: wire.Frames, present: Container[str]) -> RegisteredProcess | None:
        """Welcome or reject a process that says hello; drop anything else. `present` are those that joined."""
        if self._names.is_sent_away(peer.key):
            self._hub.send(peer, wire.encode(Shutdown(reason=_ANOTHER_GOES_ON, is_awaited_anew=True)))
            return None
        try:
            wire.check_version(frames[0])
            hello = _hello_codec.decode(frames).message
            hello = msgspec.structs.replace(hello, host=shorten(hello.host, MAX_NAME))
        except VersionMismatch as mismatch:
            self._hub.send(peer, wire.encode(Refused(reason=str(mismatch)[:MAX_TEXT], is_for_good=True)))
            return None
        except WireError:
            return None
        if (peer.key == self._joining_key) != (hello.registers is not None):
            return None  # the joining key serves to register, and only that
        if hello.registers is None and not self._names.has_place_for(peer.key):
            return None  # a second connection of an admitted process
        name = self._names.find(hello, peer.key, present)
        if name is None:
            self._hub.send(peer, wire.encode(self._names.refusal(hello)))
            return None
        if hello.registers is not None:
            self._names.register(hello.registers)
            self._hub.send(peer, wire.encode(KeyAccepted()))
            return None
        return self._welcome(peer, hello, name)

    def _welcome(self, peer: wire.HubPeer, hello: Hello, name: str) -> RegisteredProcess:
        self._names.take(name, peer.key)
        if self._known is not None:
            self._known.note(name, peer.key)
        run = self._run
        welcome = Welcome(
            name=name,
            index=int(name.rpartition("-")[2]),
            run_id=run.run_id,
            heartbeat_interval_s=run.heartbeat.interval_s,
            heartbeat_timeout_s=run.heartbeat.timeout_s,
            orphan_timeout_s=run.heartbeat.orphan_timeout_s,
            config_json=run.config_json,
        )
        self._hub.send(peer, wire.encode(welcome))
        return RegisteredProcess(hello, name, peer, time.monotonic())
