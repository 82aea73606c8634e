"""Admission: which processes may join a run, by which names and keys, and what each is told.

Launched processes keep the number they were launched with. Processes started by hand get the numbers after those, in
the order in which they join, or that of an awaited process. All are known by their keys; the key of a lost process is
rejected.
"""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.common import messages, wire
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import VersionMismatch, WireError
from tandem.common.keys import Key, RunKeys
from tandem.common.texts import shorten
from tandem.launch.child import LaunchedProcess
from tandem.launch.known_processes import KnownProcesses

_hello_codec: wire.MessageCodec[messages.Hello] = wire.MessageCodec(messages.Hello)
_ANOTHER_GOES_ON = "another coordinator goes on with the run, and this process is started again"
_MOST_REGISTERED = 10_000
_MOST_ROLLOUTS = 1_000_000
"""Most rollout engines, if no limit is set."""


class ReservedNames:
    """The names that the run has, and the keys that they are reserved for."""

    def __init__(
        self, expected: dict[messages.ServiceKind, int], max_rollouts: int | None, admitted: AdmittedKeys
    ) -> None:
        """`max_rollouts` is the most engines at once, if the run has any; None sets no limit.

        Keys are admitted in `admitted`, and removed from it.
        """
        self._expected = expected
        self._admitted = admitted
        self._places: dict[messages.ServiceKind, range] = {kind: range(count) for kind, count in expected.items()}
        if expected.get("rollout"):
            self._places["rollout"] = range(_MOST_ROLLOUTS if max_rollouts is None else max_rollouts)
        self._registered: dict[Key, None] = {}
        """Keys that are registered and have not said hello yet, the oldest first."""
        self._reserved: dict[Key, str] = {}
        self._expected_back: dict[str, Key] = {}
        """Processes of an earlier coordinator that have not said hello to this one yet."""
        self._is_launched: set[str] = set()
        """Names of those that certainly exist."""
        self.expected_until = math.inf
        """When they are given up, by `time.monotonic`."""
        self._leaving: dict[Key, None] = {}
        """Keys of the others, which are told to exit."""
        self._awaited: dict[str, None] = {}
        """Names of lost processes that the run must replace; they are given out first."""

    def reserve(self, *launched: LaunchedProcess) -> None:
        """Reserve the names of processes that were just launched."""
        self._reserved |= {each.public_key: each.name for each in launched}

    def register(self, key: Key) -> None:
        """Admit a process by a key that it made itself."""
        self._registered[key] = None
        self._admitted.add(key)
        while len(self._registered) > _MOST_REGISTERED:
            oldest = next(iter(self._registered))
            del self._registered[oldest]
            self._admitted.remove(oldest)

    def has_place_for(self, key: Key) -> bool:
        """Return whether a process with this key may get a name; an admitted one has its own already."""
        return key in self._reserved or key in self._registered

    def needs(self, name: str) -> bool:
        """Return whether the run needs the process of this name; it can do without extra ones."""
        kind, _, index = name.rpartition("-")
        return any(kind == expected and int(index) < count for expected, count in self._expected.items())

    def find(self, hello: messages.Hello, key: Key, present: Container[str]) -> str | None:
        """Return the name for a process that says hello; None if there is no place. `present` are those that joined."""
        if key in self._reserved:
            name = self._reserved[key]
            return name if name not in present and name.startswith(f"{hello.service}-") else None
        reserved = {*self._reserved.values()}
        places = self._places.get(hello.service, range(0))
        first = [name for name in self._awaited if name.startswith(f"{hello.service}-")]
        if hello.index is not None:
            places, first = range(hello.index, hello.index + (hello.index in places)), []
        expected_indices = range(min(places.stop, self._expected.get(hello.service, 0)))[places.start :]
        names = [*first, *(f"{hello.service}-{index}" for index in expected_indices)]
        # A process that is expected back may not come, unless it was just started.
        vague = [name for name in names if name in self._expected_back and name not in self._is_launched]
        more = (f"{hello.service}-{index}" for index in range(max(places.start, expected_indices.stop), places.stop))
        free, beyond = (
            (name for name in group if name not in present and name not in reserved) for group in (names, more)
        )
        return next(itertools.chain(free, vague, beyond), None)

    def take(self, name: str, key: Key) -> None:
        """Note that the process with this key has joined under this name."""
        if self._expected_back.get(name) == key:
            del self._expected_back[name]
        else:
            self._give_up(name)  # the first to come gets it
        self._registered.pop(key, None)
        self._awaited.pop(name, None)

    def release(self, name: str, *, is_awaited: bool) -> None:
        """Free a name; `is_awaited` says whether it is given out again before any other."""
        self._awaited.pop(name, None)
        if is_awaited:
            self._awaited[name] = None
        self._give_up(name)
        for key in [key for key, reserved_name in self._reserved.items() if reserved_name == name]:
            del self._reserved[key]
            self._admitted.remove(key)

    def refusal(self, hello: messages.Hello) -> messages.Refused:
        """Describe why there is no place for a process."""
        num_places = len(self._places.get(hello.service, range(0)))
        limit_note = " (cluster.max_rollouts)" if num_places > self._expected.get(hello.service, 0) else ""
        processes = f"{num_places} {hello.service} process{'' if num_places == 1 else 'es'}{limit_note}"
        if hello.index is None:
            return messages.Refused(reason=f"the run has its {processes} already")
        if hello.index < num_places:
            return messages.Refused(reason=f"{hello.service}-{hello.index} is in the run already")
        reason = f"there is no {hello.service}-{hello.index}: the run has {processes}, counted from 0"
        return messages.Refused(reason=reason, is_for_good=True)

    # --- processes of an earlier coordinator -------------------------------------------------------------------------

    def expect_back(self, earlier: Mapping[str, Key], launched: Iterable[str]) -> None:
        """Reserve the names of an earlier coordinator's processes.

        The `launched` ones certainly exist; the place of another is given to the first process that joins.
        """
        self._expected_back |= earlier
        self._is_launched |= {*launched}
        self._reserved |= {key: name for name, key in earlier.items()}
        for key in earlier.values():
            self._admitted.add(key)

    def wait_until(self, when: float) -> None:
        """Expect them until then at most, if there are any."""
        if self._expected_back:
            self.expected_until = min(self.expected_until, when)

    def give_up_expected(self) -> list[str]:
        """Return the processes that have not come back; their names are free again."""
        names = [*self._expected_back]
        for name in names:
            self._give_up(name)
        self.expected_until = math.inf
        return names

    def send_away(self, keys: Iterable[Key]) -> None:
        """Tell these processes of an earlier coordinator to exit, whenever they are heard."""
        for key in keys:
            self._leaving[key] = None
            self._admitted.add(key)

    def is_sent_away(self, key: Key) -> bool:
        """Return, once, whether a process is to exit; its key is rejected from then on."""
        if key not in self._leaving:
            return False
        del self._leaving[key]
        self._admitted.remove(key)
        return True

    def _give_up(self, name: str) -> None:
        """Free the name of a process that is expected back."""
        self._is_launched.discard(name)
        if (key := self._expected_back.pop(name, None)) is not None:
            self._reserved.pop(key, None)
            self._admitted.remove(key)


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's settings for heartbeats."""

    interval_s: float
    timeout_s: float
    orphan_timeout_s: float = 0.0


