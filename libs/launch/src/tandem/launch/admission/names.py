"""The names of the run's processes: which ones there are, and which the next process gets.

Launched processes keep the number they were launched with. Processes started by hand get the numbers after those, in
the order in which they join, or that of an awaited process. All are known by their keys; the key of a lost process is
rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping

from tandem.common.curve import AdmittedKeys
from tandem.common.keys import Key
from tandem.common.messages import Hello, Refused, ServiceKind
from tandem.launch.child import LaunchedProcess

_MOST_REGISTERED = 10_000
_MOST_ROLLOUTS = 1_000_000
"""Most rollout engines, if no limit is set."""


class ReservedNames:
    """The names that the run has, and the keys that they are reserved for."""

    def __init__(self, expected: dict[ServiceKind, int], max_rollouts: int | None, admitted: AdmittedKeys) -> None:
        """`max_rollouts` is the most engines at once, if the run has any; None sets no limit.

        Keys are admitted in `admitted`, and removed from it.
        """
        self._expected = expected
        self._admitted = admitted
        self._places: dict[ServiceKind, range] = {kind: range(count) for kind, count in expected.items()}
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

    def find(self, hello: Hello, key: Key, present: Container[str]) -> str | None:
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

    def refusal(self, hello: Hello) -> Refused:
        """Describe why there is no place for a process."""
        num_places = len(self._places.get(hello.service, range(0)))
        limit_note = " (cluster.max_rollouts)" if num_places > self._expected.get(hello.service, 0) else ""
        processes = f"{num_places} {hello.service} process{'' if num_places == 1 else 'es'}{limit_note}"
        if hello.index is None:
            return Refused(reason=f"the run has its {processes} already")
        if hello.index < num_places:
            return Refused(reason=f"{hello.service}-{hello.index} is in the run already")
        reason = f"there is no {hello.service}-{hello.index}: the run has {processes}, counted from 0"
        return Refused(reason=reason, is_for_good=True)

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