class RegisteredProcess:
    """One admitted process."""

    def __init__(self, hello: messages.Hello, name: str, peer: wire.HubPeer, now: float) -> None:
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
    store_key: bytes = b""
    """The run's key for signatures in ``refit.store``."""


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
            self._hub.send(peer, wire.encode(messages.Shutdown(reason=_ANOTHER_GOES_ON, is_awaited_anew=True)))
            return None
        try:
            wire.check_version(frames[0])
            hello = _hello_codec.decode(frames).message
            hello = msgspec.structs.replace(hello, host=shorten(hello.host, messages.MAX_NAME))
        except VersionMismatch as mismatch:
            self._hub.send(
                peer, wire.encode(messages.Refused(reason=str(mismatch)[: messages.MAX_TEXT], is_for_good=True))
            )
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
            self._hub.send(peer, wire.encode(messages.KeyAccepted()))
            return None
        return self._welcome(peer, hello, name)

    def _welcome(self, peer: wire.HubPeer, hello: messages.Hello, name: str) -> RegisteredProcess:
        self._names.take(name, peer.key)
        if self._known is not None:
            self._known.note(name, peer.key)
        run = self._run
        welcome = messages.Welcome(
            name=name,
            index=int(name.rpartition("-")[2]),
            run_id=run.run_id,
            heartbeat_interval_s=run.heartbeat.interval_s,
            heartbeat_timeout_s=run.heartbeat.timeout_s,
            orphan_timeout_s=run.heartbeat.orphan_timeout_s,
            config_json=run.config_json,
            store_key=run.store_key,
        )
        self._hub.send(peer, wire.encode(welcome))
        return RegisteredProcess(hello, name, peer, time.monotonic())


class KeysOfTrainers:
    """The keys of a run's trainers, and whether all engines know them."""

    def __init__(self, hub: wire.Hub, processes: Mapping[str, RegisteredProcess]) -> None:
        """Take the way to the processes, and those that there are, by name."""
        self._hub = hub
        self._processes = processes
        self.admitted = AdmittedKeys()
        """Keys of all trainers."""
        self._number = 0
        """Number of changes of these."""
        self.are_told = True

    def note(self, changed: RegisteredProcess) -> None:
        """Admit the current trainers, and no others, to the samples."""
        if changed.hello.service == "trainer":
            self.admitted.replace(m.peer.key for m in self._processes.values() if m.hello.service == "trainer")
            self._number += 1
            self.are_told = False

    def tell(self) -> None:
        """Tell engines which trainers may fetch samples."""
        message = wire.encode(messages.TrainerKeys(number=self._number, public_keys=self.admitted.keys()))
        for process in self._processes.values():
            if process.hello.service == "rollout" and process.trainer_keys < self._number:
                self._hub.send(process.peer, message)
                process.trainer_keys = self._number
        self.are_told = True
